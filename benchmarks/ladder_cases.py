"""The cases of ladder.py in bf16 as three figures, each case from the file with the highest number that has it

    ladder_cases.py benchmarks/results/h200/fast/ladder_*.json --tflop-per-s 776 --gb-per-s 4199
    --batch-sizes benchmarks/results/h200/fast/batch_sizes.png --roofline benchmarks/results/h200/fast/roofline.png
    --kinds benchmarks/results/h200/fast/kinds.png

(in one line). The first shows images per second of ResNet-18 at 32 px over the batch size. The second shows FLOP per
second below the roof of two rates that `device_rates` measured and no record holds. FLOPs and bytes are counted as for
`bound_ms`; the bound is the record's `bound_us`. The third shows how a step divides among kinds of kernels, for the
cases whose record looks inside: where the profiler's kernels take longer than the step itself, which it lengthens,
their times are scaled to the step."""
from math import inf
from pathlib import Path

from gpubench.run.models import bound_ms, get_model
from gpubench.show.plot import drawing, plt, series_style
import numpy as np
import pandas as pd

from common import parser
from figures import finish
from ladder import CASES
from ladder_table import latest

STOCK, COMPILED, HAND, BOUND = 'stock fastai', 'compiled graph', 'the same step by hand', 'bound'
RUNGS = dict(stock_bf16=STOCK, compiled_graph=COMPILED, hand=HAND)
COLORS = {k: series_style(i)['color'] for k,i in ((STOCK, 3), (COMPILED, 2), (HAND, 5))} | {BOUND: 'k'}
MARKS = {HAND: dict(mfc='none', ms=11), COMPILED: dict(zorder=3), BOUND: dict(marker='_', ms=14, mew=2)}
NAMES = dict(resnet18_224px_b256=('224 px, batch 256', 'left'),             # with the alignment of the label
             resnet50_224px_b128=('ResNet-50, 224 px, batch 128', 'right'))

def runs(case, record):
    "A row for each run of a case, and one for its bound"
    model, bs, size, n_in, *_ = CASES[case]
    def count(*rates): return bound_ms(get_model(model, n_in=n_in), (n_in, size, size), bs, *rates, 'bf16')/1e3
    n_flop, n_bytes = count(1, inf), count(inf, 1)             # seconds at a rate of 1, if the other takes no time
    times = [(label, us) for k,label in RUNGS.items() for us in record['step_us'][k]] + [(BOUND, record['bound_us'])]
    return [dict(case=case, bs=bs, rung=label, images_per_s=1e6*bs/us, flop_per_s=1e6*n_flop/us,
                 flop_per_byte=n_flop/n_bytes) for label,us in times]

def plot(ax, df, x, y):
    "Every run a dot; returns the medians"
    for name,rows in df.groupby('rung'):
        style = dict(marker='o', zorder=2) | MARKS.get(name, {})
        ax.plot(rows[x], rows[y], ls='none', alpha=.75, color=COLORS[name], **style)
    ax.set(xscale='log', yscale='log')
    return df.groupby(['rung', x])[y].median()

def note(ax, text, xy, dx, dy, **kw):
    ax.annotate(text, xy, (dx, dy), textcoords='offset points', va='center', fontsize=10, **kw)

@drawing()
def draw_sizes(df, machine):
    fig, ax = plt.subplots(figsize=(6.6, 4.4))
    medians, sizes = plot(ax, df, 'bs', 'images_per_s'), sorted(df.bs.unique())
    for name,dx,dy,ha in ((STOCK, 10, -6, 'left'), (COMPILED, -8, 14, 'right'), (HAND, 10, -10, 'left')):
        ax.plot(medians[name], color=COLORS[name], lw=1, zorder=2)
        note(ax, name, (256, medians[name, 256]), dx, dy, ha=ha, color=COLORS[name])
    ax.set(xlabel='batch size (images)', ylabel='images per second', ylim=(5e2, 2e6))
    ax.set_xticks(sizes, labels=sizes)
    ax.set_xticks([], minor=True)
    ax.yaxis.set_major_formatter('{x:,.0f}')
    finish(ax, 'Training ResNet-18 in bf16, 32 px', machine)
    return fig

@drawing()
def draw_roofline(df, flop_per_s, bytes_per_s, machine):
    fig, ax = plt.subplots(figsize=(7.6, 5.2))
    medians, least = plot(ax, df, 'flop_per_byte', 'flop_per_s'), df.flop_per_byte.min()
    for name in (STOCK, COMPILED, BOUND):
        note(ax, name, (least, medians[name, least]), 10, -4*(name==BOUND), color=COLORS[name])
    for case,rows in df[df.rung==STOCK].groupby('case'):
        name, ha = NAMES.get(case, (f'batch {rows.bs.iloc[0]}', 'center'))
        y = rows.flop_per_s.min() if ha=='center' else rows.flop_per_s.median()
        dx, dy = dict(left=(9, 0), center=(0, -13), right=(-9, 0))[ha]
        note(ax, name, (rows.flop_per_byte.iloc[0], y), dx, dy, ha=ha)
    x = np.array([4, flop_per_s/bytes_per_s, 2000])
    ax.plot(x, np.minimum(flop_per_s, x*bytes_per_s), color='k', zorder=1)
    note(ax, f'products: {flop_per_s/1e12:,.0f} TFLOP/s', (x[-1], flop_per_s), -4, 8, ha='right')
    note(ax, f'copies: {bytes_per_s/1e9:,.0f} GB/s', (16.8, 16.8*bytes_per_s), 0, 9, ha='center', rotation=22)
    ax.set(xlim=(x[0], x[-1]), ylim=(1e11, 2e15), xlabel='FLOP per byte', ylabel='FLOP per second')
    finish(ax, 'Training in bf16: ResNet-18 at 32 px, unless labeled otherwise', machine)
    return fig

KINDS = dict(products='products', norms='batch norm', **{'element-wise': 'other element-wise'},
             optimizer='optimizer', rest='layouts, copies')

def shares(record, rung):
    "How the step of a rung divides, in percent: kinds of kernels, and the GPU waiting"
    step_us, us = record['median_us'][rung], record['inside'][rung]['kinds_us']
    whole = max(step_us, sum(us.values()))
    found = {label: 100*us.get(k, 0)/whole for k,label in KINDS.items()}
    found[KINDS['rest']] = 100*sum(v for k,v in us.items() if k not in KINDS)/whole
    return found | dict(waiting=100-sum(found.values()))

@drawing()
def draw_kinds(records, machine): # case -> record
    fig, ax = plt.subplots(figsize=(8.4, 5))
    labels, kinds = [], [series_style(i)['color'] for i in (2, 3, 4, 5)]
    colors = dict(zip(KINDS.values(), (*kinds, '0.7'))) | dict(waiting='0.92')
    for i,(case,record) in enumerate(records.items()):
        for j,(rung,label) in enumerate((('stock_bf16', STOCK), ('compiled_graph', COMPILED))):
            y, left, step_us = 2.6*i+j, 0, record['median_us'][rung]
            for kind,share in shares(record, rung).items():
                ax.barh(y, share, left=left, height=.85, color=colors[kind], label=kind if not labels else None)
                left += share
            ax.plot([100*record['bound_us']/step_us]*2, [y-.42, y+.42], color='k', lw=2,
                    label='bound' if not labels else None)
            name = NAMES.get(case, (f'batch {CASES[case][1]}', ''))[0]
            labels.append((y, f'{name}, {label}: {step_us/1e3:.3g} ms'))
    ax.set(xlabel='share of the step (%)', xlim=(0, 100), ylim=(labels[-1][0]+.6, -.6))
    ax.set_yticks(*zip(*labels))
    ax.grid(False, axis='y')
    ax.tick_params(axis='y', length=0)
    ax.legend(loc='upper center', bbox_to_anchor=(.3, -.2), ncols=4, frameon=False)
    finish(ax, 'A step of ResNet-18 in bf16, 32 px or as labeled', machine)
    return fig

def main():
    p = parser(__doc__)
    p.add_argument('records', nargs='+', type=Path, help='what ladder.py wrote')
    for o in ('tflop-per-s', 'gb-per-s'): p.add_argument(f'--{o}', type=float, required=True)
    for o in ('batch-sizes', 'roofline', 'kinds'): p.add_argument(f'--{o}', required=True, help='the figure to write')
    args = p.parse_args()
    found = {case: o for case,(_,o) in latest(args.records).items() if CASES[case][4]}
    df = pd.DataFrame([row for case,o in found.items() for row in runs(case, o['cases'][case])])
    small, machine = df.case.str.startswith('resnet18_32px'), found['resnet18_32px_b64']['machine']
    draw_sizes(df[small & df.rung.ne(BOUND)], machine).savefig(args.batch_sizes, dpi=130)
    roof = draw_roofline(df[df.rung.ne(HAND)], 1e12*args.tflop_per_s, 1e9*args.gb_per_s, machine)
    roof.savefig(args.roofline, dpi=130)
    looked = latest(args.records, lambda o: 'kinds_us' in o.get('inside', {}).get('stock_bf16', {}))
    draw_kinds({k: looked[k][1]['cases'][k] for k in CASES if k in looked}, machine).savefig(args.kinds, dpi=130)

if __name__=='__main__': main()
