"What lab 10 claims about batches: its own functions, on planted numbers and on few steps"
from itertools import product
from math import inf, isnan

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import cross_entropy

from test_labs import definitions

from helpers import root

lab = root/'nbs'/'labs'/'10_batch_and_accuracy.ipynb'
CONSTANTS = 'RULES', 'random', 'size', 'hidden', 'warmup_epochs', 'small_bs', 'model'


@pytest.fixture(scope='module')
def d():
    known = definitions('10_batch_and_accuracy', *CONSTANTS, here='cpu', on_gpu=False)
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
    assert d['point']('scaled, warmed up', 256, 0)['start']==.05
    assert [d['point'](o, 64, 0)['warmup'] for o in d['RULES']]==[0, 0, round(5*1437/64)]

def test_looks_lie_a_tenth_apart_and_meet_the_rulers(d):
    looks = sorted(d['looks_at'](500, 449, 250, 900))
    assert {449, 250, 500} <= {*looks} and 900 not in looks and looks[:12]==[*range(1, 13)]
    assert all(b/a<1.14 for a,b in zip(looks, looks[1:]) if a>=20)          # rounded to whole steps

def test_batch_64_learns_the_digits(d):
    found = d['learn']('scaled', 64, .2, .2, 0, 300, 0, 'cpu')
    assert found['step'][-1]==300 and found['right'][-1]==found['accuracy']>.94 and found['right'][0]<.5

def test_a_training_ends_when_it_has_told_what_was_asked(d):
    def steps(**kw): return d['learn']('tried', 64, .4, .4, 0, 250, 0, 'cpu', **kw)
    whole, soon = steps(), steps(goal=.9)
    first = next(i for i,a in zip(whole['step'], whole['right']) if a>=.9)
    later = next(o for o in whole['step'] if o>first)
    assert 1<first<later<whole['step'][-1]==250 and soon['step'][-1]==first and steps(goal=.9, enough=later)['step'][-1]==later
    assert soon['right']==whole['right'][:len(soon['right'])]                # the same training, only shorter

def test_what_is_only_there_for_the_goal_trains_no_longer(d):
    steps = [d['tuning_point'](bs, .1, 0)['n_steps'] for bs in (8, 32)]
    assert [(o.get('enough'), o['goal']) for bs in (8, 32) for o in [d['tuning_point'](bs, .1, 0)]]==[(None, .93), (898, .93)]
    assert steps==[250, 898] and d['tuning_point'](8, .3, 7)['lr']==.3        # 8 is none of the sizes; 20 epochs of 32 are 898 steps

def test_learning_takes_one_thread_and_timing_takes_all(d, monkeypatch):
    train, before, seen = d['train'], torch.get_num_threads(), []
    def spy(*args, **kw):
        seen.append(torch.get_num_threads())
        return train(*args, **kw)
    monkeypatch.setitem(d, 'train', spy)
    monkeypatch.setitem(d, 'goal_lr', pd.Series({64: .2}))
    torch.set_num_threads(2)
    try:
        d['learn']('fixed', 64, .2, .2, 0, 3, 0, 'cpu')
        assert seen==[1] and torch.get_num_threads()==2
        assert d['train_to'](.1)[0]>0 and seen==[1, 1] and torch.get_num_threads()==2
        d['time_steps'](256, .05, 0, 'cpu', .01)
        assert {*seen[2:]}=={2}
        with pytest.raises(KeyError), d['one_thread'](): {}['a fault']
        assert torch.get_num_threads()==2
    finally: torch.set_num_threads(before)

def test_steps_are_timed(d):
    found = d['time_steps'](256, .05, 0, 'cpu', .05)
    assert found['step_ms']>0 and found['epoch_s']==pytest.approx(found['step_ms']/1e3*1437/256)


# ---- censored

def censored(bs=16, lr=.1, firsts=(4, 8, 99)): # two of three seeds arrive, after 4 and 8 steps
    return pd.DataFrame([dict(rate='a', bs=bs, lr=lr, seed=s, step=i, accuracy=.95 if i>=first else .5)
                         for s,first in enumerate(firsts) for i in (1, 2, 4, 8, 16)])

def test_a_seed_that_never_arrives_counts(d):
    steps = d['steps_to_goal'](censored()).goal_steps
    assert steps.tolist()==[4, 8, inf] and d['in_words'](steps)=='8'         # not 6, which leaves it out
    assert d['in_words'](steps[1:])=='not reached by half of the seeds'

def test_times_to_goal(d):
    assert d['times_to_goal'](d['steps_to_goal'](censored()), pd.Series({16: 2.}))['a', 16]==pytest.approx(.016)

def test_the_rate_for_the_goal(d):
    def best(**firsts): return d['soonest'](d['steps_to_goal'](pd.concat([censored(lr=float(k[1:])/10, firsts=v) for k,v in firsts.items()])))[16]
    assert best(_1=(8, 8, 8), _2=(1, 2, 16))==.1                             # the slower seed decides
    assert best(_1=(8, 8), _2=(4, 8), _4=(8, 8))==.2                         # the sum, where that ties
    assert best(_4=(4, 8), _2=(8, 4), _8=(4, 8))==.2                         # the smaller rate, where both tie
    assert best(_2=(99, 99), _1=(99, 99))==.1

def test_the_rate_for_equal_epochs(d):
    rows = [dict(bs=bs, lr=lr, accuracy=a) for bs,lr,a in [(64, .1, .9), (64, .1, .8), (64, .2, .86), (64, .2, .88), (256, .4, .7), (256, .2, .7)]]
    assert d['most_right'](pd.DataFrame(rows)).to_dict()=={64: .2, 256: .2}  # the mean of its seeds; the smaller rate, where that ties

def test_looks_come_in_order(d):
    rows = [dict(rate=r, bs=bs, lr=.1, seed=s, step=[2, 64], right=[.1, .5], status='ok', error=None)
            for r in d['RULES'][::-1] for bs in (256, 64) for s in (1, 0)]
    df = d['at_looks'](pd.DataFrame([*rows, rows[0] | dict(status='oom', error='no memory', step=None)]))
    assert df.rate.unique().tolist()==d['RULES'] and df.bs[:8].tolist()==[64]*4+[256]*4 and df.step[:4].tolist()==[2, 64]*2
    assert len(df)==24 and df.accuracy[:2].tolist()==[.1, .5] and df.epochs[1]==pytest.approx(64*64/1437)

def test_sizes_are_compared_with_the_first(d):
    rows = [dict(rate='fixed', bs=bs, seed=s, lr=.05, step=10, accuracy=a*(1+.002*s)) for bs,a in [(16, .96), (64, .96), (1024, .48)] for s in range(4)]
    df = d['against_first'](pd.DataFrame(rows[::-1]))                         # as a sweep gives them: in no order
    assert df.verdict.tolist()==['not distinguishable', 'lower'] and df.over_first.round(2).tolist()==[1., .5]
    assert df.index.tolist()==[('fixed', 64), ('fixed', 1024)]
    nothing = d['against_first'](pd.DataFrame([o | dict(accuracy=0. if o['bs']==64 else .9) for o in rows]))
    assert nothing.verdict.tolist()==['lower', 'not distinguishable']        # not a single one right: no logarithm of 0

def test_steps_and_seconds_to_the_goal_are_compared(d):
    runs = pd.DataFrame([dict(bs=bs, seed=s, goal_steps=n+s) for bs,n in [(16, 100), (64, 50)] for s in range(5)])
    visits = pd.DataFrame([dict(device='cpu', bs=bs, step_ms=ms+.01*i) for bs,ms in [(16, 1.), (64, 4.)] for i in range(3)])
    d |= dict(goal_runs=runs, both=visits, repeats=5)
    steps = d['against_base'](d['steps_at'], 'fewer', 'more')
    assert steps.verdict.tolist()==['fewer'] and steps.times.iloc[0]==pytest.approx(2, rel=.05) and steps.times_the_images.iloc[0]==4
    seconds = d['against_base'](lambda bs: d['seconds_at'](bs, 'cpu'), 'sooner', 'later')
    assert seconds.verdict.tolist()==['later'] and seconds.times.iloc[0]==pytest.approx(.5, rel=.05)
    d['goal_runs'] = runs.assign(goal_steps=runs.goal_steps.astype(float).replace(50, inf))
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

def planted(n=400): # gradients whose |G|² is 4 and whose tr(Σ) is 100, exactly: so B_noise is 25 images
    away = torch.nn.functional.one_hot(torch.arange(n//2)%20, 20)*10.           # every image has one that lies opposite
    return torch.full((n, 20), .2**.5)+torch.cat([away, -away])

def test_every_batch_there_is(d, monkeypatch): # McCandlish et al., A.1: both estimates are right in the mean over all batches
    g = torch.tensor([[1., 2.], [3., 0.], [-1., 1.]])
    for k,v in dict(small_bs=1, large_bs=3).items(): monkeypatch.setitem(d, k, v)
    small, large = (np.mean([g[list(o)].mean(0).square().sum().item() for o in product(range(3), repeat=n)]) for n in (1, 3))
    assert d['two_sizes'](small, large)==pytest.approx((2., 10/3))             # G is (1, 1); lengths² 1, 5 and 4 from it
    assert d['truth'](g)==pytest.approx((2., 10/3, 5/3))

def test_squared_lengths_of_batches(d):
    for bs in (4, 64): assert d['squared_lengths'](planted(), bs, 4000).mean()==pytest.approx(4+100/bs, rel=.03)   # images may come twice

def test_the_estimate_finds_a_known_answer(d):
    assert d['truth'](planted())==pytest.approx((4, 100, 25))
    found, interval = d['estimate'](planted())
    assert found==pytest.approx(25, rel=.1) and interval.lo<interval.mid<interval.hi and interval.mid==pytest.approx(25, rel=.15)

def test_the_estimate_divides_once(d, monkeypatch):
    g2, noise = np.array([1., 3.]*10), np.array([10., 90.]*10)               # in the mean 2 and 50; the mean of the ratios is 20
    monkeypatch.setitem(d, 'squared_lengths', lambda g, bs, draws: g2+noise/bs)
    found, interval = d['estimate'](None)
    assert (found, interval.mid)==pytest.approx((25, 25))

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


# ---- what a GPU left behind
