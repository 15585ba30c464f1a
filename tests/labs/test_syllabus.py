"nbs/labs/index.ipynb says of the labs what they say of themselves"
import re, shlex
from pathlib import Path

import nbformat
import pytest

from gpubench.cli import cli
from gpubench.course.grades import lab_questions
from gpubench.course.lab_format import ONE_DEVICE, Lab, find_labs
from gpubench.course.labs import copy_labs, prepare_run
from helpers import as_module, root

page, teachers = (root/'nbs'/'labs'/f'{o}.ipynb' for o in ('index', 'teachers'))


def markdown(path): return '\n\n'.join(o.source for o in nbformat.read(path, 4).cells if o.cell_type=='markdown')

@pytest.fixture(scope='module')
def tool(): return as_module(root/'tools'/'syllabus.py')

def rows(text, n, head):
    "The rows with n cells of all tables, without those that begin with `head`"
    cells = [[c.strip() for c in o.strip().strip('|').split('|')] for o in text.splitlines() if o.startswith('|')]
    return [o for o in cells if len(o)==n and not re.fullmatch(f'-+|{head}', o[0])]

def number(name): return re.search(r'\d\d', name)[0]

# ---- order

def all_assumed(text):
    "Lab's number -> all that it assumes, those that its own ones assume included"
    found = {}
    for row in rows(text, 5, 'Lab'):
        own = row[4].split(', ')
        found[number(row[0])] = {*own, *(x for o in own for x in found.get(o, ()))}
    return found

def wrong_order(text):
    "Labs that assume something which does not come before them"
    before = {'lesson 1'}
    for row in rows(text, 5, 'Lab'):
        if extra := [o for o in row[4].split(', ') if o not in before]: yield f'{row[0]} assumes {extra}, which does not come before it'
        before.add(number(row[0]))

def wrong_words(text, words):
    "Labs that use a word of the syllabus after the lab that makes it clear, and do not assume that one; `words` is lab's number -> its text"
    assumed = all_assumed(text)
    for names,_,clear in rows(text, 3, r'Word|Lab|\d\d_.*'):
        for name in names.split(', '):
            if not re.search(name, words.get(clear, ''), re.I): yield f'{name!r} is not in lab {clear}'
            for lab,o in words.items():
                if lab>clear and re.search(name, o, re.I) and clear not in assumed[lab]: yield f'{lab} says {name!r} and does not assume {clear}'

def labs_text(): return {number(o.name): markdown(o.path) for o in find_labs(page.parent)}

def test_rows_are_the_labs_own(tool):
    text = markdown(page)
    assert tool.with_rows(text, find_labs(page.parent))==text, 'run `python tools/syllabus.py`'
    assert tool.with_deeper(text, find_labs(page.parent/'deeper'))==text, 'run `python tools/syllabus.py`'

def test_minutes_are_the_labs_own(tool):
    text = next(o.source for o in nbformat.read(teachers, 4).cells if tool.MINUTES[0] in o.source)
    assert tool.with_minutes(text, lab_questions())==text, 'run `python tools/syllabus.py`'

def test_students_copies_have_nothing_for_teachers(tmp_path):
    "No page for them, no `--key`, and no link that leads out of the folder"
    copy_labs(tmp_path)
    for o in tmp_path.rglob('*.ipynb'):
        text = markdown(o)
        assert not re.search('For teachers|--key', text), o
        for link in re.findall(r'\]\(([^)#:\s]+)\)', text):
            target = (o.parent/link).resolve()
            assert target.is_file() and target.is_relative_to(tmp_path), (o, link)
    assert not any((tmp_path/f'{o}.ipynb').exists() for o in ('teachers', 'answers'))

def test_what_a_lab_assumes_comes_before_it(): assert list(wrong_order(markdown(page)))==[]

def test_words_and_what_is_assumed():
    assert len([o for o in rows(markdown(page), 3, r'Word|Lab|\d\d_.*')])>=5
    assert list(wrong_words(markdown(page), labs_text()))==[]

def test_links_lead_to_files():
    found = re.findall(r'\]\(([^)#:]+)\)', markdown(page))
    assert len(found)>=len(find_labs(page.parent)) and [o for o in found if not (page.parent/o).is_file()]==[]

def test_it_is_no_lab(): assert page.stem not in [o.name for o in find_labs(page.parent)]

def test_its_commands_can_be_given():
    "Those of the teachers' page"
    found = [shlex.split(o.partition(' > ')[0], comments=True) for o in re.findall(r'^gpubench .+$', markdown(teachers), re.M)]
    assert {o[1] for o in found}=={'labs', 'run'}
    for _,verb,*rest in found:
        given = cli.commands[verb].make_context(verb, rest).params
        if verb=='run': assert prepare_run(given['names'], ['cpu'], given['profile'], texts=given['texts'], folder=page.parent)

# ---- can they fail?

def lab(name, title='Why?', minutes=1.5): return Lab(name, Path(f'{name}.ipynb'), title, minutes, 'any machine', ONE_DEVICE)

one = '| [01_a](01_a.ipynb) | Why? | 1.5 | any machine | lesson 1 |'
two = '| [02_b](02_b.ipynb) | Why? | 2 | any machine | 01 |'
plan = '| 03_c | Who? | 01, 02 |'
def syllabus(*there, planned=(plan,)):
    return '\n'.join(['| Lab | Question | Minutes | Needs | Assumes |', '|---|---|---|---|---|', *there, '',
                      '| Lab | Question | Assumes |', '|---|---|---|', *planned, '', '| Word | Means | Clear in |', '|---|---|---|', '| visit, A/A | one run | 01 |'])
both = [lab('01_a'), lab('02_b', minutes=2.)]

@pytest.mark.parametrize('text', [
    syllabus(one), syllabus(two, one), syllabus(one.replace('Why', 'How'), two), syllabus(one.replace('1.5', '2'), two),
    syllabus(one.replace('any machine', 'a GPU'), two), syllabus(one.replace('(01_a', '(01_b'), two), syllabus(one, two, two.replace('02', '04'))])
def test_rows_that_are_wrong_are_mended(tool, text):
    mended = tool.with_rows(text, both)
    assert mended!=text and tool.with_rows(mended, both)==mended
    assert mended==syllabus(one, two if two in text else two.replace('| 01 |', '| ? |'))

def test_rows_of_what_goes_deeper(tool):
    head = '\n'.join(['| [01_a](01_a.ipynb) | Why? | 1.5 | any machine | lesson 1 |', '', *tool.DEEPER])
    row = '| [01_b](deeper/01_b.ipynb) | Who? | 2 | any machine |'
    for text in (head, f"{head}\n{row.replace('Who', 'What')}"):
        assert tool.with_deeper(text+'\n\nEnd', [lab('01_b', 'Who?', 2)])==f'{head}\n{row}\n\nEnd'

def test_a_planned_lab_moves_up_with_what_it_assumes(tool):
    three = '| [03_cc](03_cc.ipynb) | Who? | 3 | any machine | 01, 02 |'
    labs = [*both, lab('03_cc', 'Who?', 3.)]
    assert tool.with_rows(syllabus(one, two), labs)==syllabus(one, two, three, planned=())
    assert tool.with_rows(syllabus(one, two, planned=()), labs)==syllabus(one, two, three.replace('01, 02', '?'), planned=())

def test_faults_of_order_and_words():
    late = syllabus(one, two.replace('| 01 |', '| 01, 05 |'))
    assert list(wrong_order(syllabus(one, two)))==[] and list(wrong_order(late))==["[02_b](02_b.ipynb) assumes ['05'], which does not come before it"]
    said = {'01': 'A visit is one run, an A/A pair two.', '02': 'Each visit counts.'}
    assert list(wrong_words(syllabus(one, two), said))==[]
    assert list(wrong_words(syllabus(one, two.replace('| 01 |', '| lesson 1 |')), said))==["02 says 'visit' and does not assume 01"]
    assert list(wrong_words(syllabus(one, two), said | {'01': 'A visit.'}))==["'A/A' is not in lab 01"]
    three = '| [03_c](03_c.ipynb) | Who? | 3 | any machine | 02 |'                 # which assumes 01
    assert list(wrong_words(syllabus(one, two, three), said | {'03': 'A visit.'}))==[]
