"""Whole trainings as a figure: seconds from the files to the last metric, stock fastai against `speed_up`

    whole_fit_figure.py RECORD … --figure whole_fit.png --rows photos_4 photos_20 presizing
    --title 'From a folder of photographs to a trained model'

(in one line). A RECORD is what whole_fit.py wrote; several are of the same machine. Without --rows, all rows that have
both are drawn."""
from statistics import median

from gpubench.show.plot import drawing, plt, series_style
from gpubench.ground.stats import ratio_ci

from common import parser, read_json
from figures import draw_bar, finish, name_bars
from whole_fit import done, has_both, seconds

SIDES = dict(stock=('stock fastai', 0), speed_up=('with speed_up', 1))     # variant -> label and color

def words(variant, sides):
    "What stands beside a bar"
    times = ratio_ci(sides['stock'], sides[variant]).mid             # as in the table
    return f'{median(sides[variant]):.3g} s' + (f' ({times:.1f} times as fast)' if variant=='speed_up' and times>1.05 else '')

@drawing()
def draw(runs_s, names, title, machine):
    "`runs_s`: row -> variant -> seconds of its runs; `names`: row -> its name; returns the figure"
    fig, ax = plt.subplots(figsize=(8.4, 1.3+.75*len(runs_s)))
    for i,(row, sides) in enumerate(runs_s.items()):
        for j,(variant, (label, color)) in enumerate(SIDES.items()):
            draw_bar(ax, i+.4*j-.2, sides[variant], series_style(color)['color'], words(variant, sides), .36, label)
    longest = max(t for sides in runs_s.values() for o in SIDES for t in sides[o])
    name_bars(ax, [names[o] for o in runs_s])
    ax.set(xlim=(0, 1.3*longest), xlabel='from the files to the last metric (s)')
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[:2], labels[:2], loc='lower left', bbox_to_anchor=(0, 1), ncols=2, frameon=False,
              borderaxespad=.2)
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
    records = [read_json(o) for o in args.records]
    times = {k: v for k,v in seconds(done([run for o in records for run in o['runs']])).items() if has_both(v)}
    missing = [o for o in args.rows or [] if o not in times]
    if missing: p.error(f"no runs of both ways for {', '.join(missing)}; the records have them for {', '.join(times)}")
    names = {k: o['what'] for record in records for k,o in record['settings']['rows'].items()}
    draw({o: times[o] for o in args.rows or times}, names, args.title,
         about_machine(records[0])).savefig(args.figure, dpi=130)

if __name__=='__main__': main()
