"Functions that students write: wrong ones are found, whatever they are called with, and nothing of ours is shown"
import re
from random import Random
from unittest.mock import patch

import nbformat
import pytest
from torch.nn.functional import cross_entropy

from gpubench.course import checks
from gpubench.course.checks import check, check_function, mine_or_ours
from gpubench.course.lab_questions import EXERCISE_ANSWERS, QUESTIONS, Exercise

from helpers import root

exercises = {k: o for k,o in QUESTIONS.items() if isinstance(o, Exercise)}
labs = sorted((root/'nbs'/'labs').rglob('[0-9]*.ipynb'))

# first attempts that a student might hand in, each wrong in another way; those in `at_the_edge` are right for what is drawn
at_the_edge, attempts = {}, {}
attempts['02.n_trained'] = [lambda n, bs, drop_last: n, lambda n, bs, drop_last: n//bs*bs, lambda n, bs, drop_last: n//bs]
at_the_edge['02.n_trained'] = [lambda n, bs, drop_last: max(bs, n//bs*bs) if drop_last else n]
attempts['13.paid_back'] = [lambda cost_s, before_s, after_s: cost_s/before_s, lambda cost_s, before_s, after_s: before_s/after_s,
                            lambda cost_s, before_s, after_s: cost_s//(before_s-after_s)]
at_the_edge['13.paid_back'] = [lambda cost_s, before_s, after_s: -(-cost_s//max(1, before_s-after_s)),
                               lambda cost_s, before_s, after_s: -(-cost_s//(before_s-after_s))]

def half_waited(work, wait, clock): return [clock(), work(), wait(), clock()]
def ms_of(seen): return 1e3*(seen[-1]-seen[0])
attempts['01.waited_ms'] = [lambda work, wait, clock: ms_of([clock(), work(), clock()]), lambda work, wait, clock: ms_of([work(), clock(), wait(), clock()][1:]),
                            lambda work, wait, clock: ms_of(half_waited(work, wait, clock))/1e3]
at_the_edge['01.waited_ms'] = [lambda work, wait, clock: ms_of(half_waited(work, wait, clock))]

attempts['03.least_ms'] = [lambda ops, f, b: sum(max(x/f, y/b) for x,y in ops), lambda ops, f, b: 1e3*sum(x/f+y/b for x,y in ops),
                           lambda ops, f, b: 1e3*sum(x/f for x,y in ops)]
at_the_edge['03.least_ms'] = [lambda ops, f, b: 1e3*max(ops[0][0]/f, ops[0][1]/b)+1e3*sum(max(x/f, y/b) for x,y in ops[1:]),
                              lambda ops, f, b: 1e3*sum(max(x/f, y/b) for x,y in ops if x)]

def loaded(n, bs, workers, image_ms, step_ms, rounds=lambda n, workers: -(-n//workers)): return max(rounds(n, workers)*bs*image_ms, n*step_ms)
attempts['04.epoch_ms'] = [lambda *a: loaded(*a, rounds=lambda n, workers: n/workers), lambda n, bs, w, i, s: n*(bs*i/w+s) if w else n*(bs*i+s)]
at_the_edge['04.epoch_ms'] = [loaded, lambda n, bs, w, i, s: loaded(n, bs, max(1, w), i, s)]

def summed(kernels, end_s): return sum(b-a for a,b in kernels)/end_s
def from_start(kernels, end_s): return (max(b for _,b in kernels)-min(a for a,_ in kernels))/end_s
def in_order(kernels, end_s): # as they come, one after the other
    busy = last = 0
    for a,b in kernels: busy, last = busy+max(0, b-max(a, last)), b
    return busy/end_s
attempts['05.busy_frac'], at_the_edge['05.busy_frac'] = [from_start, lambda k, end_s: summed(k, 1)], [summed, in_order]

def in_pieces(net, pieces, share=lambda n, pieces: n/sum(len(y) for _,y in pieces), keep=False):
    total = 0.
    if not keep: net.zero_grad()
    for x,y in pieces:
        loss = cross_entropy(net(x), y)*share(len(y), pieces)
        loss.backward()
        total += loss.item()
    return total, [o.grad for o in net.parameters()]
attempts['06.accumulated'] = [lambda *a: in_pieces(*a, share=lambda n, pieces: 1), lambda *a: in_pieces(*a)[0], lambda *a: in_pieces(*a)[1]]
at_the_edge['06.accumulated'] = [lambda *a: in_pieces(*a, share=lambda n, pieces: 1/len(pieces)), lambda *a: in_pieces(*a, keep=True)]

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
        body = [o.strip() for o in ex.solution.splitlines()[1:] if len(o.strip())>12 and not o.strip().startswith('"')]
        assert body and [o.name for o,text in texts.items() if all(line in text for line in body)]==[], name
        assert all(f'  {o}' in key for o in ex.solution.splitlines()), name
        assert f"mine_or_ours('{name}'" in '\n'.join(texts.values()), name

def exercise_numbers(path):
    "The numbers of the exercises at the end of a lab"
    [text] = [o.source for o in nbformat.read(path, 4).cells if '## Exercises' in o.source]
    return [int(o) for o in re.findall(r'^(\d+)\. ', text.split('## Exercises')[1].split('\n## ')[0], re.M)]

def test_exercises_have_answers_in_the_key():
    "The first of them is about a Learner of the student's own"
    for path in labs:
        if path.parent.name=='deeper' or path.stem[:2] not in EXERCISE_ANSWERS: continue
        numbers = exercise_numbers(path)
        assert numbers==[*range(1, len(EXERCISE_ANSWERS[path.stem[:2]])+1)], path.stem
        text = '\n'.join(o.source for o in nbformat.read(path, 4).cells if '## Exercises' in o.source)
        assert 'Learner` of your own' in text.split('## Exercises')[1].split('\n2. ')[0], path.stem

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
