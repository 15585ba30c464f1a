"""One training on 1, 2, 4, … devices: what each further one costs a step, and how much faster the training gets

    scaling.py --devices 1,2,4 --out scaling.jsonl [--workloads b64,b1000] [--ways captured]

Weak scaling: each device keeps its batch. Strong scaling: the batch stays, and each device gets a part of it. All
ways of one workload run in one group of processes for each number of devices, in rounds, in an order that is
shuffled in each; a visit is `run_trial`, which verifies images, steps and weights, or fastai's own `distrib_ctx`,
which needs the package accelerate. Prints a table of medians; each visit is a line of the records."""
import random
from contextlib import nullcontext

import numpy as np
import pandas as pd
import torch
from fastai.learner import Learner
from gpubench.data import sets
from gpubench.data.loaders import get_dls
from gpubench.step.group import launch, n_ranks, rank
from gpubench.data.made import draw_synthetic
from gpubench.run.models import get_model
from gpubench.ground.record import append_record
from gpubench.ground.stats import median_ci, ratio_ci
from gpubench.watch.timing import StepTimerCallback
from gpubench.run.trial import Trial, run_trial

from common import device_of, device_parser, listed

BF16 = dict(precision='bf16', channels_last=True)
WORKLOADS = {
    'ResNet-18, 224 px, b256, bf16': dict(model='resnet18', size=224, n_channels=3, bs=256, max_images=8192, **BF16),
    'ResNet-18, 32 px, b64, bf16': dict(model='resnet18', size=32, n_channels=3, bs=64, max_images=20_000, **BF16),
    'ResNet-18, 32 px, b512, bf16': dict(model='resnet18', size=32, n_channels=3, bs=512, max_images=50_000, **BF16),
    'MNIST CNN, b1000, fp32': dict(model='lenet', size=28, bs=1000, max_images=60_000)}
STOCK = 'stock fastai, distrib_ctx'
GRAPH = dict(graph=True, defer_losses=True)
WAYS = {'eager, DDP': {}, 'captured, DDP': GRAPH, 'captured, one flat all-reduce': GRAPH | dict(all_reduce='flat'),
        'captured, compiled, one flat all-reduce': GRAPH | dict(all_reduce='flat', compile=True), STOCK: {}}
CPU_WAYS = {'eager, DDP': {}, 'eager, one flat all-reduce': dict(all_reduce='flat')}

def draw_once():
    "Let all visits of this process share the images of its workload, which at 224 px take many seconds to draw"
    images, pixels, stats = sets.ImageSet, {}, sets.ImageSet.measured_stats
    def draw(rows, **shape):
        if (key := np.asarray(rows).tobytes()) not in pixels: pixels[key] = draw_synthetic(rows, **shape)
        return pixels[key]
    def measured_stats(self):
        if 'stats' not in pixels: pixels['stats'] = stats(self)
        return pixels['stats']
    sets.draw_synthetic, images.measured_stats = draw, measured_stats

def stock(device, workload, bs):
    "Step times of fastai's own `distrib_ctx`, without the wait for data: it can't split the resident loader that the others have"
    import accelerate, fastai.distributed  # noqa: F401 (`distrib_ctx` needs the former and comes with the latter)
    o = dict(WORKLOADS[workload])
    names = 'size n_channels max_images'.split()
    dls = get_dls('synthetic', bs=bs//n_ranks(), loader='memory', device=device, **{k: o[k] for k in names if k in o})
    learn, timer = Learner(dls, get_model(o['model'], n_classes=dls.c, n_in=dls.n_in)), StepTimerCallback()
    if o.get('precision')=='bf16': learn = learn.to_bf16()
    dls.train.n = min(dls.train.n, 20*bs)
    group = learn.distrib_ctx(sync_bn=False) if n_ranks()>1 else nullcontext()
    with group, learn.no_bar(), learn.no_logging(): learn.fit(2, cbs=timer)
    steps = timer.to_df().query('epoch==1')
    return dict(status='ok', step_ms=median_ci(steps.step_ms-steps.wait_ms).mid, n_timed_steps=len(steps))

def visits(device, workload, n_rounds, max_s, ways, out):
    "All visits of a workload in this group: its ways, weak and strong, in shuffled rounds"
    n, found, kind = n_ranks(), [], torch.device(device).type
    draw_once()
    plans = [(way, bs_of) for way in ways for bs_of in (['weak', 'strong'] if n>1 else ['weak'])]
    for i in range(n_rounds):
        for way,scaling in random.Random(i).sample(plans, len(plans)):
            bs = WORKLOADS[workload]['bs']*(n if scaling=='weak' else 1)
            settings = dict(dataset='synthetic', loader='resident', device=kind, n_devices=n)
            settings |= WORKLOADS[workload] | dict(bs=bs)
            if way==STOCK: row = stock(device, workload, bs) | dict(n_devices=n, bs=bs)
            else: row = run_trial(Trial(**settings).but(**ways[way]), half_width=.01, max_s=max_s, whole_epoch=False)
            found.append(row | dict(workload=workload, way=way, scaling=scaling, visit=i))
            if rank()==0: append_record(out, found[-1])
    return found

def table(rows):
    "Medians of the visits: a step, what it costs more than on one device, and the efficiency; intervals of 95 %"
    df, found = pd.DataFrame(rows), []
    for (workload, way, scaling, n), o in df.groupby(['workload', 'way', 'scaling', 'n_devices'], sort=False):
        one = df[(df.workload==workload) & (df.way==way) & (df.n_devices==1)].step_ms
        row = dict(workload=workload, way=way, scaling=scaling, n=n, step_ms=o.step_ms.median())
        if n>1 and len(one):
            ratio = ratio_ci(o.step_ms, one)                          # how many times as long a step is as on one device
            share, base = (1 if scaling=='weak' else 1/n), one.median()
            row |= dict(added_ms=base*(ratio.mid-1), added_lo=base*(ratio.lo-1), added_hi=base*(ratio.hi-1),
                        efficiency=share/ratio.mid, lo=share/ratio.hi, hi=share/ratio.lo)
        found.append(row)
    return pd.DataFrame(found)

def main():
    p = device_parser(__doc__, out='a .jsonl file of records; rows are added')
    p.add_argument('--devices', type=listed(int), default=[1, 2], help='numbers of devices, such as 1,2,4,8')
    p.add_argument('--workloads', type=listed(), default=[''], help='parts of their names; all by default')
    p.add_argument('--ways', type=listed(), default=[''], help='parts of their names; all by default')
    p.add_argument('--rounds', type=int, default=5)
    p.add_argument('--max-s', type=float, default=3, help='seconds of timing a visit')
    args, rows = p.parse_args(), []
    device = device_of(args)
    def chosen(names, parts): # those of which a part is given
        found = {k: o for k,o in names.items() if any(part.lower() in k.lower() for part in parts)}
        if not found: p.error(f"nothing is called {', '.join(parts)}; there are: {'; '.join(names)}")
        return found
    names, ways = chosen(WORKLOADS, args.workloads), chosen(CPU_WAYS if device=='cpu' else WAYS, args.ways)
    for workload in names:
        for n in args.devices:
            found = launch(visits, workload, args.rounds, args.max_s, ways, args.out, n_devices=n, device=device)[0]
            rows += found
            shown = table(rows[-len(found):])[['workload', 'way', 'scaling', 'n', 'step_ms']]
            print(shown.round(3).to_string(index=False), flush=True)
    print(table(rows).round(3).to_string(index=False))

if __name__=='__main__': main()
