"""One case of ladder.py as a figure: what a step takes on each rung, every run a dot, the bar ends at the median

    ladder_figure.py benchmarks/results/h200/fast/ladder_27.json --case resnet18_32px_b64
    --figure benchmarks/results/h200/fast/ladder.png --title 'A training step of ResNet-18, 32 px, batch 64'

The README's first figure, made by this command (in one line)."""
import json

from gpubench.plot import caption, drawing, plt, series_style
import pandas as pd

from common import parser

RUNGS = dict(stock='stock fastai', stock_bf16='+ bf16, channels last', no_waits='+ no waiting for losses',
             fused='+ fused optimizer', graph="+ cuDNN's search, CUDA graph", compiled_graph='+ compiled kernels',
             hand='the same step by hand')

def finish(ax, title, machine, pad=6):
    "Title `pad` points above the axes, the machine below"
    ax.set_title(title, x=0, ha='left', pad=pad)
    ax.annotate(caption(pd.DataFrame([dict(device='cuda') | machine])), (0, 0), (0, -8), va='top', fontsize=9,
                xycoords=('axes fraction', ax.xaxis.label), textcoords='offset points')

@drawing()
def draw(runs_ms, title, machine):
    "`runs_ms`: rung -> times of its runs; returns the figure"
    names, medians = [o for o in RUNGS if o in runs_ms], {k: pd.Series(o).median() for k,o in runs_ms.items()}
    fig, ax = plt.subplots(figsize=(7.6, 3.6))
    for i,name in enumerate(names):
        color = series_style(5 if name=='hand' else 1)['color']
        ax.barh(i, medians[name], height=.6, color=color, alpha=.35)
        ax.plot(runs_ms[name], [i]*len(runs_ms[name]), 'o', color=color, alpha=.75, ms=5)
        times = medians['stock']/medians[name]
        faster = f' ({times:.0f} times faster)' if times>2 else ''
        ax.annotate(f'{medians[name]:.3g} ms{faster}', (max(runs_ms[name]), i), (7, 0), va='center',
                    textcoords='offset points')
    ax.set(yticks=range(len(names)), yticklabels=[RUNGS[o] for o in names], ylim=(len(names)-.5, -.5),
           xlim=(0, 1.2*max(map(max, runs_ms.values()))), xlabel='time of a step (ms)')
    ax.grid(False, axis='y')
    ax.tick_params(axis='y', length=0)
    finish(ax, title, machine)
    return fig

def main():
    p = parser(__doc__)
    p.add_argument('records', help='what ladder.py wrote')
    for o in ('case', 'figure', 'title'): p.add_argument(f'--{o}', required=True)
    args = p.parse_args()
    with open(args.records) as f: found = json.load(f)
    runs_ms = {k: [o/1e3 for o in v] for k,v in found['cases'][args.case]['step_us'].items()}
    draw(runs_ms, args.title, found['machine']).savefig(args.figure, dpi=130)

if __name__=='__main__': main()
