"""What scaling.py measured as a figure: images/s on more GPUs, as multiples of what the best single GPU trains

    scaling_figure.py scaling.jsonl --figure scaling.png --gpu 'NVIDIA H200'"""
import json
from pathlib import Path

from gpubench.show.plot import drawing, plt, series_style

from common import parser
from scaling import STOCK, WORKLOADS, alone, table

SHOWN = { # (way, scaling) -> what it is called
    ('compiled, flat', 'weak'): 'compiled graph, each its own batch', ('captured, flat', 'weak'): 'graph, each its own batch',
    ('captured, flat', 'strong'): 'graph, one batch shared', (STOCK, 'weak'): 'stock fastai, each its own batch'}

@drawing()
def draw(found, gpu):
    "`found`: as `table` returns it"
    names = [o for o in WORKLOADS if o in set(found.workload)]
    fig, axs = plt.subplots(1, len(names), figsize=(2.9*len(names), 3.6), sharey=True, squeeze=False)
    sizes = sorted(found.n.unique())
    for ax,name in zip(axs[0], names):
        rows = found[found.workload==name]
        ax.plot(sizes, sizes, ':', color='grey', label='as many times as GPUs')
        for i,((way, scaling), label) in enumerate(SHOWN.items()):
            own = rows[(rows.way==way)&(rows.scaling==scaling)|(rows.way==alone(way))&(rows.n==1)].sort_values('n')
            times = own.efficiency*own.n
            ax.plot(own.n, times, label=label, **series_style(i))
        ax.set(title=name.replace(', ', '\n', 1), xlabel='GPUs', xticks=sizes, ylim=(0, max(sizes)+.2))
    axs[0][0].set_ylabel('images/s, times those of\nthe best way on one GPU')
    fig.legend(*axs[0][0].get_legend_handles_labels(), loc='outside lower center', ncols=3, frameon=False)
    fig.suptitle(f'Whole steps on 1 to {max(sizes)} {gpu}', x=.01, ha='left')
    return fig

def main():
    p = parser(__doc__)
    p.add_argument('records', help='what scaling.py wrote')
    for o in ('figure', 'gpu'): p.add_argument(f'--{o}', required=True)
    args = p.parse_args()
    rows = [json.loads(o) for o in Path(args.records).read_text().splitlines()]
    draw(table(rows), args.gpu).savefig(args.figure, dpi=110)

if __name__=='__main__': main()
