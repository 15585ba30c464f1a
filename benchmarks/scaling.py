"""One training on 1, 2, 4, … devices: what each further one costs a step, and how much faster the training gets

    python benchmarks/scaling.py --devices 1,2,4 --out benchmarks/results/scaling_h200.jsonl

Weak scaling: each device keeps its batch. Strong scaling: the batch stays, and each device gets a part of it. All ways of one
workload run in one group of processes for each number of devices, in rounds, in an order that is shuffled in each; a visit is
`run_trial`, which verifies images, steps and weights. Prints a table of medians; each visit is a line of the records.
"""
import argparse
import random
from importlib.util import find_spec

import pandas as pd
import torch
from gpubench.core import pick_device
from gpubench.data import get_dls
from gpubench.group import agree, launch, n_ranks
from gpubench.models import get_model
from gpubench.record import append_record
from gpubench.stats import ratio_ci
from gpubench.trial import Trial, run_trial

BF16 = dict(precision='bf16', channels_last=True)
WORKLOADS = {
    'ResNet-18, 224 px, b256, bf16': dict(model='resnet18', size=224, n_channels=3, bs=256, max_images=8192, **BF16),
    'ResNet-18, 32 px, b64, bf16': dict(model='resnet18', size=32, n_channels=3, bs=64, max_images=20_000, **BF16),
    'ResNet-18, 32 px, b512, bf16': dict(model='resnet18', size=32, n_channels=3, bs=512, max_images=50_000, **BF16),
    'MNIST CNN, b1000, fp32': dict(model='lenet', size=28, bs=1000, max_images=60_000)}
GRAPH = dict(graph=True, defer_losses=True)
WAYS = {'eager, DDP': {}, 'captured, DDP': GRAPH, 'captured, one flat all-reduce': GRAPH | dict(all_reduce='flat'),
        'captured, compiled, flat': GRAPH | dict(all_reduce='flat', compile=True)}
CPU_WAYS = {'eager, DDP': {}, 'eager, one flat all-reduce': dict(all_reduce='flat')}

def stock(device, workload, bs):
    "Step times of fastai's own `distrib_ctx`, as its documentation has it; needs accelerate and GPUs"
    import fastai.distributed                                        # which adds `distrib_ctx`
    from fastai.learner import Learner
    from gpubench.stats import median_ci
    from gpubench.timing import StepTimerCallback
    o = dict(WORKLOADS[workload])
    names = 'size n_channels max_images'.split()
    dls = get_dls('synthetic', bs=bs//n_ranks(), loader='memory', device=device, **{k: o[k] for k in names if k in o})
    learn = Learner(dls, get_model(o['model'], n_classes=dls.c, n_in=dls.n_in))
    if o.get('precision')=='bf16': learn = learn.to_bf16()
    timer = StepTimerCallback()
    with learn.distrib_ctx(sync_bn=False), learn.no_bar(), learn.no_logging(): learn.fit(2, cbs=timer)
    ms = timer.to_df().query('epoch==1').step_ms
    return dict(status='ok', step_ms=median_ci(ms).mid, n_timed_steps=len(ms))

def visits(device, workload, n_rounds, max_s):
    "All visits of a workload in this group: its ways, weak and strong, in shuffled rounds"
    n, found, kind = n_ranks(), [], torch.device(device).type
    ways = WAYS if kind=='cuda' else CPU_WAYS
    with_stock = ['stock fastai'] if kind=='cuda' and n>1 and find_spec('accelerate') else []
    plans = [(way, bs_of) for way in [*ways, *with_stock] for bs_of in (['weak', 'strong'] if n>1 else ['weak'])]
    for i in range(n_rounds):
        for way,scaling in random.Random(agree(i)).sample(plans, len(plans)):
            bs = WORKLOADS[workload]['bs']*(n if scaling=='weak' else 1)
            settings = dict(dataset='synthetic', loader='resident', device=kind, **WORKLOADS[workload]) | dict(bs=bs, n_devices=n)
            if way in with_stock: row = stock(device, workload, bs) | dict(n_devices=n, bs=bs)
            else: row = run_trial(Trial(**settings).but(**ways[way]), half_width=.01, max_s=max_s, whole_epoch=False)
            found.append(row | dict(workload=workload, way=way, scaling=scaling, visit=i))
    return found

def table(rows):
    "Medians of the visits: a step, what it costs more than on one device, and the efficiency with its interval"
    df, found = pd.DataFrame(rows), []
    for (workload, way, scaling, n), o in df.groupby(['workload', 'way', 'scaling', 'n_devices'], sort=False):
        one = df[(df.workload==workload) & (df.way==(way if way!='stock fastai' else 'eager, DDP')) & (df.n_devices==1)].step_ms
        row = dict(workload=workload, way=way, scaling=scaling, n=n, step_ms=o.step_ms.median())
        if n>1 and len(one):
            ratio = ratio_ci(one, o.step_ms)                          # how many times as long a step was on one device
            share = 1 if scaling=='weak' else 1/n
            row |= dict(added_ms=row['step_ms']-one.median(), efficiency=ratio.mid*share, lo=ratio.lo*share, hi=ratio.hi*share)
        found.append(row)
    return pd.DataFrame(found)

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--devices', default='1,2', help='numbers of devices, such as 1,2,4,8')
    parser.add_argument('--device', default='auto', help='cuda, cpu or auto')
    parser.add_argument('--workloads', default='', help='parts of their names, separated by commas; all by default')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--max-s', type=float, default=3, help='seconds of timing a visit')
    parser.add_argument('--out', required=True, help='a .jsonl file of records; rows are added')
    args = parser.parse_args()
    names, rows = [o for o in WORKLOADS if any(p.lower() in o.lower() for p in args.workloads.split(','))], []
    for workload in names:
        for n in map(int, args.devices.split(',')):
            found = launch(visits, workload, args.rounds, args.max_s, n_devices=n, device=pick_device(args.device).type)[0]
            for o in found: append_record(args.out, o)
            rows += found
            print(table(rows[-len(found):])[['workload', 'way', 'scaling', 'n', 'step_ms']].round(3).to_string(index=False), flush=True)
    print(table(rows).round(3).to_string(index=False))
