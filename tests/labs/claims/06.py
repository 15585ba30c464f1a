# %% Both loops do the same training; torch's own numbers train something else
from pytest import approx
fitted, _ = fit_losses(64, 1)
dls, net = make(64)
plain = plain_losses(same_adam(net), net, dls, 1)
assert len(fitted)==len(plain)==22 and apart(fitted, plain)<1e-4
dls, net = make(64)
usual = plain_losses(torch.optim.Adam(net.parameters(), lr=lr), net, dls, 1)
assert usual[0]==approx(fitted[0], rel=1e-5) and apart(fitted, usual)>1e-2

# %% Every rung of the ladder does the same training
found = [time_loop(o, 64, 'cpu', 'digits', None, 'lenet', 0, n_epoch=2) for o in LOOPS]
assert len(found)==5 and all(o['epoch_s']>0 and o['n_images']==22*64 for o in found)
assert all(o['loss']==approx(found[0]['loss'], rel=5e-3) for o in found)

# %% Large batches are timed over several steps: one step an epoch would be mostly the start of the epoch
found = time_loop('plain loop', 1000, 'cpu', 'synthetic', 6250, 'lenet', 0, n_epoch=2)
assert (found['n_steps'], found['n_images'])==(5, 5000)

# %% A schedule is the same in both loops
dls, net = make(64)
constant = plain_losses(same_adam(net), net, dls, 1)
assert len(cycle)==22 and apart(cycle, by_plain)<1e-4 and apart(cycle, constant)>1e-2

# %% Pieces give the gradients of the whole batch
dls, net = make(1000)
x, y = next(batches(dls.train))
whole = gradients(net, x, y, 1000)
def off(*args, **kw): return away(gradients(net, x, y, *args, **kw), whole)
assert off(50)<1e-5 and off(64)<1e-5
assert off(50, weigh=1.)==approx(19, rel=1e-3)                   # added up, 20 times too long
assert off(64, weigh=1/16)>1e-3                                  # 15 pieces of 64 and one of 40: the mean of means is another

# %% fastai accumulates the same gradients
def kept(n_acc):
    dls, net = make(50)
    learn = Learner(dls, net, cbs=[GradientAccumulation(n_acc), KeepGradientsCallback()])
    with learn.no_bar(), learn.no_logging(): learn.fit(1, lr)
    return learn.keep_gradients.kept
assert len(kept(1000))==1 and away(kept(1000)[0], whole)<1e-5    # 28 batches an epoch, so one step
assert away(kept(20)[0], whole)>.1                               # it counts images, not batches

# %% Batch 64 learns the digits, and batch 1000 makes a step an epoch
def seeds_of(how): return learned[learned.how==how]
assert len(seeds_of('batch 64'))==len(seeds_of('batch 1000'))==2
assert set(seeds_of('batch 64').n_steps)=={440} and seeds_of('batch 64').accuracy.min()>=.95
assert set(seeds_of('batch 1000').n_steps)=={20} and seeds_of('batch 1000').accuracy.max()<seeds_of('batch 64').accuracy.min()
assert set(seeds_of('3 epochs, dropout').n_steps)==set(seeds_of('3 epochs, one cycle').n_steps)=={66}

# %% Dropout goes before the last layer and is off in evaluation
for name in ('lenet', 'resnet18'):
    net = get_model(name, n_in=1)
    add_dropout(net, .5)
    [p] = [o for o in net.modules() if isinstance(o, nn.Dropout)]
    assert p.p==.5 and [type(o) for o in net.modules() if not list(o.children())][-2:]==[nn.Dropout, nn.Linear], name
dls, net = make(64)
add_dropout(net, .9)
assert share_right(net, dls.valid)==share_right(net, dls.valid)
assert len({share_right(net, dls.valid, eval=False) for _ in range(3)})>1 and net.training

# %% A ladder compares with `fit` of the same batch size
visits = pd.DataFrame([dict(bs=bs, loop=loop, status='ok', loss=1., step_ms=ms*(1+.01*i)) for bs,loop,ms in
    [(64, '+ images on the device', 1.), (64, 'fit', 4.), (1000, 'fit', 9.), (1000, "+ torch's AdamW", 9.)] for i in range(3)])
found = ladder(visits)
assert found.loop.tolist()==['fit', '+ images on the device', 'fit', "+ torch's AdamW"]
assert found.times_as_fast.round(3).tolist()==[1., 4., 1., 1.]
assert found.verdict.tolist()==['', 'faster than fit', '', 'not distinguishable']
nothing = ladder(visits.assign(status='error'))
assert len(nothing)==0 and list(nothing)==list(found)

# %% Marks tell lines apart
watch = LineWatch()
watch.begin()
watch.mark('a')
watch.mark('b')
found = watch.to_df()
assert found.line.tolist()==['a', 'b'] and found.step.tolist()==[0, 0] and (found[['host_ms', 'device_ms']]>=0).all(axis=None)
