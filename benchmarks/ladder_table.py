"""What ladder.py wrote, as three tables for Markdown: the rungs, the comparison with the step by hand and other
frameworks, and a look inside. Each has a row for a case, from the file with the highest number that has what it shows;
medians, ranges in brackets, ratios with 95 % intervals

    ladder_table.py benchmarks/results/h200/fast/ladder_*.json"""
from pathlib import Path
from statistics import median

from gpubench.show.draw import by_number
from gpubench.ground.stats import ratio_ci

from common import parser, read_json, spread

RUNGS = dict(stock='stock', stock_bf16='stock, bf16', no_waits='no waiting for losses',
             fused='and the fused optimizer', kernels="and cuDNN's search",
             graph='and a CUDA graph', compiled_graph='of compiled kernels')
LIMITS = dict(hand='by hand', plain_loop='plain loop', jax='JAX')
SIDES = dict(same='stock, same precision', graph='graph', compiled_graph='compiled graph') | LIMITS

def latest(paths, has=lambda o: 'hand' in o['step_us']):
    "case -> file and what it holds, from the file with the highest number of those whose case has what is needed"
    cases = {}
    for file in sorted(paths, key=lambda o: by_number(o.stem)):
        found = read_json(file)
        cases |= {case: (file, found) for case,o in found['cases'].items() if 'step_us' in o and has(o)}
    return cases

def same_precision(found): return found.get('stock_bf16') or found.get('stock')

def ratio(a, b):
    o = ratio_ci(a, b)
    return f'{o.mid:.3f} ({o.lo:.3f} to {o.hi:.3f})'

def rungs(found):
    us = found['step_us']
    cells = {label: spread(us[k], ',.0f') if k in us else '' for k,label in RUNGS.items()}
    return cells | {'stock of the same precision ÷ compiled graph': f"{median(same_precision(us))/median(us['compiled_graph']):.1f}"}

def comparison(found):
    us = found['step_us'] | dict(same=same_precision(found['step_us']))
    return {label: f'{median(us[k]):,.0f}' if us.get(k) else '' for k,label in SIDES.items()} | {
        f'compiled graph ÷ {label}': ratio(us['compiled_graph'], us[k]) if k in us else ''
        for k,label in LIMITS.items()}

def look_inside(found):
    stock, fast = same_precision(found['inside']), found['inside']['compiled_graph']
    joules, valid = found.get('joules_per_image', {}), found.get('valid_us', {})
    def listed(values, form='{:,.0f}'): return ', '.join(form.format(o) for o in values)
    return {'launches: stock, compiled graph': listed(o['launches'] for o in (stock, fast)),
            'kernels': listed(o['kernels'] for o in (stock, fast)),
            'their time': listed(o['device_us'] for o in (stock, fast)),
            'step, compiled graph': f"{found['median_us']['compiled_graph']:,.0f}",
            'bound': f"{found['bound_us']:,.0f}",
            'a batch of validation': listed(
                median(o) for o in (same_precision(valid), valid['compiled_graph'])) if valid else '',
            'mJ an image: stock, compiled graph, by hand, plain loop, JAX': listed(
                (1e3*o for o in (same_precision(joules), *(joules[k] for k in ('compiled_graph', *LIMITS)))), '{:,.2f}') if joules else ''}

def main():
    p = parser(__doc__)
    p.add_argument('records', nargs='+', type=Path)
    paths = p.parse_args().records
    tables = [(latest(paths, lambda o: 'graph' in o['step_us']), rungs), (latest(paths), comparison),
              (latest(paths, lambda o: o.get('inside')), look_inside)]
    for found,cells in tables:
        if not found: continue                                  # no file has what this table shows
        rows = []
        for case in sorted(found, key=by_number):
            file, o = found[case]
            rows.append({'case': f'`{case}`', 'file': f'`{file.stem}`'} | cells(o['cases'][case]))
        for o in [list(rows[0]), ['---']*len(rows[0]), *(o.values() for o in rows)]: print('|', ' | '.join(o), '|')
        print()

if __name__=='__main__': main()
