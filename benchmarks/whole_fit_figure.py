"""Whole trainings as a figure: seconds from the files to the last metric, stock fastai against `speed_up`, every run a dot, the bar ends at the median

    whole_fit_figure.py RECORD … --figure whole_fit.png --rows photos_4 photos_20 presizing --title 'From a folder of photographs to a trained model'

A RECORD is what whole_fit.py wrote; several are of the same machine. Without --rows, all rows that have both are drawn."""
from statistics import median

from gpubench.plot import drawing, plt, series_style
from gpubench.stats import ratio_ci

from common import parser
from ladder_figure import finish
from whole_fit import done, has_both, read, seconds

SIDES = dict(stock=('stock fastai', 0), speed_up=('with speed_up', 1))     # variant -> label and color

def words(variant, sides):
    "What stands beside a bar"
    times = ratio_ci(sides['stock'], sides[variant]).mid             # as in the table
    return f'{median(sides[variant]):.3g} s' + (f' ({times:.1f} times as fast)' if variant=='speed_up' and times>1.05 else '')

def draw_bar(ax, at, variant, runs_s, text):
    label, color = SIDES[variant][0], series_style(SIDES[variant][1])['color']
    ax.barh(at, median(runs_s), height=.36, color=color, alpha=.35, label=label)
    ax.plot(runs_s, [at]*len(runs_s), 'o', color=color, alpha=.75, ms=5)
    ax.annotate(text, (max(runs_s), at), (7, 0), va='center', textcoords='offset points')

@drawing()
def draw(runs_s, names, title, machine):
    "`runs_s`: row -> variant -> seconds of its runs; `names`: row -> its name; returns the figure"
    fig, ax = plt.subplots(figsize=(8.4, 1.3+.75*len(runs_s)))
    for i,(row, sides) in enumerate(runs_s.items()):
        for j,variant in enumerate(SIDES): draw_bar(ax, i+.4*j-.2, variant, sides[variant], words(variant, sides))
    longest = max(t for sides in runs_s.values() for o in SIDES for t in sides[o])
    ax.set(yticks=range(len(runs_s)), yticklabels=[names[o] for o in runs_s], ylim=(len(runs_s)-.5, -.5), xlim=(0, 1.3*longest),
           xlabel='from the files to the last metric (s)')
    ax.grid(False, axis='y')
    ax.tick_params(axis='y', length=0)
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[:2], labels[:2], loc='lower left', bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderaxespad=.2)
    finish(ax, title, machine, pad=26)
    return fig

def about_machine(record):
    "As `finish` takes it; beside a GPU, its cores are named, since they decode"
    machine = record['machine'] | dict(device=record['settings']['device'])
    cores = f", {machine['n_cores']} cores"
    return machine | dict(gpu=machine['gpu'] and machine['gpu']+cores)

def main():
    p = parser(__doc__)
    p.add_argument('records', nargs='+', help='what whole_fit.py wrote')
    p.add_argument('--rows', nargs='+')
    for o in ('figure', 'title'): p.add_argument(f'--{o}', required=True)
    args = p.parse_args()
    records = [read(o) for o in args.records]
    times = {k: v for k,v in seconds(done([run for o in records for run in o['runs']])).items() if has_both(v)}
    missing = [o for o in args.rows or [] if o not in times]
    if missing: p.error(f"no runs of both ways for {', '.join(missing)}; the records have them for {', '.join(times)}")
    names = {k: o['what'] for record in records for k,o in record['settings']['rows'].items()}
    draw({o: times[o] for o in args.rows or times}, names, args.title, about_machine(records[0])).savefig(args.figure, dpi=130)

if __name__=='__main__': main()
