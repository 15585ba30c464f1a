"""What ladder.py wrote, as a table for Markdown: a row for each case, from the file with the highest number that has it; medians in microseconds
a step, ratios with 95 % intervals

    ladder_table.py benchmarks/results/h200/fast/ladder_*.json"""
import json
from pathlib import Path
from statistics import median

from gpubench.plot import _by_number
from gpubench.stats import ratio_ci

from common import parser

LIMITS = dict(hand='by hand', plain_loop='plain loop', jax='JAX')
SIDES = dict(stock='stock, same precision', graph='graph', compiled_graph='compiled graph') | LIMITS

def latest(paths):
    "case -> file and what it holds, from the file with the highest number that has the case"
    cases = {}
    for file in sorted(paths, key=lambda o: _by_number(o.stem)):
        found = json.loads(file.read_text())
        cases |= {case: (file, found) for case,o in found['cases'].items() if 'step_us' in o}
    return cases

def row(case, file, found):
    step_us = found['cases'][case]['step_us']
    times = step_us | dict(stock=step_us.get('stock_bf16') or step_us.get('stock'))
    def ratio(k):
        o = ratio_ci(times['compiled_graph'], times[k])
        return f'{o.mid:.3f} ({o.lo:.3f} to {o.hi:.3f})'
    return [f'`{case}`', f'`{file.stem}`', *(f'{median(times[k]):,.0f}' if times.get(k) else '' for k in SIDES),
            *(ratio(k) if k in times else '' for k in LIMITS)]

def main():
    p = parser(__doc__)
    p.add_argument('records', nargs='+', type=Path)
    found = latest(p.parse_args().records)
    head = ['case', 'file', *SIDES.values(), *(f'compiled graph ÷ {o}' for o in LIMITS.values())]
    for o in [head, ['---']*len(head), *(row(case, *found[case]) for case in sorted(found, key=_by_number))]: print('|', ' | '.join(o), '|')

if __name__=='__main__': main()
