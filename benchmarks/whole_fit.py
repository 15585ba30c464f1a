"""Whole trainings of fastai users, from files to the last metric: stock fastai against `speed_up`, by the clock on the
wall

    whole_fit.py --out whole_fit.json [--rows gpu] [--runs 3] [--device cuda]      train, and print the table
    whole_fit.py RECORD [--check]                                                 print the table of a record
    whole_fit.py RECORD --figure FILE.png --rows photos_4 presizing photos_20     the README's figure

Rows are names of `ROWS` in whole_fit_rows.py, or `gpu`, `cpu`, `accuracy`, `all`. Each run is a process of its own; the
ways of a row alternate, in an order that is shuffled in each round, and those of a round share their seed. The clock
starts with the first call after the imports; making the loaders, starting up, compiling, decoding and validating all
count, and compiled kernels aren't kept from run to run. The files have just been made, so the system has them in memory,
but nobody has decoded them.

Stock has fastai's default number of workers unless the row says otherwise. Further variants: `stock_bf16`, and `fp32`
and `compiled` of `speed_up`. `--check` ends with exit code 1 if `speed_up` takes more than 1.03 of stock's time plus
half a second in any row, or raises what stock doesn't."""
import os, random, sys
from functools import partial
from statistics import median

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from gpubench.ground.core import describe_machine, machine_title, package_version
from gpubench.run.process import pack, run_fresh
from gpubench.show.plot import drawing, series_style
from gpubench.ground.stats import ratio_ci

from common import device_of, difference, draw_bar, finish, name_bars, parser, read_json, spread, write_json
from whole_fit_rows import ACCURACY, GROUPS, ROWS, VARIANTS
from whole_fit_run import run_once

BOTH = 'stock', 'speed_up'
MOST_TIMES, MOST_MORE_S = 1.03, .5     # of stock's time, what `speed_up` may take
BROUGHT = 'torchcodec', 'pillow', 'numpy', 'pandas'

def options():
    p = parser(__doc__)
    p.add_argument('record', nargs='?', help='what an earlier call wrote; nothing is trained')
    p.add_argument('--out', help='the JSON file to write, renewed after each run')
    p.add_argument('--rows', nargs='+', choices=[*GROUPS, *ROWS], help='by default those for the device')
    p.add_argument('--variants', nargs='+', choices=VARIANTS, default=BOTH, help='by default stock and speed_up')
    p.add_argument('--runs', type=int, default=3, help='of each variant')
    p.add_argument('--seeds', type=int, default=5, help='runs of each variant in the rows of `accuracy`')
    p.add_argument('--device', default='auto')
    p.add_argument('--cores', type=int, help='use only so many')
    p.add_argument('--limit-s', type=float, default=900, help='seconds after which a run is ended')
    p.add_argument('--quick', action='store_true', help='few files and at most two epochs: to see whether it works')
    p.add_argument('--check', action='store_true')
    p.add_argument('--figure', metavar='FILE', help='draw the rows that have both ways, or --rows')
    return p

def use_cores(n):
    "For this process and those that it starts"
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:n])
    torch.set_num_threads(n)

def names_of(rows): return list(dict.fromkeys(o for row in rows for o in GROUPS.get(row, [row])))

def plan(rows, variants, n_runs, n_seeds):
    "(row, variant, seed) of each run; the variants alternate"
    rng = random.Random(0)
    for row in rows:
        for seed in range(n_seeds if row in ACCURACY else n_runs):
            for variant in rng.sample(variants, len(variants)): yield row, variant, seed

def in_process(limit_s, *args, **kwargs):
    "What `run_once` returns in a process of its own, or how that ended"
    found = run_fresh(pack(partial(run_once, *args, **kwargs)), timeout_s=limit_s)
    return dict(raised=found['error']) if found.get('status', 'ok')!='ok' else found

def describe(device): return describe_machine(device) | {o: package_version(o) for o in BROUGHT}

def train_all(args):
    "Train everything that is asked for; the record is written after each run"
    device = device_of(args).split(':')[0]
    machine, rows = describe(device), names_of(args.rows or [device.replace('cuda', 'gpu')])
    asked = dict(device=device, quick=args.quick)
    settings, runs = asked | dict(cores=args.cores, rows={o: ROWS[o].about() for o in rows}), []
    def run(row, variant, seed, **kwargs): return in_process(args.limit_s, row, variant, seed, **asked | kwargs)
    for row in rows: ROWS[row].folder(args.quick)
    first = {o: run(rows[0], o, 0, quick=True) for o in args.variants[:2]}   # loads the libraries' files; isn't counted
    for row,variant,seed in plan(rows, args.variants, args.runs, args.seeds):
        found = run(row, variant, seed)
        runs.append(dict(row=row, variant=variant, seed=seed) | found)
        write_json(args.out, machine, settings=settings, first=first, runs=runs)
        print(line_of(runs[-1]), flush=True)

def line_of(o):
    "A run in a line"
    if o.get('raised'): return f"{o['row']} {o['variant']} {o['seed']}: {o['raised'].strip().splitlines()[-1]}"
    metrics = ', '.join(f'{k} {v:.3f}' for k,v in o['metrics'].items() if v is not None)
    return f"{o['row']} {o['variant']} {o['seed']}: {o['total_s']:.1f} s; epochs {' '.join(f'{t:.2f}' for t in o['train_s'])}; {metrics}"

def done(runs):
    "Those that weren't ended by an exception, as a frame; `first_s` and `later_s`: the epochs' training"
    columns = ['row', 'variant', 'seed', 'total_s', 'train_s', 'valid_s', 'n_train', 'metrics']
    df = pd.DataFrame([o for o in runs if not o.get('raised')], columns=columns)
    return df.assign(first_s=[o[0] for o in df.train_s],
                     later_s=[median(o[1:]) if o[1:] else np.nan for o in df.train_s],
                     score=pd.Series([list(o.values())[-1] for o in df.metrics], df.index, float))

def seconds(df):
    "row -> variant -> seconds of its runs"
    return {row: {k: v.tolist() for k,v in o.groupby('variant', sort=False).total_s}
            for row,o in df.groupby('row', sort=False)}

def paired_scores(df, variant):
    "(n, 2): the last metric of stock and of a variant, for each seed that both have"
    by_seed = df.pivot(index='seed', columns='variant', values='score')
    return by_seed.reindex(columns=['stock', variant]).dropna().to_numpy(float)

def with_interval(o): return f'{o.mid:.2f}' if np.isnan(o.lo) else f'{o.mid:.2f} ({o.lo:.2f} to {o.hi:.2f})'

def compare(df, row, variant):
    "A line of the table: a variant of a row beside stock"
    here = df[df.row==row]
    mine = here[here.variant==variant]
    def ratio(column):
        a, b = (here[here.variant==o][column].dropna() for o in ('stock', variant))
        return with_interval(ratio_ci(a, b)) if variant!='stock' and len(a) and len(b) else ''
    per_s = (mine.n_train/mine.later_s).median()
    line = {'row': row, 'variant': variant, 'whole fit (s)': spread(mine.total_s), 'stock ÷ it': ratio('total_s'),
            'first epoch': ratio('first_s'), 'later epochs': ratio('later_s'),
            'images/s later': '' if np.isnan(per_s) else f'{per_s:,.0f}', 'metric': f'{mine.score.median():.3f}'}
    scores = paired_scores(here, variant)
    if len(scores) and variant!='stock': line['metric − stock'] = '{:+.3f} ({:+.3f} to {:+.3f})'.format(*difference(*scores.T))
    return line

def table(runs):
    df = done(runs)
    pairs = df[['row', 'variant']].drop_duplicates().sort_values('variant', key=lambda o: o.map(VARIANTS.index)).sort_values(
        'row', key=lambda o: o.map(list(ROWS).index), kind='stable')
    return pd.DataFrame([compare(df, *o) for o in pairs.itertuples(index=False)]).fillna('')

def broken(runs):
    "Sentences about the rows in which `speed_up` takes too long, or raises what stock doesn't"
    found, times = [], seconds(done(runs))
    raised = {(o['row'], o['variant']): o['raised'].strip().splitlines()[-1] for o in runs if o.get('raised')}
    for row in dict.fromkeys(o['row'] for o in runs):
        if (row, 'speed_up') in raised and (row, 'stock') not in raised: found.append(f"{row}: {raised[row, 'speed_up']}")
        elif has_both(times.get(row, {})): found += too_slow(row, **{o: median(times[row][o]) for o in BOTH})
    return found

def has_both(sides): return all(o in sides for o in BOTH)

def too_slow(row, stock, speed_up):
    "A list of one sentence, or none; medians in seconds"
    most_s = MOST_TIMES*stock+MOST_MORE_S
    return [] if speed_up<=most_s else [f"{row}: {speed_up:.2f} s, and stock's {stock:.2f} s allow {most_s:.2f} s"]

def show(record):
    "Print the machine and the table"
    print(machine_title(record['machine'] | dict(device=record['settings']['device'])))
    with pd.option_context('display.width', 250, 'display.max_columns', None, 'display.max_rows', None):
        print(table(record['runs']).to_string(index=False), flush=True)

def check(record):
    "Print which rows break the rule; returns whether any does"
    found, n = broken(record['runs']), sum(map(has_both, seconds(done(record['runs'])).values()))
    print('\n'.join(found) or f"None of the {n} rows takes more than {MOST_TIMES} of stock's time and {MOST_MORE_S} s.")
    return bool(found)

SIDES = dict(stock=('stock fastai', 0), speed_up=('with speed_up', 1))     # variant -> label and color

def beside_bar(variant, sides):
    "What stands beside a bar"
    times = ratio_ci(sides['stock'], sides[variant]).mid             # as in the table
    return f'{median(sides[variant]):.3g} s' + (f' ({times:.1f} times as fast)' if variant=='speed_up' and times>1.05 else '')

@drawing()
def draw(runs_s, names, machine):
    "`runs_s`: row -> variant -> seconds of its runs; `names`: row -> its name; returns the figure"
    fig, ax = plt.subplots(figsize=(8.4, 1.3+.75*len(runs_s)))
    for i,(row, sides) in enumerate(runs_s.items()):
        for j,(variant, (label, color)) in enumerate(SIDES.items()):
            draw_bar(ax, i+.4*j-.2, sides[variant], series_style(color)['color'], beside_bar(variant, sides), .36, label)
    longest = max(t for sides in runs_s.values() for o in SIDES for t in sides[o])
    name_bars(ax, [names[o] for o in runs_s])
    ax.set(xlim=(0, 1.3*longest), xlabel='from the files to the last metric (s)')
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[:2], labels[:2], loc='lower left', bbox_to_anchor=(0, 1), ncols=2, frameon=False,
              borderaxespad=.2)
    finish(ax, 'From a folder of photographs to a trained model', machine, pad=26)
    return fig

def about_machine(record):
    "As `finish` takes it; beside a GPU, its cores are named, since they decode"
    machine = record['machine'] | dict(device=record['settings']['device'])
    return machine | dict(gpu=machine['gpu'] and f"{machine['gpu']}, {machine['n_cores']} cores")

def draw_record(record, rows):
    "The figure of these rows, or of all that have both ways"
    times = {k: v for k,v in seconds(done(record['runs'])).items() if has_both(v)}
    missing = [o for o in rows if o not in times]
    if missing: raise ValueError(f"no runs of both ways for {', '.join(missing)}; the record has them for {', '.join(times)}")
    names = {k: o['what'] for k,o in record['settings']['rows'].items()}
    return draw({o: times[o] for o in rows or times}, names, about_machine(record))

def main():
    p = options()
    args = p.parse_args()
    if bool(args.record)==bool(args.out): p.error('give either a record to print, or --out to train and write one')
    if args.cores: use_cores(args.cores)
    if args.out: train_all(args)
    record = read_json(args.record or args.out)
    show(record)
    if args.figure: draw_record(record, names_of(args.rows or [])).savefig(args.figure, dpi=130)
    if args.check: sys.exit(check(record))

if __name__=='__main__': main()
