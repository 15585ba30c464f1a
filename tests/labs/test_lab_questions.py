"The labs' questions and their answers: each is asked once, each reply can be reached"
import re

import nbformat
import pandas as pd
import pytest

from gpubench.course.lab_functions import LabFunction
from gpubench.course.lab_questions import QUESTIONS, Question
from gpubench.course.checks import check

from helpers import root

labs = sorted((root/'nbs'/'labs').rglob('[0-9]*.ipynb'))
ask = re.compile(r"check\('(\d\d\.\w+)', \w+(?:, \w+=\w+)*\)")
# the cell of a function: what it is for, a body of `...`, and the call
to_write = re.compile(r"(?:# .+\n)+def (\w+)\(.*\):(?: *#.+)?\n    \.\.\.\n\ncheck\('\d\d\.\w+', \1\)")
# what a lab measured, for answers that depend on it; a wrong answer
found = {'02.plateau': (dict(plateau=[256, 1024]), 1024),
         '03.per_param': (dict(nets=pd.DataFrame(dict(flop_per_param=[3., 1., 2.]), index=['lenet', 'cnn', 'resnet'])), ['cnn']),
         '05.longest': (dict(work_ms={'convolution': 30., 'relu': 12.}), 12)}

def asked(path):
    "The cells of a lab that ask a question: its name, the cell's lines"
    for o in nbformat.read(path, 4).cells:
        if o.cell_type=='code' and re.search(r'\bcheck\(', o.source):
            names = ask.findall(o.source)
            yield from ((n, o.source.splitlines()) for n in names or [None])

def holds_the_question(name, lines):
    "A question, `answer = None` and a call; or a function without a body"
    if isinstance(QUESTIONS.get(name), LabFunction):
        found = to_write.fullmatch('\n'.join(lines))
        return found and found[1]==QUESTIONS[name].reference.__name__
    return (all(o.startswith('# ') for o in lines[:-2]) and len(lines)>2
            and re.fullmatch(r'answer = None( +#.*)?', lines[-2]) and ask.fullmatch(lines[-1]) and ', answer' in lines[-1])

def wrong_cells(path):
    "Cells that hold more than a question"
    return [lines for name,lines in asked(path) if not (name and name[:2]==path.stem[:2] and holds_the_question(name, lines))]

def a_wrong(q): return next(o for o in q.options if o!=q.correct) if q.options else [] if isinstance(q.correct, list) else 1e9

@pytest.mark.parametrize('path', labs, ids=lambda o: o.stem)
def test_cells_hold_the_question_alone(path): assert wrong_cells(path)==[]

def test_each_question_is_asked_once():
    names = [n for o in labs for n,_ in asked(o)]
    assert sorted(names)==sorted(QUESTIONS)

def test_options_stand_in_the_question():
    for lab in labs:
        for name,lines in asked(lab):
            for o in QUESTIONS[name].options: assert repr(o) in '\n'.join(lines), (name, o)

@pytest.mark.parametrize('name', [k for k,o in QUESTIONS.items() if not isinstance(o, LabFunction)])
def test_every_reply(name):
    values, wrong = found.get(name, ({}, None))
    q = QUESTIONS[name].filled_in(**values)
    assert QUESTIONS[name].is_computed==(name in found) and (q.hint or q.hints)
    assert check(name, None, **values).text.startswith('Not answered yet')
    assert check(name, q.correct, **values).ok is True and q.why in check(name, q.correct, **values).text
    reply = check(name, a_wrong(q) if wrong is None else wrong, **values)
    assert reply.ok is False and q.hint in reply.text
    for o,said in dict(q.hints).items():
        reply = check(name, o, **values)
        assert reply.ok is False and said in reply.text, o
    if isinstance(q.correct, str): assert check(name, 'no such option', **values).text.startswith('Choose one of')

def test_a_lab_that_holds_its_answer_is_found(tmp_path):
    def lab(*sources):
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(o) for o in sources])
        nbformat.write(nb, tmp_path/'08_x.ipynb')
        return wrong_cells(tmp_path/'08_x.ipynb')
    good = "# How many?\nanswer = None   # times\ncheck('08.graph', answer)"
    assert lab(good, 'check_guess(3, 4)')==[]
    assert len(lab(good.replace('None', '4'), good.replace('08', '07'), good.replace('answer =', 'right = 4\nanswer ='), "check('08.graph', 4)"))==4
    assert Question(3).filled_in()==Question(3)

def test_a_lab_that_holds_its_function_is_found():
    good = ['# How many?', 'def n_trained(n, bs, drop_last):', '    ...', '', "check('02.n_trained', n_trained)"]
    def with_line(i, text): return [*good[:i], text, *good[i+1:]]
    assert holds_the_question('02.n_trained', good)
    for bad in (good[1:], with_line(2, '    return n//bs*bs'), with_line(1, 'def trained(n, bs, drop_last):'),
                with_line(4, "check('02.n_trained', n_trained, seed=1)"), [*good, 'x = 1']):
        assert not holds_the_question('02.n_trained', bad), bad
