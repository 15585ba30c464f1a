"""One case of ladder.py as a figure: what a step takes on each rung, every run a dot, the bar ends at the median

    ladder_figure.py benchmarks/results/h200/fast/ladder_27.json --case resnet18_32px_b64
    --figure benchmarks/results/h200/fast/ladder.png --title 'A training step of ResNet-18, 32 px, batch 64'

The README's first figure, made by this command (in one line)."""
from statistics import median

from gpubench.show.plot import drawing, plt, series_style

from common import parser, read_json
from figures import draw_bar, finish, name_bars

RUNGS = dict(stock='stock fastai', stock_bf16='+ bf16, channels last', no_waits='+ no waiting for losses',
             fused='+ fused optimizer', graph="+ cuDNN's search, CUDA graph", compiled_graph='+ compiled kernels',
             hand='the same step by hand')

@drawing()
def draw(runs_ms, title, machine):
    "`runs_ms`: rung -> times of its runs; returns the figure"
    names, medians = [o for o in RUNGS if o in runs_ms], {k: median(o) for k,o in runs_ms.items()}
    fig, ax = plt.subplots(figsize=(7.6, 3.6))
    for i,name in enumerate(names):
        times = medians['stock']/medians[name]
        faster = f' ({times:.0f} times faster)' if times>2 else ''
        color = series_style(5 if name=='hand' else 1)['color']
        draw_bar(ax, i, runs_ms[name], color, f'{medians[name]:.3g} ms{faster}')
    name_bars(ax, [RUNGS[o] for o in names])
    ax.set(xlim=(0, 1.2*max(map(max, runs_ms.values()))), xlabel='time of a step (ms)')
    finish(ax, title, machine)
    return fig

def main():
    p = parser(__doc__)
    p.add_argument('records', help='what ladder.py wrote')
    for o in ('case', 'figure', 'title'): p.add_argument(f'--{o}', required=True)
    args = p.parse_args()
    found = read_json(args.records)
    runs_ms = {k: [o/1e3 for o in v] for k,v in found['cases'][args.case]['step_us'].items()}
    draw(runs_ms, args.title, found['machine']).savefig(args.figure, dpi=130)

if __name__=='__main__': main()
