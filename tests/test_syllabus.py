"nbs/labs/index.ipynb says of the labs what their own first cells say"
import re
from pathlib import Path

import nbformat
import pytest

from gpubench.labs import ONE_DEVICE, Lab, find_labs

syllabus = Path(__file__).resolve().parent.parent/'nbs'/'labs'/'index.ipynb'


def page(): return '\n\n'.join(o.source for o in nbformat.read(syllabus, 4).cells)

def rows(text, n):
    "The rows with n cells of all tables, without their heads"
    cells = [[c.strip() for c in o.strip().strip('|').split('|')] for o in text.splitlines() if o.startswith('|')]
    return [o for o in cells if len(o)==n and not re.fullmatch(r'-+|Lab|Word', o[0])]

def number(name): return name.split('_')[0]

def wrong_rows(listed, labs):
    "Where a row says something else than the lab, and which rows are missing, too many or out of order"
    own = {o.name: [f'[{o.name}]({o.name}.ipynb)', o.title, f'{o.minutes:g}', o.needs] for o in labs}
    names = [re.sub(r'\[(.*)\]\(.*\)', r'\1', o[0]) for o in listed]
    if names!=list(own): return [f'the rows are {names}, the labs {list(own)}']
    return [f'{name}: write | {" | ".join(own[name])} |' for name,row in zip(names, listed) if row[:4]!=own[name]]

def wrong_order(listed):
    "Labs that assume something which does not come before them"
    for i,row in enumerate(listed):
        before = {'lesson 1', *(re.search(r'\d+', o[0])[0] for o in listed[:i])}
        if extra := [o for o in row[4].split(', ') if o not in before]: yield f'{row[0]} assumes {extra}, which does not come before it'

def wrong_plans(planned, labs):
    "Labs to come that are there"
    there = {number(o.name) for o in labs}
    return [f'{o[0]} is there: move its row up' for o in planned if number(o[0]) in there]

def complaints(text, labs):
    listed, planned = rows(text, 5), [o for o in rows(text, 2) if re.match(r'\d', o[0])]
    return [*wrong_rows(listed, labs), *wrong_order(listed), *wrong_plans(planned, labs)]

def test_the_syllabus_and_the_labs(): assert complaints(page(), find_labs())==[]

def test_its_words_are_made_clear_in_labs_that_are_there():
    told = [o[2].split(', ') for o in rows(page(), 3)]
    assert told and {n for o in told for n in o} <= {number(o.name) for o in find_labs()}

def test_it_is_no_lab(): assert syllabus.stem not in [o.name for o in find_labs()]

def lab(name, title='Why?', minutes=1.5): return Lab(name, Path(f'{name}.ipynb'), title, minutes, 'any machine', ONE_DEVICE)

head = '| Lab | Question | Minutes | Needs | Assumes |\n|---|---|---|---|---|\n'
one = '| [01_a](01_a.ipynb) | Why? | 1.5 | any machine | lesson 1 |\n'
two = '| [02_b](02_b.ipynb) | Why? | 2 | any machine | 01 |\n'
plans = '\n| Lab | Question |\n|---|---|\n| 03_c | Who? |\n'
both = [lab('01_a'), lab('02_b', minutes=2.)]

@pytest.mark.parametrize('text,labs,said', [
    (head+one+two+plans, both, []),
    (head+one+plans, both, ['the rows are']),                                        # a new lab
    (head+two+one, both, ['the rows are', '02_b']),                                  # another order
    (head+one.replace('Why', 'How')+two, both, ['01_a: write | [01_a](01_a.ipynb) | Why? | 1.5 | any machine |']),
    (head+one.replace('1.5', '2')+two, both, ['01_a: write']),
    (head+one.replace('any machine', 'a GPU')+two, both, ['01_a: write']),
    (head+one.replace('(01_a', '(01_b')+two, both, ['01_a: write']),
    (head+one+two.replace('| 01 |', '| 01, 05 |'), both, ["[02_b](02_b.ipynb) assumes ['05']"]),
    (head+one+two+plans.replace('03_c', '02_c'), both, ['02_c is there'])], ids=str)
def test_a_syllabus_that_is_wrong(text, labs, said):
    found = complaints(text, labs)
    assert len(found)==len(said) and all(b in a for a,b in zip(found, said)), found
