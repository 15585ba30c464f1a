"""What the benchmarks beside this file share: their command line, their JSON, runs that alternate, bars of figures, and a
Learner that is warm"""
import argparse, json, random
from statistics import median

import torch
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.core import Callback, CancelValidException
from fastai.callback.fp16 import MixedPrecision
from gpubench.run.trial import Trial, make_learner, resolve, warm_up

def parser(doc):
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

def out_parser(doc, out='the JSON file to write'):
    p = parser(doc)
    p.add_argument('--out', required=True, help=out)
    return p

def device_parser(doc, device='auto', **kwargs):
    "With the two options that most have; `device_of` returns the device that is meant"
    p = out_parser(doc, **kwargs)
    p.add_argument('--device', default=device, help='cuda, cpu or auto')
    return p

def device_of(args):
    from gpubench.ground.core import pick_device
    return str(pick_device(args.device))

def listed(kind=str):
    "The type of an option that takes values with commas between"
    return lambda text: [kind(o) for o in text.split(',')]

def write_json(path, machine=None, indent=1, **found):
    "What was found, with the machine: its description, or the device that was used"
    from gpubench.ground.core import describe_machine
    from gpubench.ground.record import plain_record
    machine = machine if isinstance(machine, dict) else describe_machine(machine)
    found = plain_record(dict(machine=machine, **found))
    with open(path, 'w') as f: json.dump(found, f, indent=indent)

def read_json(path):
    with open(path) as f: return json.load(f)

def spread(values, form='.3g', unit=''):
    "Median and range, such as '5.55 s (5.38 to 5.59)'"
    return f'{median(values):{form}}{unit} ({min(values):{form}} to {max(values):{form}})'

def difference(base, ours):
    "Mean of ours - base with its 95 % interval (Student's t of pairs)"
    import numpy as np
    from scipy.stats import ttest_1samp
    d = np.subtract(ours, base)
    if len(d)<2 or not d.std(): return d.mean(), d.mean(), d.mean()
    return d.mean(), *ttest_1samp(d, 0).confidence_interval()

def alternate(variants, rounds, run):
    "What `run(variant)` gives in each round, every variant once in a round, shuffled anew; the first round is warm-up"
    order, found, rng = list(variants), {o: [] for o in variants}, random.Random(0)
    for _ in range(rounds+1):
        rng.shuffle(order)
        for name in order: found[name].append(run(variants[name]))
    return {k: v[1:] for k,v in found.items()}

def draw_bar(ax, at, values, color, text, height=.6, label=None):
    "A bar that ends at the median, every run a dot"
    ax.barh(at, median(values), height=height, color=color, alpha=.35, label=label)
    ax.plot(values, [at]*len(values), 'o', color=color, alpha=.75, ms=5)
    ax.annotate(text, (max(values), at), (7, 0), va='center', textcoords='offset points')

def name_bars(ax, names):
    "Names at the bars, the first on top"
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names)-.5, -.5))
    ax.grid(False, axis='y')
    ax.tick_params(axis='y', length=0)

def finish(ax, title, machine, pad=6):
    "Title `pad` points above the axes, the machine below"
    import pandas as pd
    from gpubench.show.plot import caption
    ax.set_title(title, x=0, ha='left', pad=pad)
    ax.annotate(caption(pd.DataFrame([dict(device='cuda') | machine])), (0, 0), (0, -8), va='top', fontsize=9,
                textcoords='offset points', xycoords=('axes fraction', ax.xaxis.label))

# a training step
def search_kernels(is_on=True):
    "cuDNN times all kernels that it has for a shape, not just the first ten, and keeps the fastest"
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = is_on, 0

def bf16_callbacks(): return [MixedPrecision(amp_mode='bf16'), ChannelsLast()]

class NoValidationCallback(Callback):
    graph_safe = 'counts'                        # it acts in no batch
    def before_validate(self): raise CancelValidException()

def ready_learner(**fields):
    "The learner of a trial, warm, without the callback that looks at what is computed"
    trial = resolve(Trial(**fields))
    learn = make_learner(trial)
    with learn.no_bar(), learn.no_logging(): warm_up(learn, trial)
    learn.remove_cb(learn.seen)
    return learn
