"""A whole training from files on 1, 2, 4, … devices: stock fastai's `distrib_ctx` against `speed_up`, each on its share

    whole_fit_devices.py --devices 1,2,4 --out whole_fit_devices.json [--rows photos_4] [--runs 3]

Each device has one process, and each process the batch size of the row, so that n devices take an n-th of the steps.
Stock splits its loaders by `distrib_ctx`, which needs the package accelerate; ours by `split`, so that each training
image is decoded once, by one process. A run's seconds are those of the process that was ready last, from its first
call after the imports to the last metric: the others wait for it. Starting the processes, which takes the same for
both, isn't in them. The ways alternate, in an order that is shuffled in each round, and those of a round share their
seed."""
import random
from contextlib import nullcontext

import pandas as pd
from fastai.torch_core import default_device, set_seed
from gpubench.ground.core import describe_machine, machine_title, wait_for
from gpubench.ground.stats import ratio_ci
from gpubench.step.fast import speed_up
from gpubench.step.group import gather, launch, n_ranks
from gpubench.step.parallel import ParallelCallback, split

from common import device_of, device_parser, listed, spread, write_json
from whole_fit import with_interval
from whole_fit_rows import ROWS
from whole_fit_run import EpochClockCallback, Laps, compiler_cache

WAYS = 'stock', 'speed_up'

def train(device, name, way, seed, quick):
    "Seconds of this process, its epochs, what it decoded, and the metrics"
    row, found, clock = ROWS[name], {}, EpochClockCallback(device)
    epochs = min(row.epochs, 2) if quick else row.epochs
    default_device(device.type=='cuda')
    set_seed(seed)
    laps = Laps(found)
    dls = row.dls(row.folder(quick), device=device, **row.loaders)
    learn = row.learner(dls if way=='stock' else split(dls))
    together = nullcontext()
    if way!='stock':
        if n_ranks()>1: learn.add_cb(ParallelCallback('flat'))
        sped_up = speed_up(learn, **row.speed_up)
    elif n_ranks()>1:
        import fastai.distributed  # noqa: F401 (adds `distrib_ctx` to Learner)
        together = learn.distrib_ctx(sync_bn=False)
    learn.add_cb(clock)
    with together, learn.no_bar(), learn.no_logging(): getattr(learn, row.fit)(epochs)
    wait_for(device)
    laps.end()
    found['metrics'] = dict(zip(learn.recorder.metric_names[1:], learn.recorder.values[-1]))
    if way!='stock': found |= dict(n_decoded=sum(o.n_decoded for o in learn.feed.pools.values()), table=str(sped_up))
    return found | clock.seconds

def run(name, way, seed, n, device, quick):
    with compiler_cache(): ranks = launch(train, name, way, seed, quick, n_devices=n, device=device)
    return dict(row=name, way=way, seed=seed, n_devices=n, total_s=min(o['total_s'] for o in ranks), ranks=ranks)

def table(runs):
    "Medians and spread; stock ÷ speed_up on as many devices, and one device ÷ n of the same way"
    df = pd.DataFrame(runs)
    s = df.groupby(['row', 'n_devices', 'way']).total_s.agg(list)
    def ratio(a, b): return with_interval(ratio_ci(s[a], s[b])) if a in s.index and b in s.index and a!=b else ''
    return pd.DataFrame([{'row': row, 'devices': n, 'way': way, 'whole fit (s)': spread(o),
                          'stock ÷ it': ratio((row, n, 'stock'), (row, n, way)),
                          'one device ÷ it': ratio((row, s.index.get_level_values('n_devices').min(), way), (row, n, way))}
                         for (row, n, way), o in s.items()])

def main():
    p = device_parser(__doc__)
    p.add_argument('--devices', type=listed(int), default=[1, 2], help='numbers of devices, such as 1,2,4')
    p.add_argument('--rows', nargs='+', choices=list(ROWS), default=['photos_4'])
    p.add_argument('--runs', type=int, default=3)
    p.add_argument('--quick', action='store_true', help='few files and at most two epochs')
    args, runs = p.parse_args(), []
    device, rng = device_of(args).split(':')[0], random.Random(0)
    for name in args.rows: ROWS[name].folder(args.quick)
    cells = [(name, way, n) for name in args.rows for n in args.devices for way in WAYS]
    for seed in range(args.runs):
        for name,way,n in rng.sample(cells, len(cells)):
            runs.append(run(name, way, seed, n, device, args.quick))
            write_json(args.out, describe_machine(device), runs=runs)
            o = runs[-1]
            print(f"{name} {way} on {n}, run {seed}: {o['total_s']:.1f} s", o['ranks'][0]['metrics'], flush=True)
    print(machine_title(describe_machine(device)), table(runs).to_string(index=False), sep='\n')

if __name__=='__main__': main()
