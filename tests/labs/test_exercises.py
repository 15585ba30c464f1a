"Functions that students write: wrong ones are found, whatever they are called with, and nothing of ours is shown"
from random import Random
from unittest.mock import patch

import nbformat
import pytest

from gpubench.course import checks
from gpubench.course.checks import check, check_function, mine_or_ours
from gpubench.course.lab_questions import QUESTIONS, Exercise

from helpers import root

exercises = {k: o for k,o in QUESTIONS.items() if isinstance(o, Exercise)}
labs = sorted((root/'nbs'/'labs').rglob('[0-9]*.ipynb'))

# first attempts that a student might hand in, each wrong in another way; those in `at_the_edge` are right for what is drawn
at_the_edge, attempts = {}, {}
attempts['02.n_trained'] = [lambda n, bs, drop_last: n, lambda n, bs, drop_last: n//bs*bs, lambda n, bs, drop_last: n//bs]
at_the_edge['02.n_trained'] = [lambda n, bs, drop_last: max(bs, n//bs*bs) if drop_last else n]

@pytest.mark.parametrize('name', exercises)
def test_ours_is_right(name):
    for seed in range(20): assert check(name, exercises[name].reference, seed=seed).ok is True

@pytest.mark.parametrize('name', exercises)
def test_wrong_ones_are_found(name):
    assert attempts[name] and at_the_edge[name]
    for seed in range(20):
        for f in attempts[name]: assert check(name, f, seed=seed).ok is False
        for f in at_the_edge[name]:
            reply = check(name, f, seed=seed)
            assert reply.ok is False and 'not always' in reply.text or 'It raised' in reply.text, reply

@pytest.mark.parametrize('name', exercises)
def test_arguments_are_drawn_anew(name):
    ex = exercises[name]
    calls = {repr(ex.draw(Random(o))) for o in range(20)}
    assert ex.hidden and ex.hint and ex.why and len(calls)>10

@pytest.mark.parametrize('name', exercises)
def test_not_written_yet_is_no_answer(name):
    n = exercises[name].reference.__code__.co_argcount
    stub = eval(f"lambda {', '.join(f'a{i}' for i in range(n))}: None")
    for f in (None, ..., stub): assert check(name, f).ok is None and check(name, f).text.startswith('Not answered yet')
    assert mine_or_ours(name, stub) is exercises[name].reference

def test_no_lab_holds_a_solution():
    "Nor a key without it"
    from gpubench.course.grades import teacher_key
    key, texts = teacher_key(), {o: '\n'.join(c.source for c in nbformat.read(o, 4).cells) for o in labs}
    for name,ex in exercises.items():
        body = [o.strip() for o in ex.solution.splitlines() if o.strip().startswith('return ')]
        assert body and [o.name for o,text in texts.items() if any(line in text for line in body)]==[], name
        assert all(f'  {o}' in key for o in ex.solution.splitlines()), name
        assert f"mine_or_ours('{name}'" in '\n'.join(texts.values()), name

# ---- the mechanism, broken

def double(x): return 2*x
ex = Exercise(double, lambda rng: (rng.randint(2, 99),), hidden=((0,),), hint='Twice.')

def test_a_mechanism_that_accepts_everything_would_be_found():
    with patch.object(checks, '_agree', lambda *args: True): assert check_function(ex, lambda x: -1).ok is True
    assert check_function(ex, lambda x: -1).ok is False

def test_a_hidden_case_decides():
    wrong = lambda x: 2*x or 7
    assert check_function(ex, wrong).ok is False
    assert check_function(Exercise(double, ex.draw), wrong).ok is True

def test_a_hidden_case_is_not_shown():
    def seven(x): return 2*x or 7654
    def divides(x): return 2*x//bool(x)
    assert check_function(ex, seven).text=='Not yet. It is right for the arguments that are drawn, but not always. Twice.'
    assert check_function(ex, divides).text.startswith('Not yet. It raised ZeroDivisionError')

def test_an_error_is_a_sentence_with_its_line():
    def broken(x):
        y = {}
        return y[x]
    text = check_function(ex, broken, seed=1).text
    assert 'raised KeyError: ' in text and f'in line {broken.__code__.co_firstlineno+2} (`return y[x]`)' in text
    assert 'Traceback' not in text and 'checks.py' not in text
    with pytest.raises(KeyboardInterrupt):                           # a student who interrupts a loop
        check_function(ex, lambda x: (_ for _ in ()).throw(KeyboardInterrupt))

def test_arguments_that_a_function_changes_are_its_own():
    total = Exercise(sum, lambda rng: ([rng.randint(1, 9) for _ in range(3)],), hidden=(([],),))
    def emptied(values): return sum(values.pop() for _ in range(len(values)))
    assert check_function(total, emptied).ok is True
    assert check_function(total, lambda values: values[0]).ok is False
