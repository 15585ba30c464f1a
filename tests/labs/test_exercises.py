"Functions that students write: wrong ones are found, whatever they are called with, and nothing of ours is shown"
import math
import re

import nbformat
import numpy as np
import pytest
import torch
from scipy.stats import t
from torch.nn.functional import cross_entropy

from gpubench.course.checks import QUESTIONS, LabFunction, Question, check, check_function

from helpers import root

exercises = {k: o.correct for k,o in QUESTIONS.items() if isinstance(o.correct, LabFunction)}
labs = sorted((root/'nbs'/'labs').rglob('[0-9]*.ipynb'))

# what a student might hand in, each wrong in another way, most of them only at the edges
wrong = {}
wrong['02.n_trained'] = [lambda n, bs, drop_last: n//bs, lambda n, bs, drop_last: max(bs, n//bs*bs) if drop_last else n]
wrong['13.paid_back'] = [lambda cost_s, before_s, after_s: cost_s/before_s, lambda cost_s, before_s, after_s: -(-cost_s//max(1, before_s-after_s)),
                         lambda cost_s, before_s, after_s: -(-cost_s//(before_s-after_s))]

def half_waited(work, wait, clock): return [clock(), work(), wait(), clock()]
def ms_of(seen): return 1e3*(seen[-1]-seen[0])
wrong['01.waited_ms'] = [lambda work, wait, clock: ms_of([clock(), work(), clock()]), lambda *o: ms_of(half_waited(*o))]

wrong['03.least_ms'] = [lambda ops, f, b: sum(max(x/f, y/b) for x,y in ops),
                        lambda ops, f, b: 1e3*max(ops[0][0]/f, ops[0][1]/b)+1e3*sum(max(x/f, y/b) for x,y in ops[1:]),
                        lambda ops, f, b: 1e3*sum(max(x/f, y/b) for x,y in ops if x)]

def loaded(n, bs, workers, image_ms, step_ms, rounds=lambda n, workers: -(-n//workers)): return max(rounds(n, workers)*bs*image_ms, n*step_ms)
wrong['04.epoch_ms'] = [lambda *a: loaded(*a, rounds=lambda n, workers: n/workers), loaded, lambda n, bs, w, i, s: loaded(n, bs, max(1, w), i, s)]

def summed(kernels, end_s): return sum(b-a for a,b in kernels)/end_s
def in_order(kernels, end_s): # as they come, one after the other
    busy = last = 0
    for a,b in kernels: busy, last = busy+max(0, b-max(a, last)), b
    return busy/end_s
wrong['05.busy_frac'] = [lambda k, end_s: summed(k, 1), summed, in_order]

def in_pieces(net, pieces, share=lambda n, pieces: n/sum(len(y) for _,y in pieces), keep=False):
    total = 0.
    if not keep: net.zero_grad()
    for x,y in pieces:
        loss = cross_entropy(net(x), y)*share(len(y), pieces)
        loss.backward()
        total += loss.item()
    return total, [o.grad for o in net.parameters()]
def whole(net, pieces): return in_pieces(net, [tuple(map(torch.cat, zip(*pieces)))])   # needs the memory of all of it
wrong['06.accumulated'] = [whole, lambda *a: in_pieces(*a)[0], lambda *a: in_pieces(*a, share=lambda n, pieces: 1/len(pieces)),
                           lambda *a: in_pieces(*a, keep=True)]

def scaler(is_bad=lambda g: not g.isfinite().all(), skipped=0, n_doubled=0): # the scaler with these mistakes
    def unscaled(grads, scale, n_good, grow_after=2000):
        if any(map(is_bad, grads)): return None, scale/2, skipped or n_good*(skipped is None)
        return ([g/scale for g in grads], 2*scale, n_doubled) if n_good+1==grow_after else ([g/scale for g in grads], scale, n_good+1)
    return unscaled
wrong['07.unscaled'] = [scaler(skipped=None), scaler(is_bad=lambda g: g.isinf().any()), scaler(n_doubled=5), scaler(is_bad=lambda g: (g==math.inf).any())]

def kept_tensors(batches, x, y, replay, loss, eager): return [[x.copy_(xb), y.copy_(yb), replay(), loss][-1] for xb,yb in batches]
def any_size(batches, x, y, replay, loss, eager): return [[x.copy_(xb), y.copy_(yb), replay(), float(loss)][-1] for xb,yb in batches]
def no_short_ones(batches, x, y, replay, loss, eager): return any_size([o for o in batches if len(o[0])==len(x)], x, y, replay, loss, eager)
def never_replayed(batches, x, y, replay, loss, eager): return [float(eager(*o)) for o in batches]
wrong['08.replay_all'] = [never_replayed, kept_tensors, any_size, no_short_ones]

wrong['09.mean_gradients'] = [lambda grads, n_images: [sum(o)/len(o) for o in zip(*grads)],
                              lambda grads, n_images: [sum(n*g for n,g in zip(n_images, o))/sum(n_images) for o in zip(*grads)]]

def rate(step, bs, base_bs, base_lr, warmup=0, power=1.): return base_lr+(base_lr*(bs/base_bs)**power-base_lr)*min(1, step/warmup)
wrong['10.rate_at'] = [lambda *args: rate(*args[:5]), rate, lambda *args: rate(*args) if args[4] else args[3]]

def by_rounds(a, b, kept=lambda r: np.ones(len(r), bool)):
    r = np.log(np.array(a)/np.array(b))
    n = len(r := r[kept(r)])
    half = t.ppf(.975, n-1)*r.std(ddof=1)/n**.5
    return tuple(np.exp([r.mean(), r.mean()-half, r.mean()+half]))
wrong['11.paired_ratio'] = [lambda a, b: by_rounds(sorted(a), sorted(b)), by_rounds, lambda a, b: by_rounds(a, b, kept=np.isfinite)]

def cost(rates, n_images, n_devices, price_per_h): return tuple(n_images/o*n_devices*price_per_h/3600 for o in rates)
wrong['12.training_price'] = [lambda n, r, k, p: cost(r, n, k, p), lambda n, r, k, p: cost([r[i] for i in (0, 2, 1)], n, 1, p)]

@pytest.mark.parametrize('name', exercises)
def test_ours_is_right_and_wrong_ones_are_found(name):
    assert [check(name, f).ok for f in (exercises[name].reference, *wrong[name])]==[True]+[False]*len(wrong[name])

def test_the_teachers_notebook_runs():
    names = {}
    for cell in nbformat.read(root/'nbs'/'labs'/'functions.ipynb', 4).cells:
        if cell.cell_type=='code': exec(cell.source, names)

def test_no_lab_holds_a_solution():
    "Nor a key without it"
    from gpubench.course.export import teacher_key
    key, texts = teacher_key(), {o: '\n'.join(c.source for c in nbformat.read(o, 4).cells) for o in labs}
    for name,ex in exercises.items():
        body = [o.strip() for o in ex.solution.partition('def ')[2].splitlines()[1:] if len(o.strip())>12 and not o.strip().startswith('"')]
        assert body and [o.name for o,text in texts.items() if all(line in text for line in body)]==[], name
        assert all(f'  {o}' in key for o in ex.solution.splitlines()), name
        assert f"mine_or_ours('{name}'" in '\n'.join(texts.values()), name

def numbers(text): return [int(o) for o in re.findall(r'^(\d+)\. ', text, re.M)]

def test_exercises_have_answers():
    "On the teachers' page, in the order of the labs; in the core, the first exercise is about a Learner of the student's own"
    page = nbformat.read(root/'nbs'/'labs'/'answers.ipynb', 4).cells
    answers = {o.source.partition('\n')[0].removeprefix('## '): numbers(o.source) for o in page[1:]}
    assert {*answers}=={o.stem for o in labs}
    for path in labs:
        [text] = [o.source for o in nbformat.read(path, 4).cells if '## Exercises' in o.source]
        exercises = text.split('## Exercises')[1].split('\n## ')[0]
        assert numbers(exercises)==answers[path.stem], path.stem
        if path.parent.name!='deeper': assert 'Learner` of your own' in exercises.split('\n2. ')[0], path.stem

# ---- the mechanism, broken

def double(x): return 2*x
q = Question(LabFunction(double, ((0,),)), hint='Twice.')

def test_an_error_is_a_sentence_with_its_line():
    def broken(x):
        y = {}
        return y[x]
    text = check_function(q, broken).text
    assert 'raised KeyError: ' in text and f'in line {broken.__code__.co_firstlineno+2} (`return y[x]`)' in text
    assert 'Traceback' not in text and 'checks.py' not in text
    with pytest.raises(KeyboardInterrupt):                           # a student who interrupts a loop
        check_function(q, lambda x: (_ for _ in ()).throw(KeyboardInterrupt))

def test_arguments_that_a_function_changes_are_its_own():
    total = Question(LabFunction(sum, (([1, 2, 3],), ([],))))
    def emptied(values): return sum(values.pop() for _ in range(len(values)))
    assert check_function(total, emptied).ok is True
    assert check_function(total, lambda values: values[0]).ok is False
