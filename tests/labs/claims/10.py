# %% No image is left out
from math import inf
from pytest import approx, raises
from replay import again, planted
x, y, held_x, held_y = as_tensors(get_dls(dataset, bs=1, size=size, loader='resident', device='cpu', seed=seed))   # the lab has tidied up
rows = next_rows(400, 1000, 0)
seen = torch.cat([next(rows) for _ in range(5)])                         # two epochs in five batches
assert torch.bincount(seen, minlength=1000).tolist()==[2]*1000
assert sorted(seen[:1000].tolist())==list(range(1000)) and len({*seen[800:1200].tolist()})<400   # the third one crosses the end

# %% A warm-up begins at the small rate
def moved(lr, **kw):
    net = new_net(0)
    before = torch.cat([o.detach().flatten() for o in net.parameters()]).clone()
    train(net, x, y, 64, lr, 1, 0, **kw)
    return (torch.cat([o.detach().flatten() for o in net.parameters()])-before).norm().item()
assert moved(.2)==approx(2*moved(.1), rel=1e-3)
assert moved(1.1, rate_of=lambda i: rate_at(i, 352, 32, .1, 10))==approx(2*moved(.1), rel=1e-3)    # .1 + a tenth of the way to 1.1

# %% Rules for the rate
assert [point(o, n, 0)['lr'] for o,n in (('fixed', 64), ('scaled', 64), ('scaled, warmed up', 256))]==approx([.05, .1, .4])
assert point('scaled, warmed up', 256, 0)['start']==.05 and point('tuned', 128, 0, .3)['lr']==.3
assert [point(o, 64, 0)['warmup'] for o in ('fixed', 'scaled', 'scaled, warmed up')]==[0, 0, round(5*1437/64)]
assert [point('fixed', n, 0)['until'] for n in (32, 1024)]==[898, 250]   # 20 epochs, or as many steps

# %% Looks lie a tenth apart and meet both rulers
found = learn(**{k: v for k,v in point('tuned', 64, 0, .2).items() if k not in about})
assert {449, 250} <= {*found['step']} and found['step'][-1]==449 and found['step'][:12]==[*range(1, 13)]
assert all(b/a<1.14 for a,b in zip(found['step'], found['step'][1:]) if a>=20)     # rounded to whole steps
assert found['right'][-1]>.94 and found['right'][0]<.5                   # it learns the digits

# %% The same training by hand and in a sweep, and twice the same seed
[first] = at_equal_epochs().query('rate=="fixed" and bs==@base and seed==@seeds[0]').accuracy
assert abs(100*first-naive.right_percent[base])<.6                       # two images of 360, for another order of sums
assert set(curves.rate)=={'fixed', 'scaled', 'scaled, warmed up', 'tuned', 'tuned for the goal'}
assert at_equal_epochs().groupby(['rate', 'bs']).seed.nunique().eq(repeats).all()

# %% What the text of the first figure says: at equal steps nothing is lost, at equal epochs much
after = {k: df[(df.rate=='fixed')].groupby('bs').accuracy.median() for k,df in dict(epochs=at_equal_epochs(), steps=equal_steps).items()}
assert after['epochs'][base]-after['epochs'][largest]>.1 and abs(after['steps'][base]-after['steps'][largest])<.02

# %% A rate is chosen on other seeds, for accuracy or for the goal; the smaller one, where two are equal
assert not {*tries.seed} & {*seeds} and own_lr[largest]>own_lr[base]/10
made = pd.DataFrame([dict(bs=b, lr=r, seed=s, accuracy=a, step=steps_of(b)) for b,r,s,a in
                     ((64, .1, 0, .9), (64, .1, 1, .8), (64, .2, 0, .86), (64, .2, 1, .88), (256, .4, 0, .7), (256, .2, 0, .7))])
early = pd.DataFrame([dict(bs=64, lr=r, seed=s, accuracy=.95, step=n) for r,s,n in ((.1, 0, 30), (.1, 1, 50), (.2, 0, 10), (.2, 1, 60))])
with planted(learned=lambda points: pd.concat([made, early])):
    again('tries = learned')
    assert own_lr.to_dict()=={64: .2, 256: .2} and goal_lr[64]==.1       # the slower seed decides

# %% Sizes are compared with the smallest
rows = [dict(rate='fixed', bs=n, seed=s, lr=.05, step=10, accuracy=a*(1+.002*s))
        for n,a in ((32, .96), (64, .96), (1024, .48)) for s in range(4)]
found = over_smallest(pd.DataFrame(rows[::-1]))                          # in any order
assert found.verdict.tolist()==['not distinguishable', 'lower'] and found.over_smallest.round(2).tolist()==[1., .5]
nothing = over_smallest(pd.DataFrame([o | dict(accuracy=0. if o['bs']==64 else .9) for o in rows]))
assert nothing.verdict.tolist()==['lower', 'not distinguishable']        # not a single one right: no logarithm of 0

# %% A seed that never arrives counts
looks = [dict(rate='a', bs=16, seed=s, step=i, accuracy=.95 if i>=first else .5) for s,first in enumerate((4, 8, 99)) for i in (1, 2, 4, 8, 16)]
with planted(curves=pd.DataFrame(looks)):
    shown = again('each = [')
    assert shown.arrived.tolist()==[2] and shown['median'].tolist()==['8 steps']    # not 6, which leaves it out
    assert arrived.goal_steps.tolist()==[4, 8, inf] and in_words(arrived.goal_steps[1:])=='not reached by half the seeds'

# %% Fewer steps times shorter steps, and no visit is used twice
made = dict(arrived=pd.DataFrame([dict(rate='tuned for the goal', bs=n, seed=s, goal_steps=k+s) for n,k in ((32, 100), (64, 50)) for s in range(5)]),
            both=pd.DataFrame([dict(device='cpu', bs=n, step_ms=ms+.01*i) for n,ms in ((32, 1.), (64, 4.)) for i in range(3)]))
with planted(**made):
    fewer, all_in_all = sooner(64, 'cpu')
    assert fewer.mid==approx(2, rel=.05) and all_in_all.mid==approx(.5, rel=.05)
    assert all_in_all.lo<fewer.lo*.25<all_in_all.mid<fewer.hi*.25<all_in_all.hi

# %% Steps are timed
found = time_steps(dataset, size, hidden, 256, .05, 0, 'cpu', .05)
assert found['step_ms']>0 and found['epoch_s']==approx(found['step_ms']/1e3*1437/256)

# %% Sizes that show nothing are refused
with planted(batch_sizes=[64, 64]), raises(ValueError, match=r'batch_sizes is \[64, 64\], and there is nothing to compare'):
    again('if len(set(batch_sizes))')
