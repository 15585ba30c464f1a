# %% Two phases are what fine_tune does: the same weights after it
from pytest import approx
from replay import again, planted
def trained(train):
    learn = new_learner(base, seed)
    with learn.no_bar(), learn.no_logging(): train(learn)
    return learn
by_hand = trained(lambda o: two_phases(o, n_epoch, lr, lr_mult))
stock = trained(lambda o: o.fine_tune(n_epoch, lr, lr_mult=lr_mult))
for k,o in kinds(stock.model).items(): assert torch.allclose(o, kinds(by_hand.model)[k], rtol=1e-3, atol=1e-4), k
assert [o['phase'] for o in stock.epoch_clock.rows]==['frozen', *['unfrozen']*n_epoch]
assert [o['phase'] for o in trained(lambda o: o.fit(2)).epoch_clock.rows]==['unfrozen']*2

# %% What a frozen epoch changes
same, moved = 'the same', 'changed'
assert {k: [*o.values()] for k,o in changed.items()}=={
    'default': [same, moved, moved, moved], 'train_bn=False': [same, same, moved, moved], 'and BnFreeze': [same, same, same, moved]}

# %% What it counts: with the norms learning, the gradient goes through the whole body
assert mflop['train_bn=False']==mflop['and BnFreeze']<.4*mflop['unfrozen']<.6*mflop['unfrozen']<mflop['default']<mflop['unfrozen']

# %% A visit's warm-up changes nothing that it reports
found = transfer('fine_tune', base, seed, n_epoch, lr, lr_mult, start_from)
last = by_hand.recorder.values[-1][-1]
assert found['accuracy']==approx(last, abs=1.01/found['n_valid']) and found['frozen_steps']==found['unfrozen_steps']==n_train//base

# %% A cut network returns what its last layer got, and starts from the body's weights
for name in ('cnn_small', 'resnet18', 'lenet'):
    net, n = cut(get_model(name, n_in=3))
    assert net(torch.zeros(2, 3, 48, 48)).shape==(2, n), name
kept = torch.load(body_file)
assert all(torch.equal(o.cpu(), kept[k]) for k,o in new_learner(base, seed).model[0].state_dict().items())
assert not torch.equal(next(new_learner(base, seed, 'scratch').model.parameters()).cpu(), next(iter(kept.values())))

# %% Scenes differ, and the stand-in learned to tell them apart
scenes = [draw_scene(np.random.default_rng(i), thing) for i in range(3) for thing in (0, 1)]
assert len({o.tobytes() for o in scenes})==6 and {o.shape for o in scenes}=={(size, size, 3)}
assert start_from=='made' and right>.7

# %% Weights that can't be had: the lab says so and goes on with a stand-in
def offline(name, pretrained): raise RuntimeError('The pretrained weights could not be loaded.')
with planted(weights='imagenet', train_body=lambda: (net, .9), body_file=lab.folder/'other.pt', get_model=offline):
    again('body, start_from = None')
    assert get_ipython().user_ns['start_from']=='made'

# %% Every way, batch size and seed once; full batches only
assert len(ok)==len(points)==repeats*(len(batch_sizes)+3) and not ok.duplicated(['way', 'bs', 'seed']).any()
assert (tuned.unfrozen_steps==n_train//tuned.bs).all() and (tuned.frozen_steps==tuned.unfrozen_steps).all()
assert (learned.body_steps==[n_epoch*(n_train//o) for o in batch_sizes]).all()
assert ok.frozen_accuracy.isna().sum()==repeats and ok.accuracy.between(0, 1).all()
assert len(phases)==2*len(ok)-repeats                                    # from scratch has one phase

# %% A share is taken within a visit
def visit(seed, frozen_s): return dict(way='fine_tune', bs=10, seed=seed, device='cpu', frozen_epoch_s=frozen_s*seed, unfrozen_epoch_s=seed,
                                       frozen_steps=2, unfrozen_steps=2)
planted_phases = per_phase(pd.DataFrame([visit(1, .5), visit(2, .5), visit(4, .51)]))
assert planted_phases.query('phase=="unfrozen"').ms_per_image.tolist()==[50, 100, 200]
assert frozen_share(planted_phases).iloc[0][['percent', 'verdict']].tolist()==[approx(50.3, abs=.1), 'shorter']

# %% The largest batch leaves out nearly half of the images
assert n_train%256/n_train>.4
