"""What pages and cells are written from is in step with the labs; what students get has nothing for teachers; each question can be answered"""
import re, shlex

import nbformat
import pandas as pd
import pytest
import yaml

from gpubench.cli import cli
from gpubench.course.export import lab_questions
from gpubench.course.checks import QUESTIONS, LabFunction, check
from gpubench.course.labs import copy_labs, find_labs, prepare_run
from gpubench.ground.stats import Choice
from helpers import as_module, root

folder = root/'nbs'/'labs'
labs = [*find_labs(folder), *find_labs(folder/'deeper')]

def markdown(path): return '\n\n'.join(o.source for o in nbformat.read(path, 4).cells if o.cell_type=='markdown')
def code(path): return '\n\n'.join(o.source for o in nbformat.read(path, 4).cells if o.cell_type=='code')


# ---- pages

def test_rows_of_the_syllabus_and_minutes_are_the_labs_own():
    tool, text = as_module(root/'tools'/'syllabus.py'), markdown(folder/'index.ipynb')
    assert tool.with_deeper(tool.with_rows(text, find_labs(folder)), find_labs(folder/'deeper'))==text, 'run `python tools/syllabus.py`'
    text = next(o.source for o in nbformat.read(folder/'teachers.ipynb', 4).cells if tool.MINUTES[0] in o.source)
    assert tool.with_minutes(text, lab_questions())==text, 'run `python tools/syllabus.py`'

def test_badges_and_the_install_cell():
    tool = as_module(root/'tools'/'hosted.py')
    def parts(nb): return [(o.cell_type, o.source, o.metadata.get('tags')) for o in nb.cells]
    def changed(path): return parts(nbformat.read(path, 4))!=parts(tool.make_hosted(nbformat.read(path, 4), tool.page_name(path)))
    assert [o.name for o in labs if changed(o.path)]==[], 'run `python tools/hosted.py`'

def test_profiles_have_every_lab():
    for o in (folder, folder/'deeper'):
        assert [*yaml.safe_load((o/'full.yaml').read_text(encoding='utf-8'))]==[lab.name for lab in find_labs(o)]

def test_students_copies_have_nothing_for_teachers(tmp_path):
    "No page for them, no `--key`, no outputs, and no link that leads out of the folder"
    copy_labs(tmp_path)
    for o in tmp_path.rglob('*.ipynb'):
        assert not any(c.get('outputs') or c.get('execution_count') for c in nbformat.read(o, 4).cells), o
        text = markdown(o)
        assert not re.search('For teachers|--key', text), o
        for link in re.findall(r'\]\(([^)#:\s]+)\)', text):
            target = (o.parent/link).resolve()
            assert target.is_file() and target.is_relative_to(tmp_path), (o, link)
    assert not any((tmp_path/f'{o}.ipynb').exists() for o in ('teachers', 'answers'))
    assert not (tmp_path/'questions.yaml').exists()

PAGES = ['nbs/labs/teachers.ipynb', 'nbs/practitioner.ipynb', 'CLUSTER.md', 'nbs/labs/records/README.md']

@pytest.mark.parametrize('page', PAGES)
def test_commands_of_a_page_can_be_given(page):
    text = markdown(root/page) if page.endswith('.ipynb') else (root/page).read_text(encoding='utf-8')
    found = [shlex.split(o.partition(' > ')[0], comments=True) for o in re.findall('^gpubench .+$', text, re.M)]
    assert found
    for _,verb,*rest in found:
        given = cli.commands[verb].make_context(verb, rest).params
        if verb=='run' and not given['deeper']: assert prepare_run(given['names'], 'cpu', given['profile'], dict(given['param']), folder=folder)


# ---- questions

# what a lab measured, for answers that depend on it; a wrong answer
found = {'02.plateau': (dict(choice=Choice(256, 1024)), 1024),
         '03.per_param': (dict(nets=pd.DataFrame(dict(flop_per_param=[3., 1., 2.]), index=['lenet', 'cnn', 'resnet'])), ['cnn']),
         '05.longest': (dict(work_ms={'convolution': 30., 'relu': 12.}), 12)}

def asked(path): return re.findall(r"\bcheck\('(\d\d\.\w+)'", code(path))

def test_each_question_is_asked_once_and_shows_its_options():
    assert sorted(name for o in labs for name in asked(o.path))==sorted(QUESTIONS)
    for o in labs: assert all(repr(option) in code(o.path) for name in asked(o.path) for option in QUESTIONS[name].options), o.name

def a_wrong(q): return next(o for o in q.options if o!=q.correct) if q.options else [] if isinstance(q.correct, list) else 1e9

@pytest.mark.parametrize('name', [k for k,o in QUESTIONS.items() if not isinstance(o.correct, LabFunction)])
def test_every_reply(name):
    values, wrong = found.get(name, ({}, None))
    q = QUESTIONS[name].filled_in(**values)
    assert check(name, None, **values).ok is None
    assert check(name, q.correct, **values).ok is True and q.why in check(name, q.correct, **values).text
    reply = check(name, a_wrong(q) if wrong is None else wrong, **values)
    assert reply.ok is False and any(o in reply.text for o in (q.hint, *q.hints.values()))
    for o,said in dict(q.hints).items():
        reply = check(name, o, **values)
        assert reply.ok is False and said in reply.text, o
