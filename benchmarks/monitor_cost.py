"""What the MonitorCallback costs: milliseconds a step of the same training with and without it, four samples a second.

Runs alternate in shuffled rounds, each of `--seconds` at least and on the same Learner, so that a drift of the machine meets both alike.
'every sample' asks for as many samples as a GPU's sensors can tell apart (six a second).
The ratio to a training without is the median of the rounds' own ratios, with its order-statistic interval. Where runs differ by more than
the monitor costs, a second figure bounds it: the CPU time of its thread while the fit ran.

    python benchmarks/monitor_cost.py --device cuda --out benchmarks/results/monitor-cost-h200.json
"""
import argparse, json, random
from functools import partial
from statistics import median
from time import perf_counter

from gpubench.core import describe_machine, pick_device
from gpubench.stats import median_ci
import numpy as np
from fastai.callback.core import Callback, CancelFitException, CancelTrainException, CancelValidException

from gpubench.monitor import MonitorCallback
from gpubench.trial import Trial, make_learner, resolve, warm_up

class StepsCallback(Callback):
    "Ends the fit after `seconds`, without validation, and knows how many steps that were; the loss has just been read from the device"
    order = 59
    def __init__(self, seconds): self.seconds, self.n = seconds, 0
    def before_batch(self):
        if self.n==0: self.start = perf_counter()
    def after_batch(self):
        self.n, self.took_s = self.n+1, perf_counter()-self.start
        if self.took_s>=self.seconds: raise CancelTrainException()
    def before_validate(self): raise CancelFitException() if self.took_s>=self.seconds else CancelValidException()

VARIANTS = {'none': None, 'monitor': partial(MonitorCallback, interval_s=.25), 'every sample': partial(MonitorCallback, interval_s=1/6)}

def cases(device): # name, trial
    return [('resnet18_32px', dict(dataset='synthetic', model='resnet18', size=32, n_channels=3)),
            ('mnist_cnn', dict(dataset='synthetic', model='lenet', size=28, n_channels=1))]

def run(learn, make, seconds):
    "Milliseconds a step of one fit, and what the monitor says of itself"
    cb, steps = make and make(), StepsCallback(seconds)
    with learn.no_bar(), learn.no_logging(), learn.added_cbs([steps] + [cb]*bool(cb)): learn.fit(10**6)
    fits = cb.machine.fits if cb else []
    return 1e3*steps.took_s/steps.n, dict(cb.summary(), n_samples=fits[0].n, sample_cpu_ms=1e3*fits[0].cpu_s/max(1, fits[0].n-2),
                                          sample_wall_ms=1e3*median(o[1] for o in fits[0].pace.costs), notes=cb.notes) if cb else None

def measure(device, fields, seconds, rounds):
    "Milliseconds a step of each run of each variant, and what the last monitor said; batch 64, data on the device already"
    trial = resolve(Trial(device=device, bs=64, loader='resident', max_images=64*40 if device=='cpu' else 64*800, **fields))
    learn = make_learner(trial)
    learn.remove_cb(learn.seen)
    with learn.no_bar(), learn.no_logging(): warm_up(learn, trial)
    order, times, said, rng = list(VARIANTS), {o: [] for o in VARIANTS}, {}, random.Random(0)
    for _ in range(rounds+1):
        rng.shuffle(order)
        for name in order:
            ms, said[name] = run(learn, VARIANTS[name], seconds)
            times[name].append(ms)
    return {k: v[1:] for k,v in times.items()}, said                       # the first round is warm-up

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', default='auto')
    parser.add_argument('--rounds', type=int, default=20)
    parser.add_argument('--seconds', type=float, default=2., help='of each run')
    parser.add_argument('--case', choices=[o[0] for o in cases('cpu')], help='this one only')
    parser.add_argument('--out', required=True, help='the JSON file to write')
    args = parser.parse_args()
    device, results = str(pick_device(args.device)), []
    for name,fields in [o for o in cases(device) if args.case in (None, o[0])]:
        times, said = measure(device, fields, args.seconds, args.rounds)
        ratios = {k: vars(median_ci(np.array(v)/times['none'])) for k,v in times.items() if k!='none'}
        results.append(dict(case=name, rounds=args.rounds, seconds=args.seconds, step_ms=times, ratios=ratios, said=said))
        print(f'{name} on {device}, {args.rounds} runs of {args.seconds:g} s each')
        for k,v in times.items():
            r, s = ratios.get(k), said[k]
            print(f'  {k:14} {median(v):8.3f} ms a step' + (f"   {100*(r['mid']-1):+6.2f} % ({100*(r['lo']-1):+.2f} to {100*(r['hi']-1):+.2f})"
                  f"   {s['n_samples']} samples, {s['sample_cpu_ms']:.2f} ms CPU and {s['sample_wall_ms']:.2f} ms each, CPU share {100*s['monitor_cost_frac']:.2f} %" if r else ''))
        for o in said['monitor']['notes']: print('  note:', o)
        with open(args.out, 'w') as f: json.dump(dict(machine=describe_machine(device), device=device, results=results), f, indent=1)

if __name__=='__main__': main()
