# %% Both loops do the same training; torch's own numbers train something else
from pytest import approx
from replay import planted
n = len(make(64)[0].train)
assert len(fitted)==len(plain)==len(usual)==2*n
assert max(differences(plain[:16]))<1e-5 and usual[0]==approx(fitted[0], rel=1e-6) and max(differences(usual[:16]))>1e-3
assert record['accuracy']==approx(fit_accuracy, abs=1e-6) and record['valid_loss']==approx(valid_loss, rel=1e-4)

# %% Each loop is timed over whole epochs, the first one not counted, and trains the same
for loop in ('fit', 'your loop', 'fit, sped up'):
    found = time_loop(loop, 64, 'cpu', dataset, 'lenet', max_images)
    assert found['n_images']==64*n and found['step_ms']==approx(1e3*found['epoch_s']/n), loop
def kept(loop): # the weights after the epochs that are timed
    nets = []
    def make_and_keep(bs, seed=0, make=make):
        dls, net = make(bs)
        nets.append(net)
        return dls, net
    with planted(make=make_and_keep): time_loop(loop, 64, 'cpu', dataset, 'lenet', max_images)
    return torch.cat([o.detach().flatten() for o in nets[0].parameters()])
by_fit = kept('fit')
for loop in ('your loop', 'fit, sped up'): assert (kept(loop)-by_fit).norm()/by_fit.norm()<.02, loop

# %% Seconds wait for the device
log, now = [], iter([10., 13.])
with planted(perf_counter=lambda: next(now), wait_for=lambda d: log.append('wait')):
    assert seconds(lambda: log.append('work'))==3 and log==['work', 'wait']

# %% Ratios are taken within rounds: a slow round does no harm
made = pd.DataFrame([dict(device='cpu', bs=64, loop=loop, visit=i, round_id=i, step_ms=ms*slow) for i,slow in enumerate((1., 3., 1.1))
                     for loop,ms in (('fit', 4.), ('your loop', 2.))])
with planted(loops=made):
    found = compare_loops('fit').loc['cpu', 64]
    assert found.ratio['your loop'].mid==approx(2) and found.ratio['your loop'].lo==approx(2) and found.ratio['fit'].mid==1
    assert found.step_ms['fit']==approx(4.4)

# %% The same epochs are 16 times as many steps at batch 64, which learns more; 2 epochs of the tiny profile teach nothing
is_whole = n_epoch==20
done = pd.DataFrame(lab.mine)
epochs = done[done.part=='epochs']
few_steps, many_steps = (epochs[epochs.bs==o] for o in (1000, 64))
assert set(few_steps.n_steps)=={2*n_epoch} and set(many_steps.n_steps)=={n*n_epoch} and len(epochs)==2*min(2, n_seeds)
assert not is_whole or many_steps.accuracy.min()>few_steps.accuracy.max()+.05

# %% The high rate fails where it is constant, and a schedule rescues it
rate = done[done.part=='rate'].set_index('how')
assert set(rate.n_steps)=={short*n} and len(rate)==3*n_seeds
one, high, low = (rate.loc[[o], 'accuracy'] for o in ('one cycle to 0.03', 'rate 0.03', 'rate 0.001'))
assert not is_whole or one.min()>high.max() and one.median()>low.median()
steps = []
class Opt: param_groups = [dict()]
for frac in (0., .25, 1.):
    one_cycle(.03)(Opt, frac)
    steps.append((Opt.param_groups[0]['lr'], *Opt.param_groups[0]['betas']))
assert steps==[approx((.03/25, .95, .99)), approx((.03, .85, .99)), approx((.03/1e5, .95, .99))]

# %% The schedule is that of fit_one_cycle
from fastai.callback.schedule import ParamScheduler
dls, net = make(64)
by_hand = plain_losses(same_adam(net), net, dls.train, 1, one_cycle(1e-3))
dls, net = make(64)
cycle = Learner(dls, net)
cycle.recorder.smooth_loss.beta = 0
with cycle.no_bar(), cycle.no_logging(): cycle.fit_one_cycle(1, 1e-3)
kept_losses = [o.item() for o in cycle.recorder.losses]
assert by_hand[:16]==approx(kept_losses[:16], rel=1e-5) and max(differences(by_hand))>1e-2

# %% Dropout goes before linear layers, helps where the network overfits, and is off in evaluation
drop = done[done.part=='dropout'].set_index('how')
assert set(drop.n_steps)=={400} and (drop.trained_on>.95).all() and (drop.accuracy<drop.trained_on-.1).all()
with_it, without = (drop.loc[[o]] for o in ('dropout', 'no dropout'))
assert n_seeds==1 or with_it.accuracy.median()>without.accuracy.median()
assert (without.no_eval==without.accuracy).all() and (with_it.no_eval<with_it.accuracy).all()
for name,n in (('lenet', 2), ('resnet18', 1)):
    net = get_model(name, n_in=1)
    add_dropout(net)
    assert sum(isinstance(o, nn.Dropout) for o in net.modules())==n, name
    assert [type(o) for o in net.modules() if not list(o.children())][-2:]==[nn.Dropout, nn.Linear], name

# %% Pieces give the gradients of the whole batch
def off(*args): return ((gradient(*args)-whole).norm()/whole.norm()).item()
dls, net = make(1000)
x, y = next(batches(dls.train))
whole = gradient(accumulated, 1000)
assert off(accumulated, 50)<1e-5 and off(accumulated, 64)<1e-5 and off(just_added_up, 50)==approx(19, rel=1e-3)

