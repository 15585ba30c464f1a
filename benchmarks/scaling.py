"""One training on 1, 2, 4, … devices: what each further one costs a step, and how much faster the training gets

    scaling.py --devices 1,2,4 --out scaling.jsonl [--workloads b64,b1000] [--ways captured]

Weak scaling: each device keeps its batch. Strong scaling: the batch stays, and each device gets a part of it.
Efficiency is relative to the fastest way on one device, which the table names.

Each number of devices has one group of processes. For each workload, a group sets all ways up, with their warm-up,
and then times each once in every round, in an order that is shuffled anew. So the intervals hold for this start of
the processes; another may choose other kernels. Groups that fit on the machine together run side by side, each on
GPUs and cores of its own (2 and 1 on a machine of four); a record's `beside` has the others. Steps are taken from
fits that are verified as `run_trial` verifies them, or from fastai's own `distrib_ctx`, which needs the package
accelerate. All images are copies of 256. Prints medians, and where the time went; each visit is a line of the
records."""
import os, random, tempfile, time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from fastai.learner import Learner
from gpubench.data import loaders
from gpubench.data.loaders import get_dls
from gpubench.data.made import draw_synthetic
from gpubench.ground.core import free_memory
from gpubench.ground.record import append_record
from gpubench.ground.stats import median_ci, ratio_ci
from gpubench.run.models import get_model
from gpubench.run.observed import steady_rounds, tf32_set
from gpubench.run.trial import Trial, _check_as_one, about, make_learner, resolve, time_more, warm_up
from gpubench.step.group import gather, launch, n_ranks, rank
from gpubench.watch.timing import StepTimerCallback

from common import device_of, device_parser, listed

BF16 = dict(precision='bf16', speed_up='channels_last')
SMALL = dict(size=32, n_channels=3, **BF16)
LARGE = dict(size=224, n_channels=3, max_images=10_240, **BF16)
WORKLOADS = { # each epoch has eight steps or more on four devices
    'ResNet-18, 224 px, b256, bf16': dict(model='resnet18', bs=256, **LARGE),
    'ResNet-18, 32 px, b64, bf16': dict(model='resnet18', bs=64, max_images=20_000, **SMALL),
    'ResNet-18, 32 px, b512, bf16': dict(model='resnet18', bs=512, max_images=50_000, **SMALL),
    'MNIST CNN, b1000, fp32': dict(model='lenet', size=28, bs=1000, max_images=60_000),
    'ResNet-50, 224 px, b128, bf16': dict(model='resnet50', bs=128, **LARGE)}
SEARCHED = {'ResNet-18, 32 px, b64, bf16', 'MNIST CNN, b1000, fp32'} # where cuDNN's search brings something
# a captured step is `speed_up`'s: channels_last in TF32, too, and cuDNN's search for small batches
CAPTURED = dict(speed_up='channels_last defer_losses graph')
COMPILED, FLAT = dict(speed_up=CAPTURED['speed_up']+' compile'), dict(all_reduce='flat')
STOCK = 'stock, distrib_ctx'
WAYS = {'eager, DDP': {}, 'captured, DDP': CAPTURED, 'captured, flat': CAPTURED | FLAT, 'compiled, flat': COMPILED | FLAT,
        STOCK: {}}
WEAK_ONLY = {'compiled, flat'} # to compile takes longer than all else
CPU_WAYS = {'eager, DDP': {}, 'eager, flat': FLAT}

def alone(way): return way.partition(',')[0] # its name on one device, where nothing is averaged

def share_images(device):
    "Let all Learners of this process share the images of a workload, on its device; returns what forgets them"
    kept = {}
    def load(images):
        key = len(images), images.n_in, images.size
        if key not in kept:
            few = torch.from_numpy(draw_synthetic(np.arange(256), size=images.size, n_in=images.n_in)).to(device)
            kept[key] = few[torch.arange(len(images), device=device)%len(few)]
        return kept[key]
    loaders.load_pixels = load
    return kept.clear

@contextmanager
def quiet(learn):
    with learn.no_bar(), learn.no_logging(): yield

class TrialVisits:
    "Visits of a trial's Learner, which stays warm between them"
    def __init__(self, trial):
        self.trial = trial
        with self.switches():
            self.learn = make_learner(trial)
            with quiet(self.learn): warm_up(self.learn, trial)
    def switches(self): return tf32_set(self.trial.precision, 'search_kernels' in self.trial.parts)
    def visit(self, max_s):
        timer = StepTimerCallback()
        with self.switches(), quiet(self.learn), self.learn.added_cbs(timer):
            time_more(self.learn, self.trial, half_width=.01, max_s=max_s)
            self.learn.seen.verify(self.trial)
        if n_ranks()>1: _check_as_one(self.learn)
        steps = steady_rounds(timer.to_df(), self.trial).step_ms
        return about(self.trial) | dict(step_ms=max(gather(median_ci(steps).mid)), n_timed_steps=len(steps))
    def end(self):
        if hasattr(self.learn, 'graphed_step'): self.learn.graphed_step.release()

class StockVisits:
    "Of fastai's own `distrib_ctx`, without the wait for data: it can't split the resident loader that the others have"
    def __init__(self, device, workload, bs):
        import accelerate, fastai.distributed  # noqa: F401 (`distrib_ctx` needs the former and comes with the latter)
        o, names = WORKLOADS[workload], 'size n_channels max_images'.split()
        dls = get_dls('synthetic', bs=bs//n_ranks(), loader='memory', device=device, **{k: o[k] for k in names if k in o})
        dls.train.n = min(dls.train.n, (8 if o['size']>100 else 20)*bs)
        self.learn, self.about = Learner(dls, get_model(o['model'], n_classes=dls.c, n_in=dls.n_in)), dict(bs=bs)
        if o.get('precision')=='bf16': self.learn = self.learn.to_bf16()
        self.visit()
    def visit(self, max_s=None): # an epoch
        timer, group = StepTimerCallback(), self.learn.distrib_ctx(sync_bn=False) if n_ranks()>1 else nullcontext()
        with group, quiet(self.learn): self.learn.fit(1, cbs=timer)
        steps = timer.to_df()
        ms = max(gather((steps.step_ms-steps.wait_ms).median()))
        return self.about | dict(status='ok', n_devices=n_ranks(), step_ms=ms, n_timed_steps=len(steps))
    def end(self): pass

def set_up(device, workload, way, scaling, settings):
    bs, kind = WORKLOADS[workload]['bs']*(n_ranks() if scaling=='weak' else 1), torch.device(device).type
    if way==STOCK or way==alone(STOCK): return StockVisits(device, workload, bs)
    found = dict(dataset='synthetic', loader='resident', device=kind, n_devices=n_ranks(), **WORKLOADS[workload])
    trial = Trial(**found | dict(bs=bs) | settings)
    if workload in SEARCHED and 'graph' in trial.parts: trial = trial.but(speed_up=trial.speed_up+' search_kernels')
    return TrialVisits(resolve(trial).but(device=str(device)))

def timed(f, *args):
    start_s = time.perf_counter()
    return f(*args), time.perf_counter()-start_s

def tried(f, *args):
    "Its result and seconds, or None and the error of a rank"
    found, why = (None, 0.), None
    try: found = timed(f, *args)
    except Exception as e: why = f'{type(e).__name__}: {e}'[:500]
    why = next(filter(None, gather(why)), None)
    return (None, 0.) if why else found, why

def visits(device, workloads, ways, n_rounds, max_s, out, gate, since, **known):
    "All visits of this group: in each workload its ways, weak and strong, in shuffled rounds"
    n, found, start_s = n_ranks(), [], time.time()-since
    from torch.backends import cudnn                    # here, since it can't be pickled
    cudnn.benchmark_limit = 0                           # a search tries all kernels
    compiles = any('compile' in o.get('speed_up', '').split() for o in ways.values())
    if compiles: from torch._inductor import compile_fx # noqa: F401 (it takes seconds)
    while not Path(gate).exists(): time.sleep(.05)
    def save(row):
        found.append(row)
        if rank()==0: append_record(out, row)
    if n==1: ways = {alone(k): o for k,o in ways.items()}
    forget = share_images(device)
    for workload in workloads:
        plans, ready = [(k, o) for k in ways for o in ('weak', 'strong') if o=='weak' or n>1 and k not in WEAK_ONLY], {}
        for way,scaling in plans:
            about_way = dict(workload=workload, way=way, scaling=scaling, n_devices=n, start_s=start_s, **known)
            (made, setup_s), why = tried(set_up, device, workload, way, scaling, ways[way])
            if why: save(about_way | dict(status='error', error=why))
            else: ready[way, scaling] = made, about_way | dict(setup_s=setup_s)
        for i in range(n_rounds):
            for key in random.Random(i).sample(list(ready), len(ready)):
                made, about_way = ready[key]
                (row, visit_s), why = tried(made.visit, max_s)
                if why: del ready[key]
                save((dict(status='error', error=why) if why else row) | about_way | dict(visit=i, visit_s=visit_s))
        for made,_ in ready.values(): made.end()
        ready = made = None
        forget()
        if compiles: torch._dynamo.reset()
        free_memory()
    return found

def table(rows):
    """Medians of the visits; what a step costs more than the same way on one device, and the efficiency relative to the
    fastest way there; intervals of 95 %"""
    df, found = pd.DataFrame([o for o in rows if o['status']=='ok']), []
    ones = df[df.n_devices==1].groupby(['workload', 'way']).step_ms.agg(list)
    for (workload, n, way, scaling), o in df.groupby(['workload', 'n_devices', 'way', 'scaling'], sort=False):
        row = dict(workload=workload, way=way, scaling=scaling, n=n, step_ms=o.step_ms.median())
        bases = ones.get(workload, pd.Series(dtype=object)) if len(ones) else ones
        if len(bases):
            best = bases.map(np.median).idxmin()
            ratio, share = ratio_ci(o.step_ms, bases[best]), (1 if scaling=='weak' else 1/n)
            row |= dict(base=best, efficiency=share/ratio.mid, lo=share/ratio.hi, hi=share/ratio.lo)
            if n>1 and alone(way) in bases:
                own = bases[alone(way)]
                added = ratio_ci(o.step_ms, own)
                row |= {k: np.median(own)*(v-1) for k,v in zip(('added_ms', 'added_lo', 'added_hi'), (added.mid, added.lo, added.hi))}
        found.append(row)
    return pd.DataFrame(found)

def where_time_went(rows):
    "Seconds of each group: until it was there, and for each workload to set up, to compile with it, and to time"
    found = defaultdict(lambda: defaultdict(float))
    for o in rows:
        row = found[o['n_devices'], o['workload']]
        row['start_s'] = o['start_s']
        if o.get('visit')==0: row['compile_s' if alone(o['way'])=='compiled' else 'setup_s'] += o['setup_s']
        row['visits_s'] += o.get('visit_s', 0)
    df = pd.DataFrame.from_dict(found, orient='index').rename_axis(['n', 'workload'])
    return df.reindex(columns=['start_s', 'setup_s', 'compile_s', 'visits_s']).fillna(0).round(1)

def phases(sizes, n_there):
    "Which groups run side by side, the largest first into the first phase that has room; the smallest phases first"
    found = []
    for n in sorted(sizes, reverse=True):
        room = next((o for o in found if sum(o)+n<=n_there), None)
        if room is None: found.append([n])
        else: room.append(n)
    return sorted(found, key=max)

def run_group(n, first, n_there, device, **kwargs):
    "Its records; its processes get `n` of the devices, from `first` on, and as large a share of the cores"
    cores = sorted(os.sched_getaffinity(0))
    if device=='cuda':
        os.sched_setaffinity(0, cores[first*len(cores)//n_there:(first+n)*len(cores)//n_there]) # of this process
        gpus = (os.environ.get('CUDA_VISIBLE_DEVICES') or ','.join(map(str, range(n_there)))).split(',')
        os.environ['CUDA_VISIBLE_DEVICES'] = ','.join(gpus[first:first+n])
    def work(device): return visits(device, **kwargs)
    return launch(work, n_devices=n, device=device)[0]

def main():
    p = device_parser(__doc__, out='a .jsonl file of records; rows are added')
    p.add_argument('--devices', type=listed(int), default=[1, 2], help='numbers of devices, such as 1,2,4,8')
    p.add_argument('--workloads', type=listed(), default=[''], help='parts of their names; all by default')
    p.add_argument('--ways', type=listed(), default=[''], help='parts of their names; all by default')
    p.add_argument('--rounds', type=int, default=3)
    p.add_argument('--max-s', type=float, default=1, help='seconds of timing a visit')
    args, rows = p.parse_args(), []
    device = torch.device(device_of(args)).type
    def chosen(names, parts): # those of which a part is given
        found = {k: o for k,o in names.items() if any(part.lower() in k.lower() for part in parts)}
        if not found: p.error(f"nothing is called {', '.join(parts)}; there are: {'; '.join(names)}")
        return found
    kwargs = dict(workloads=list(chosen(WORKLOADS, args.workloads)), ways=chosen(CPU_WAYS if device=='cpu' else WAYS, args.ways),
                  n_rounds=args.rounds, max_s=args.max_s, out=args.out, since=time.time(), device=device)
    n_there = torch.cuda.device_count() if device=='cuda' else max(args.devices) # side by side on a CPU they'd share cores
    plan = phases(set(args.devices), n_there if device=='cuda' else 0)
    groups = ProcessPoolExecutor(len(args.devices), get_context('spawn'), max_tasks_per_child=1)
    with tempfile.TemporaryDirectory() as folder, groups as pool:
        def begin(i, phase): # all groups start now and wait for their phase
            firsts = np.cumsum([0, *phase])
            def others(n): return [o for o in phase if o!=n]
            return [pool.submit(run_group, n, int(first), n_there, gate=f'{folder}/{i}', beside=others(n), **kwargs)
                    for n,first in zip(phase, firsts)]
        for i,jobs in enumerate([begin(i, phase) for i,phase in enumerate(plan)]):
            Path(folder, str(i)).touch()
            for job in jobs: rows += job.result()
            print(f"Devices {plan[i]}: done after {time.time()-kwargs['since']:.0f} s", flush=True)
    for o in rows:
        if o['status']!='ok': print(f"{o['workload']}, {o['way']}, {o['scaling']}, {o['n_devices']}: {o['error']}")
    print(table(rows).round(3).to_string(index=False), '\n', where_time_went(rows).to_string(), sep='\n')

if __name__=='__main__': main()
