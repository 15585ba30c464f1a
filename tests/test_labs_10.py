"What lab 10 claims about batches: its own functions, on planted numbers and on few steps"
import ast
from math import inf, isnan
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import cross_entropy

root = Path(__file__).resolve().parent.parent
lab = root/'nbs'/'labs'/'10_batch_and_accuracy.ipynb'
CONSTANTS = 'RULES', 'random', 'size', 'hidden', 'warmup_epochs', 'small_bs', 'model'
keep = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef


def definitions():
    "Imports, parameters and functions of the lab, on the CPU, without anything that trains or measures"
    known = dict(here='cpu', on_gpu=False)
    for cell in nbformat.read(lab, 4).cells:
        if cell.cell_type!='code': continue
        tree, parameters = ast.parse(cell.source), 'parameters' in cell.metadata.get('tags', [])
        tree.body = [o for o in tree.body if parameters or isinstance(o, keep) or getattr(o, 'targets', []) and ast.unparse(o.targets[0]).split(',')[0].strip('(') in CONSTANTS]
        exec(compile(tree, lab.stem, 'exec'), known)
    return known

@pytest.fixture(scope='module')
def d():
    known = definitions()
    known['images'] = known['load']('cpu')
    known['x'], known['y'] = known['images'][:2]
    known |= dict(about={}, n_train=len(known['y']), n_held=len(known['images'][3]), n_classes=10, base=16, largest=1024, sizes=[16, 64])
    return known


# ---- the training

def test_no_image_is_left_out(d):
    rows = d['next_rows'](400, 1000, 0, 'cpu')
    seen = torch.cat([next(rows) for _ in range(5)])                         # two epochs in five batches
    assert torch.bincount(seen, minlength=1000).tolist()==[2]*1000
    assert sorted(seen[:1000].tolist())==list(range(1000)) and len({*seen[800:1200].tolist()})<400   # the third one crosses the end

def test_a_warm_up_begins_at_the_small_rate(d):
    def moved(lr, **kw):
        net = d['new_net'](0, d['x'], 10)
        before = torch.cat([o.detach().flatten() for o in net.parameters()]).clone()
        assert d['train'](net, d['images'], 64, lr, 1, 0, **kw)==1
        return torch.cat([o.detach().flatten() for o in net.parameters()])-before
    def ratio(a, b): return (a.norm()/b.norm()).item()
    assert ratio(moved(.2), moved(.1))==pytest.approx(2, rel=1e-3)
    assert ratio(moved(1.1, start=.1, warmup=10), moved(.1))==pytest.approx(2, rel=1e-3)     # .1 + a tenth of the way to 1.1

def test_scaled_rates(d):
    def lr(rate, bs): return d['point'](rate, bs, 0)['lr']
    assert [lr('fixed', 64), lr('scaled', 64), lr('scaled, warmed up', 256)]==pytest.approx([.05, .2, .8])
    assert [d['point'](o, 64, 0)['warmup'] for o in d['RULES']]==[0, 0, round(5*1437/64)]

def test_looks_lie_a_tenth_apart_and_meet_the_rulers(d):
    looks = sorted(d['looks_at'](500, 449, 250, 900))
    assert {449, 250, 500} <= {*looks} and 900 not in looks and looks[:12]==[*range(1, 13)]
    assert all(b/a<1.14 for a,b in zip(looks, looks[1:]) if a>=20)          # rounded to whole steps

def test_batch_64_learns_the_digits(d):
    found = d['learn']('scaled', 64, .2, .2, 0, 300, 0, 'cpu')
    assert found['step'][-1]==300 and found['right'][-1]==found['accuracy']>.94 and found['right'][0]<.5

def test_a_race_ends_at_the_goal_and_says_where_it_did_not_get_there(d):
    there, not_there = (d['race']('tried', 64, lr, 250, .93, 0, 'cpu') for lr in (.4, 1e-4))
    assert 5<there['goal_steps']<100 and there['accuracy']>=.93
    assert not_there['goal_steps'] is None and not_there['accuracy']<.93

def test_steps_are_timed(d):
    found = d['time_steps'](256, .05, 0, 'cpu', .05)
    assert found['step_ms']>0 and found['epoch_s']==pytest.approx(found['step_ms']/1e3*1437/256)


# ---- censored

def censored(): # two of three seeds arrive, after 4 and 8 steps
    rows = [dict(rate='a', bs=16, seed=s, step=i, accuracy=.95 if i>=first else .5) for s,first in enumerate((4, 8, 99)) for i in (1, 2, 4, 8, 16)]
    return pd.DataFrame(rows)

def test_a_seed_that_never_arrives_counts(d):
    steps = d['steps_to_goal'](censored())
    assert steps.tolist()==[4, 8, inf] and d['in_words'](steps)=='8'         # not 6, which leaves it out
    assert d['in_words'](steps[1:])=='not reached by half of the seeds'

def test_times_to_goal(d):
    arrived = d['steps_to_goal'](censored()).rename('goal_steps').reset_index()
    assert d['times_to_goal'](arrived, pd.Series({16: 2.}))['a', 16]==pytest.approx(.016)

def test_sizes_are_compared_with_the_first(d):
    rows = [dict(rate='fixed', bs=bs, seed=s, lr=.05, step=10, accuracy=a*(1+.002*s)) for bs,a in [(16, .96), (64, .96), (1024, .48)] for s in range(4)]
    df = d['against_first'](pd.DataFrame(rows))
    assert df.verdict.tolist()==['not distinguishable', 'lower'] and df.over_first.round(2).tolist()==[1., .5]
    nothing = d['against_first'](pd.DataFrame([o | dict(accuracy=0. if o['bs']==64 else .9) for o in rows]))
    assert nothing.verdict.tolist()==['lower', 'not distinguishable']        # not a single one right: no logarithm of 0

def test_steps_and_seconds_to_the_goal_are_compared(d):
    tuned = pd.DataFrame([dict(bs=bs, seed=s, goal_steps=n+s) for bs,n in [(16, 100), (64, 50)] for s in range(5)])
    visits = pd.DataFrame([dict(device='cpu', bs=bs, step_ms=ms+.01*i) for bs,ms in [(16, 1.), (64, 4.)] for i in range(3)])
    d |= dict(tuned=tuned, both=visits, repeats=5)
    steps = d['against_base'](d['steps_at'], 'fewer', 'more')
    assert steps.verdict.tolist()==['fewer'] and steps.times.iloc[0]==pytest.approx(2, rel=.05) and steps.times_the_images.iloc[0]==4
    seconds = d['against_base'](lambda bs: d['seconds_at'](bs, 'cpu'), 'sooner', 'later')
    assert seconds.verdict.tolist()==['later'] and seconds.times.iloc[0]==pytest.approx(.5, rel=.05)
    d['tuned'] = tuned.assign(goal_steps=tuned.goal_steps.astype(float).replace(50, inf))
    assert d['against_base'](d['steps_at'], 'fewer', 'more').verdict.tolist()==['some seeds did not arrive: no interval']


# ---- noise

def test_gradients_of_single_images(d):
    net = d['new_net'](0, d['x'], 10)
    g = d['image_gradients'](net, d['x'][:20], d['y'][:20])
    cross_entropy(net(d['x'][:20]), d['y'][:20]).backward()
    whole = torch.cat([o.grad.flatten() for o in net.parameters()])
    assert torch.allclose(g.mean(0), whole, atol=1e-6)
    g2, s, ratio = d['truth'](g)
    assert g2==pytest.approx(whole.square().sum().item(), rel=1e-4) and ratio==pytest.approx(s/g2)
    assert s==pytest.approx((g-g.mean(0)).square().sum(1).mean().item(), rel=1e-4)       # the trace of the covariance

def test_two_sizes_undo_what_the_noise_does(d):
    g2, s = d['two_sizes'](*(2.+30/b for b in (d['small_bs'], d['large_bs'])))
    assert (g2, s)==pytest.approx((2., 30.))

def test_squared_lengths_of_batches(d):
    g = torch.randn(500, 40, generator=torch.Generator().manual_seed(1))+.3
    g2, s, _ = d['truth'](g)
    for bs in (4, 64): assert d['squared_lengths'](g, bs, 4000).mean()==pytest.approx(g2+s/bs, rel=.03)   # images may come twice

def test_the_estimate_finds_the_truth(d):
    g = torch.randn(500, 40, generator=torch.Generator().manual_seed(1))+.3
    found, interval = d['estimate'](g)
    assert found==pytest.approx(d['truth'](g)[2], rel=.25) and interval.lo<interval.mid<interval.hi

def test_a_scale_is_fitted_to_steps(d):
    steps = pd.Series({b: 20*(1+35/b) for b in (4, 16, 64, 256, 1024)})
    assert d['fit_scale'](steps)==pytest.approx((20, 35))
    steps[4] = inf
    assert d['fit_scale'](steps)==pytest.approx((20, 35))                    # without the size that did not arrive
    assert all(isnan(o) for o in d['fit_scale'](steps[:3].replace(np.nan, inf)))


# ---- what cannot be asked

def first_checks(**values):
    source = next(o.source for o in nbformat.read(lab, 4).cells if o.source.startswith('if len(set(batch_sizes))'))
    exec(source, dict(batch_sizes=[16, 64], small_bs=16, large_bs=256) | values)

def test_sizes_that_say_nothing():
    with pytest.raises(ValueError, match=r'batch_sizes is \[64, 64\], and there is nothing to compare'): first_checks(batch_sizes=[64, 64])
    with pytest.raises(ValueError, match='small_bs is 256, and has to be smaller than large_bs=256'): first_checks(small_bs=256)
