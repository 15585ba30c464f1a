# %% Gradients of single images
from itertools import product
from math import inf, isnan
from pytest import approx
from replay import planted
net, made = train_to(.5, 32, .2, 0)
assert 0<made<50 and isnan(train_to(1.1, 32, .2, 0)[1]) and train_to(0, 32, .2, 0)[1]==0
g = image_gradients(net)
whole = torch.cat([o.flatten() for o in torch.autograd.grad(cross_entropy(net(x), y), list(net.parameters()))])
assert torch.allclose(g.mean(0), whole, atol=1e-6) and off<1e-4
g2, s, ratio = truth(g)
assert g2==approx(whole.square().sum().item(), rel=1e-4) and ratio==approx(s/g2)
assert s==approx((g-g.mean(0)).square().sum(1).mean().item(), rel=1e-4)  # the trace of the covariance

# %% A batch's gradient is |G|² + tr(Σ)/B long, in the mean
for n in (4, 64): assert np.mean([squared_length(net, n) for _ in range(400)])==approx(g2+s/n, rel=.15), n

# %% Every batch there is (McCandlish et al., A.1): both estimates are right in the mean over all batches
assert two_sizes(2.+30/small_bs, 2.+30/large_bs)==approx((2., 30.))
g = torch.tensor([[1., 2.], [3., 0.], [-1., 1.]])
def mean_length(n): return np.mean([g[list(o)].mean(0).square().sum().item() for o in product(range(3), repeat=n)])
with planted(small_bs=1, large_bs=3):
    assert two_sizes(mean_length(1), mean_length(3))==approx((2., 10/3))  # G is (1, 1); lengths² 1, 5 and 4 from it
assert truth(g)==approx((2., 10/3, 5/3))

# %% One pair says nothing: the eight lie far apart
ratios = [s/g2 for g2,s in pairs]
assert max(ratios)>2*sorted(ratios)[3] or min(ratios)<=0

# %% The estimate finds a known answer: |G|² is 4 and tr(Σ) is 100, exactly, so B_noise is 25 images
apart = torch.nn.functional.one_hot(torch.arange(200)%20, 20)*10.        # every image has one that lies opposite
g = torch.full((400, 20), .2**.5)+torch.cat([apart, -apart])
with planted(draws=4000):
    for n in (4, 64): assert squared_lengths(g, n).mean()==approx(4+100/n, rel=.03), n     # images may come twice
    assert truth(g)==approx((4, 100, 25))
    found, interval = estimate(g)
    assert found==approx(25, rel=.1) and interval.lo<interval.mid<interval.hi and interval.mid==approx(25, rel=.15)

# %% The estimate divides once
g2, noise = np.array([1., 3.]*10), np.array([10., 90.]*10)               # in the mean 2 and 50; the mean of the ratios is 20
with planted(squared_lengths=lambda g, bs: g2+noise/bs):
    found, interval = estimate(None)
    assert (found, interval.mid)==approx((25, 25))
with planted(each_g2=g2, each_s=noise, draws=20, true=(0, 0, 10.)):
    assert {o['way']: o['mean'] for o in spread(10)}==approx({'mean of ratios': 2, 'ratio of means': 2.5})

# %% Not reached is infinite, and such a rate isn't chosen
assert slower.notna().all(axis=None) and np.isinf(slower.to_numpy()).any() and (runs.goal_steps>0).all()
assert all(slower.loc[o.bs, o.lr]==slower.loc[o.bs].min() for o in runs.itertuples()) and not {*tries.seed} & {*runs.seed}

# %% A scale is fitted to steps
steps = pd.Series({b: 20*(1+35/b) for b in (4, 16, 64, 256, 1024)})
assert fit_scale(steps)==approx((20, 35))
steps[4] = inf
assert fit_scale(steps)==approx((20, 35))                                # without the size that did not arrive
assert all(isnan(o) for o in fit_scale(steps[:3].replace(steps[16], inf)))

# %% No curve is cut
assert all(o.get_ydata().max()<=ax.get_ylim()[1] for o in ax.lines if o.get_label() in predicted)
