# %% No image is left out
from itertools import product
from math import isnan
from unittest.mock import patch
from pytest import approx, raises
from replay import again, planted
x, y, held_x, held_y = images = load('cpu')            # the lab has tidied up
base, largest, sizes, about = 16, 1024, [16, 64], {}
rows = next_rows(400, 1000, 0, 'cpu')
seen = torch.cat([next(rows) for _ in range(5)])                         # two epochs in five batches
assert torch.bincount(seen, minlength=1000).tolist()==[2]*1000
assert sorted(seen[:1000].tolist())==list(range(1000)) and len({*seen[800:1200].tolist()})<400   # the third one crosses the end

# %% A warm-up begins at the small rate
def moved(lr, **kw):
    net = new_net(0, x, 10)
    before = torch.cat([o.detach().flatten() for o in net.parameters()]).clone()
    assert train(net, images, 64, lr, 1, 0, **kw)==1
    return (torch.cat([o.detach().flatten() for o in net.parameters()])-before).norm().item()
assert moved(.2)==approx(2*moved(.1), rel=1e-3)
assert moved(1.1, start=.1, warmup=10)==approx(2*moved(.1), rel=1e-3)    # .1 + a tenth of the way to 1.1

# %% Scaled rates
assert [point(o, n, 0)['lr'] for o,n in (('fixed', 64), ('scaled', 64), ('scaled, warmed up', 256))]==approx([.05, .2, .8])
assert point('scaled, warmed up', 256, 0)['start']==.05
assert [point(o, 64, 0)['warmup'] for o in RULES]==[0, 0, round(5*1437/64)]

# %% Looks lie a tenth apart and meet the rulers
looks = sorted(looks_at(500, 449, 250, 900))
assert {449, 250, 500} <= {*looks} and 900 not in looks and looks[:12]==[*range(1, 13)]
assert all(b/a<1.14 for a,b in zip(looks, looks[1:]) if a>=20)           # rounded to whole steps

# %% Batch 64 learns the digits
found = learn('scaled', 64, .2, .2, 0, 300, 0, 'cpu')
assert found['step'][-1]==300 and found['right'][-1]==found['accuracy']>.94 and found['right'][0]<.5

# %% A training ends when it has told what was asked
def steps(**kw): return learn('tried', 64, .4, .4, 0, 250, 0, 'cpu', **kw)
whole, soon = steps(), steps(goal=.9)
first = next(i for i,a in zip(whole['step'], whole['right']) if a>=.9)
later = next(o for o in whole['step'] if o>first)
assert 1<first<later<whole['step'][-1]==250 and soon['step'][-1]==first and steps(goal=.9, enough=later)['step'][-1]==later
assert soon['right']==whole['right'][:len(soon['right'])]                # the same training, only shorter

# %% What is only there for the goal trains no longer
found = [tuning_point(n, .1, 0) for n in (8, 32)]                        # 8 is none of the sizes; 20 epochs of 32 are 898 steps
assert [(o.get('enough'), o['goal'], o['n_steps']) for o in found]==[(None, .93, 250), (898, .93, 898)]
assert tuning_point(8, .3, 7)['lr']==.3

# %% Learning takes one thread and timing takes all
threads, train_net, n_threads = [], train, torch.get_num_threads()
def spy(*args, **kw):
    threads.append(torch.get_num_threads())
    return train_net(*args, **kw)
torch.set_num_threads(2)
with planted(train=spy, goal_lr=pd.Series({64: .2})):
    learn('fixed', 64, .2, .2, 0, 3, 0, 'cpu')
    assert threads==[1] and torch.get_num_threads()==2
    assert train_to(.1)[0]>0 and threads==[1, 1] and torch.get_num_threads()==2
    time_steps(256, .05, 0, 'cpu', .01)
    assert {*threads[2:]}=={2} and torch.get_num_threads()==2
torch.set_num_threads(n_threads)

# %% Steps are timed
found = time_steps(256, .05, 0, 'cpu', .05)
assert found['step_ms']>0 and found['epoch_s']==approx(found['step_ms']/1e3*1437/256)

# %% A seed that never arrives counts
def censored(bs=16, lr=.1, firsts=(4, 8, 99)): # two of three seeds arrive, after 4 and 8 steps
    return pd.DataFrame([dict(rate='a', bs=bs, lr=lr, seed=s, step=i, accuracy=.95 if i>=first else .5)
                         for s,first in enumerate(firsts) for i in (1, 2, 4, 8, 16)])
steps = steps_to_goal(censored()).goal_steps
assert steps.tolist()==[4, 8, inf] and in_words(steps)=='8'              # not 6, which leaves it out
assert in_words(steps[1:])=='not reached by half of the seeds'
assert times_to_goal(steps_to_goal(censored()), pd.Series({16: 2.}))['a', 16]==approx(.016)

# %% The rate for the goal
def best(**firsts):
    return soonest(steps_to_goal(pd.concat([censored(lr=float(k[1:])/10, firsts=v) for k,v in firsts.items()])))[16]
assert best(_1=(8, 8, 8), _2=(1, 2, 16))==.1                             # the slower seed decides
assert best(_1=(8, 8), _2=(4, 8), _4=(8, 8))==.2                         # the sum, where that ties
assert best(_4=(4, 8), _2=(8, 4), _8=(4, 8))==.2                         # the smaller rate, where both tie
assert best(_2=(99, 99), _1=(99, 99))==.1

# %% The rate for equal epochs: the mean of its seeds; the smaller rate, where that ties
rows = [(64, .1, .9), (64, .1, .8), (64, .2, .86), (64, .2, .88), (256, .4, .7), (256, .2, .7)]
assert most_right(pd.DataFrame(rows, columns=['bs', 'lr', 'accuracy'])).to_dict()=={64: .2, 256: .2}

# %% Looks come in order
import io
from contextlib import redirect_stdout
rows = [dict(rate=r, bs=n, lr=.1, seed=s, step=[2, 64], right=[.1, .5], status='ok', error=None)
        for r in RULES[::-1] for n in (256, 64) for s in (1, 0)]
df = at_looks(pd.DataFrame([*rows, rows[0] | dict(status='oom', error='no memory', step=None)]))
assert df.rate.unique().tolist()==RULES and df.bs[:8].tolist()==[64]*4+[256]*4 and df.step[:4].tolist()==[2, 64]*2
assert len(df)==24 and df.accuracy[:2].tolist()==[.1, .5] and df.epochs[1]==approx(64*64/1437)

# %% Sizes are compared with the first
rows = [dict(rate='fixed', bs=n, seed=s, lr=.05, step=10, accuracy=a*(1+.002*s))
        for n,a in ((16, .96), (64, .96), (1024, .48)) for s in range(4)]
df = against_first(pd.DataFrame(rows[::-1]))                             # as a sweep gives them: in no order
assert df.verdict.tolist()==['not distinguishable', 'lower'] and df.over_first.round(2).tolist()==[1., .5]
assert df.index.tolist()==[('fixed', 64), ('fixed', 1024)]
nothing = against_first(pd.DataFrame([o | dict(accuracy=0. if o['bs']==64 else .9) for o in rows]))
assert nothing.verdict.tolist()==['lower', 'not distinguishable']        # not a single one right: no logarithm of 0

# %% Steps and seconds to the goal are compared
goal_runs = pd.DataFrame([dict(bs=n, seed=s, goal_steps=k+s) for n,k in ((16, 100), (64, 50)) for s in range(5)])
both = pd.DataFrame([dict(device='cpu', bs=n, step_ms=ms+.01*i) for n,ms in ((16, 1.), (64, 4.)) for i in range(3)])
found = against_base(steps_at, 'fewer', 'more')
assert found.verdict.tolist()==['fewer'] and found.times.iloc[0]==approx(2, rel=.05) and found.times_the_images.iloc[0]==4
found = against_base(lambda bs: seconds_at(bs, 'cpu'), 'sooner', 'later')
assert found.verdict.tolist()==['later'] and found.times.iloc[0]==approx(.5, rel=.05)
goal_runs = goal_runs.assign(goal_steps=goal_runs.goal_steps.astype(float).replace(50, inf))
assert against_base(steps_at, 'fewer', 'more').verdict.tolist()==['some seeds did not arrive: no interval']

# %% Gradients of single images
net = new_net(0, x, 10)
g = image_gradients(net, x[:20], y[:20])
cross_entropy(net(x[:20]), y[:20]).backward()
whole = torch.cat([o.grad.flatten() for o in net.parameters()])
assert torch.allclose(g.mean(0), whole, atol=1e-6)
g2, s, ratio = truth(g)
assert g2==approx(whole.square().sum().item(), rel=1e-4) and ratio==approx(s/g2)
assert s==approx((g-g.mean(0)).square().sum(1).mean().item(), rel=1e-4)  # the trace of the covariance

# %% Every batch there is (McCandlish et al., A.1): both estimates are right in the mean over all batches
assert two_sizes(2.+30/small_bs, 2.+30/large_bs)==approx((2., 30.))
g = torch.tensor([[1., 2.], [3., 0.], [-1., 1.]])
def mean_length(n): return np.mean([g[list(o)].mean(0).square().sum().item() for o in product(range(3), repeat=n)])
with planted(small_bs=1, large_bs=3):
    assert two_sizes(mean_length(1), mean_length(3))==approx((2., 10/3))  # G is (1, 1); lengths² 1, 5 and 4 from it
assert truth(g)==approx((2., 10/3, 5/3))

# %% The estimate finds a known answer: |G|² is 4 and tr(Σ) is 100, exactly, so B_noise is 25 images
apart = torch.nn.functional.one_hot(torch.arange(200)%20, 20)*10.        # every image has one that lies opposite
g = torch.full((400, 20), .2**.5)+torch.cat([apart, -apart])
for n in (4, 64): assert squared_lengths(g, n, 4000).mean()==approx(4+100/n, rel=.03), n     # images may come twice
assert truth(g)==approx((4, 100, 25))
found, interval = estimate(g)
assert found==approx(25, rel=.1) and interval.lo<interval.mid<interval.hi and interval.mid==approx(25, rel=.15)

# %% The estimate divides once
g2, noise = np.array([1., 3.]*10), np.array([10., 90.]*10)               # in the mean 2 and 50; the mean of the ratios is 20
with planted(squared_lengths=lambda g, bs, draws: g2+noise/bs):
    found, interval = estimate(None)
    assert (found, interval.mid)==approx((25, 25))

# %% A scale is fitted to steps
steps = pd.Series({b: 20*(1+35/b) for b in (4, 16, 64, 256, 1024)})
assert fit_scale(steps)==approx((20, 35))
steps[4] = inf
assert fit_scale(steps)==approx((20, 35))                                # without the size that did not arrive
assert all(isnan(o) for o in fit_scale(steps[:3].replace(np.nan, inf)))

# %% Sizes that tell nothing are refused
with planted(batch_sizes=[64, 64]), raises(ValueError, match=r'batch_sizes is \[64, 64\], and there is nothing to compare'):
    again('if len(set(batch_sizes))')
with planted(small_bs=256), raises(ValueError, match='small_bs is 256, and has to be smaller than large_bs=256'):
    again('if len(set(batch_sizes))')
