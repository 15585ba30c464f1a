"""The captured step against the eager one, on a CPU: the tape repeats a step's operations with the tensors and numbers of the
recording, as a CUDA graph does, so that a rate, a batch or a gradient that was forgotten shows here too."""
import gc
import pkgutil
from contextlib import nullcontext
from copy import deepcopy
from functools import partial, wraps
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.schedule import ParamScheduler  # noqa: F401 (adds fit_one_cycle and others to Learner)
from fastai.callback.tracker import TerminateOnNaNCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import TfmdDL
from fastai.learner import Learner, load_learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.optimizer import SGD, Adam, Optimizer
from fastai.torch_core import params, set_seed
from fastai.vision.learner import model_meta, vision_learner
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet, resnet18

import gpubench
from gpubench.step import capture, graphed, optim
from gpubench.data.loaders import get_dls
from gpubench.step.capture import TapeCapture
from gpubench.ground.core import allows_tf32, describe_machine, inherited
from gpubench.step.fast import FusedStepCallback, GraphedStepCallback, SpeedUp, defer, speed_up
from gpubench.watch.monitor import MonitorCallback
from gpubench.step.optim import FusedOptimizer, fuse, recipe_of
from gpubench.run.process import adopt_switches
from gpubench.watch.timing import StepTimerCallback
from gpubench.run.trial import tf32_set
from on_tape import Broken, FuseCallback, autocast, compiler  # noqa: F401 (two are fixtures)


DEVICES = ['cpu', *['cuda']*torch.cuda.is_available()]
torch.backends.cudnn.deterministic = True
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')


pytestmark = pytest.mark.usefixtures('one_thread')

def network():
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(.2)),
        nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 10)))


def fused_adam(params, lr, **kwargs): return fuse(Adam(params, lr, **kwargs))
def split(model): return [params(model[0]), [o for o in model.parameters() if not any(o is p for p in params(model[0]))]]
def learner(graph, cbs=(), drop_last=True, model=network, path='.', gathered=False, loss_func=CrossEntropyLossFlat,
            metrics=lambda: accuracy, device='cpu', size=8, make=None, **kwargs):
    set_seed(0)
    dls = get_dls('digits', bs=32, loader='resident', device=device, max_images=230, size=size)
    dls.train.drop_last = drop_last
    cb = GraphedStepCallback(capture=TapeCapture() if device=='cpu' else None) if graph else FuseCallback()
    learn = (make or Learner)(dls, model(), cbs=[cb, *cbs], loss_func=loss_func(), metrics=metrics(), path=path,
                              **dict(splitter=split)|kwargs)
    learn.remove_cb(learn.progress)
    if gathered: defer(learn.recorder)
    learn.logger = lambda *args: None
    return learn


def state(learn):
    "All that a training leaves behind: weights, buffers, moments, losses, what was logged"
    moments = [o for p in learn.model.parameters() for k,o in sorted(learn.opt.state[p].items()) if k!='force_train']
    tensors = [*learn.model.parameters(), *learn.model.buffers(), *learn.recorder.losses]
    return ([o.detach().clone() for o in tensors], [o.clone() if isinstance(o, torch.Tensor) else o for o in moments],
            [list(o) for o in learn.recorder.values], list(learn.recorder.lrs))


def assert_close(a, b):
    "The same but for rounding: where a graph is refused, torch's own fused Adam steps"
    for x,y in zip(state(a), state(b), strict=True): torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)

def assert_same(a, b):
    for x,y in zip(state(a), state(b), strict=True):
        assert len(x)==len(y)
        assert all(torch.equal(o, p) if isinstance(o, torch.Tensor) else o==p for o,p in zip(x, y)), (x, y)


def one_cycle(learn): learn.fit_one_cycle(2, 1e-2)
def twice(learn):
    learn.fit(1, 1e-2)
    learn.fit(2, 1e-3, wd=.1)
def freezing(learn):
    learn.fit_one_cycle(1, 1e-2)
    learn.freeze()
    learn.fit_one_cycle(1, slice(1e-3, 1e-2))
    learn.unfreeze()
    learn.fit_one_cycle(1, slice(1e-4, 1e-2))
def found(learn):
    learn.fit(1, 1e-2)
    learn.lr_find(num_it=12, show_plot=False)
    learn.fit(1, 1e-2)
def predicting(learn):
    learn.fit(1, 1e-2)
    learn.get_preds()
    learn.validate()
    learn.predict(np.zeros((8, 8), np.uint8))
    learn.fit(1, 1e-2)


def saved_and_loaded(learn):
    learn.fit_one_cycle(1, 1e-2)
    learn.save('saved')                                                       # with its optimizer
    learn.freeze()
    learn.fit_one_cycle(1, 1e-2)
    learn.load('saved')
    learn.unfreeze()
    learn.fit(1, 1e-3)

class Narrow(ResNet):
    "A ResNet with an eighth of the channels"
    def _make_layer(self, block, planes, *args, **kwargs): return super()._make_layer(block, planes//8, *args, **kwargs)
def resnet(pretrained=False): return Narrow(BasicBlock, [2, 2, 2, 2])


CASES = dict(
    one_cycle=(one_cycle, {}), short_last_batch=(one_cycle, dict(drop_last=False)), freeze=(freezing, {}),
    lr_find=(found, {}), predict=(predicting, {}), clip=(one_cycle, dict(cbs=lambda: [GradientClip(.1)])),
    accumulate=(one_cycle, dict(cbs=lambda: [GradientAccumulation(80)])),
    accumulate_and_clip=(twice, dict(cbs=lambda: [GradientAccumulation(64), GradientClip(.1)], drop_last=False)),
    bf16=(one_cycle, dict(cbs=lambda: [MixedPrecision(amp_mode='bf16')])),
    vision_learner=(saved_and_loaded, dict(make=vision_learner, model=lambda: resnet, size=32, opt_func=fused_adam, pretrained=False,
                                           n_in=1, splitter=model_meta[resnet18]['split'])))


def seed_order(learn):
    "The same random numbers and the same order of the images from here on"
    set_seed(1)
    learn.dls.train.rng.seed(1)


def compare(act, path='.', assert_same=assert_same, **kwargs):
    "The same training by eager steps, by a graph, and by a graph that gathers its batches: everything is equal, bit by bit"
    learners = []
    for how in dict(graph=False), dict(graph=True), dict(graph=True, gathered=True):
        cbs = kwargs.get('cbs', list)()
        learners.append(learner(path=path, **how, **kwargs | dict(cbs=cbs)))
        seed_order(learners[-1])
        act(learners[-1])
    for o in learners[1:]: assert_same(learners[0], o)
    if assert_same is assert_close: return learners
    grads = [[p.grad if p.grad is not None else torch.zeros_like(p) for p in o.model.parameters()] for o in learners]
    assert all(torch.equal(a, b) for o in grads[1:] for a,b in zip(grads[0], o))
    return learners


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('case', CASES)
def test_a_captured_step_trains_as_the_eager_one_does_bit_by_bit(case, device, autocast, tmp_path):
    act, kwargs = CASES[case]
    for o in compare(act, tmp_path, device=device, **kwargs)[1:]: assert o.graphed_step.why_not=='' and o.graphed_step.n_replays>=4


class TopLoss(nn.Module):
    "A loss of mixed targets that fastai can't stack"
    def forward(self, pred, y): return (pred-y.view(-1, 1)).square().mean()

@pytest.mark.slow
@pytest.mark.parametrize('compile', [False, True])
@pytest.mark.parametrize('gathered', [False, True])
@pytest.mark.parametrize('loss', [CrossEntropyLossFlat, TopLoss])
@pytest.mark.parametrize('kind', [MixUp, CutMix])
def test_mixed_batches_train_as_fastais_do_with_the_same_draws(kind, loss, gathered, compile, compiler, monkeypatch, tmp_path):
    lam, order, middle = torch.tensor(.3), torch.arange(31, -1, -1), 4
    monkeypatch.setattr(capture, 'draw_weights', lambda alpha, n, device: lam.expand(n))
    monkeypatch.setattr(capture, 'draw_order', lambda n, device: order[-n:])
    monkeypatch.setattr(capture, 'draw_below', lambda n, device: torch.tensor([middle]))
    learners = []
    for graph in False, True:
        cb = kind(.4)
        if not graph: cb.distrib = SimpleNamespace(sample=lambda shape: lam.expand(shape))
        learn = learner(graph, [cb], gathered=graph and gathered, model=without_dropout, splitter=params, loss_func=loss, metrics=lambda: [], path=tmp_path)
        if graph: learn.graphed_step.compile = compile
        if loss is TopLoss: learn.dls.train.dataset.y = learn.dls.train.dataset.y.float()
        with monkeypatch.context() as m:
            if not graph:
                real = torch.randperm
                m.setattr(torch, 'randperm', lambda n, **kw: real(n, **kw) if kw else order[-n:])          # the loader's has a generator
                m.setattr(torch, 'randint', lambda low, high, size: torch.tensor([middle]))
            seed_order(learn)
            learn.fit(3, 1e-2)
        assert cb.run_train and not isinstance(getattr(learn.loss_func, '__self__', None), Callback)
        learners.append(learn)
    assert learners[1].graphed_step.why_not=='' and learners[1].graphed_step.n_replays>=7
    assert_close(*learners)

@pytest.mark.parametrize('gathered', [False, True])
@pytest.mark.parametrize('kind', [MixUp, CutMix])
@pytest.mark.parametrize('device', DEVICES)
def test_each_replay_mixes_its_batch_anew(device, kind, gathered):
    learn = learner(True, [kind(.4), MixedPrecision(amp_mode='bf16')], gathered=gathered, model=without_dropout, splitter=params, device=device)
    learn.dls.train.shuffle, learn.recorder.smooth_loss.beta = False, 0.
    learn.fit(4, 0.)                                                       # each epoch has the same weights and batches
    assert learn.graphed_step.why_not=='' and learn.graphed_step.n_replays==16
    assert all(len(o.unique())>1 for o in torch.stack(learn.recorder.losses).view(4, 5).T)

@pytest.mark.parametrize('kind, alpha', [(MixUp, .4), (CutMix, 1.)])
def test_draws_of_mixed_batches_have_fastais_distribution(kind, alpha):
    n, learn = 4000, learner(False, [kind(alpha)])
    drawn = capture.draw_weights(torch.tensor([alpha, alpha]), n, 'cpu')
    stock = learn.cbs[-1].distrib.sample((n,))
    for q in .05, .25, .5, .75, .95: assert abs(drawn.quantile(q)-stock.quantile(q))<.05
    assert capture.draw_order(50, 'cpu').sort().values.tolist()==list(range(50))

@pytest.mark.parametrize('interrupt', [False, True])
def test_a_refused_graph_leaves_mixed_batches_to_fastai(interrupt, tmp_path):
    cb, mixed = MixUp(), []
    def look(o):
        mixed.append(o.mix_up.run_train)
        if interrupt and o.epoch==1: raise KeyboardInterrupt
    learn = learner(True, [cb, Declared('after_batch', look)], model=lambda: nn.Sequential(network(), Random()), splitter=params, path=tmp_path)
    with pytest.warns(UserWarning, match='random numbers on the CPU'):
        with pytest.raises(KeyboardInterrupt) if interrupt else nullcontext(): learn.fit(2, 1e-3)
    assert mixed[0] is False and mixed[-1] is True and 'lam' in vars(cb)        # the last ones were fastai's own
    learn.remove_cb(learn.graphed_step)
    assert cb.run_train

@pytest.mark.skipif(torch.cuda.device_count()<2, reason='needs two GPUs')
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('case', ['one_cycle', 'short_last_batch', 'bf16'])
def test_a_step_on_a_gpu_that_is_not_the_current_one(case):
    act, kwargs = CASES[case]
    for o in compare(act, device='cuda:1', **kwargs)[1:]: assert o.graphed_step.why_not=='' and o.graphed_step.n_replays>=4
    learn = learner(False, splitter=params, device='cuda:1')
    learn.remove_cb(learn.fuse)
    with speed_up(learn, compile=case=='one_cycle'): act(learn)
    assert learn.graphed_step.why_not=='' and learn.graphed_step.n_replays>=4


# what a user may do to a Learner between two steps, and a graph has to notice
def then(change, act=lambda learn: learn.fit(1, 1e-2)):
    def both(learn):
        learn.fit(2, 1e-2)
        change(learn)
        act(learn)
    return both

class Watched(nn.Sequential):
    "Notes in each training batch whether cuDNN may search, and how far"
    def forward(self, x):
        if self.training: self.seen.append((torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit))
        return super().forward(x)

@pytest.mark.parametrize('compile, own', [(False, False), (True, False), (False, True)])
def test_cudnn_searches_for_compiled_kernels_from_the_first_step_on_and_else_as_the_user_says(compile, own, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, 'benchmark', own)
    monkeypatch.setattr(torch.backends.cudnn, 'deterministic', False)
    monkeypatch.setattr(torch, 'compile', lambda f, **_: f)
    Watched.seen = []
    learn = learner(True, model=lambda: Watched(network()), splitter=params, path=tmp_path)
    learn.graphed_step.compile = compile
    learn.fit(1, 1e-2)
    assert Watched.seen[:3]==[(True, 0) if compile else (own, 10)]*3
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit)==(own, 10)

@pytest.mark.parametrize('compile', ['auto', None, 2])
def test_compile_is_true_or_false(compile):
    with pytest.raises(ValueError, match='True or False'): GraphedStepCallback(compile)
    with pytest.raises(ValueError, match='True or False'): speed_up(learner(False), compile=compile)


@pytest.mark.parametrize('gathered', [False, True])
def test_what_cannot_be_compiled_trains_eagerly_and_one_sentence_says_why(gathered):
    def model(): return Broken(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    eager, compiled = (learner(o, gathered=o and gathered, model=model, splitter=params) for o in (False, True))
    compiled.graphed_step.compile = True
    with pytest.warns(UserWarning, match="It can't be compiled"):
        for o in eager, compiled:
            seed_order(o)
            o.fit(2, 1e-2)
    assert "It can't be compiled" in compiled.graphed_step.why_not and not compiled.graphed_step.n_replays
    assert_close(eager, compiled)


class At(Callback):
    "Calls a function at an event of training"
    def __init__(self, event, do): setattr(self, event, lambda: do(self) if self.training else None)
class Declared(At): graph_safe = True
class Sometimes(nn.Module):
    "Reaches one of its parameters in short batches only"
    def __init__(self):
        super().__init__()
        self.body, self.q = network(), nn.Parameter(torch.ones(10))
    def forward(self, x): return self.body(x) if len(x)==32 else self.body(x)*self.q
    def __getitem__(self, i): return self.body[i]
class Pair(nn.Module):
    "Returns two things"
    def __init__(self):
        super().__init__()
        self.body = network()
    def forward(self, x): return self.body(x), x.mean()
    def __getitem__(self, i): return self.body[i]
def of_the_first(pred, y): return nn.functional.cross_entropy(pred[0], y)
def own_step(learn):
    def step():
        learn.loss_grad.backward()
        for p in learn.model.parameters(): p.grad.mul_(.5)
        learn.opt.step()
        learn.opt.zero_grad()
    learn._do_grad_opt = step
def unfrozen_and_reset(learn):
    learn.freeze()
    learn.model.zero_grad()

class Dimmed(Learner):
    def one_batch(self, i, b): super().one_batch(i, (b[0]*.1, *b[1:]) if self.training else b)

def saliency(learn):
    learn.model.zero_grad()
    x, y = learn.dls.valid.one_batch()
    learn.loss_func(learn.model(x), y).backward()
    learn.opt.zero_grad()
def without_fused(learn): learn.remove_cbs([o for o in learn.cbs if type(o) is FusedStepCallback])

CHANGES = dict(
    clip_later=(lambda o: o.fit(4, 1e-2), dict(opt_func=partial(SGD, mom=.9), cbs=lambda: [GradientClip(.01),
        At('before_epoch', lambda cb: setattr(cb.learn.gradient_clip, 'run', cb.epoch>=2))])),
    saliency=(then(saliency, lambda o: o.fit(3, 1e-2)), dict(drop_last=False, cbs=lambda: [GradientAccumulation(64)])),
    without_fused=(then(without_fused, lambda o: o.fit(5, 1e-2)), dict(drop_last=False, cbs=lambda: [FusedStepCallback()])),
    no_gradients=(then(unfrozen_and_reset), {}),
    dropout=(then(lambda o: setattr(o.model[0][3], 'p', .7)), {}), own_step=(then(own_step), {}),
    forward_hook=(then(lambda o: o.model[0].register_forward_hook(lambda m, i, out: 2*out)), {}),
    gradient_hook=(then(lambda o: next(o.model.parameters()).register_hook(lambda g: g*(1+len(o.recorder.losses)))), {}),
    batch_norm=(lambda o: o.fit(3, 1e-2), dict(cbs=lambda: [At('before_epoch', lambda cb: setattr(cb.model[0][1], 'momentum', .1/(1+cb.epoch)))])),
    max_norm=(lambda o: o.fit(2, 1e-2), dict(opt_func=partial(SGD, mom=.9), cbs=lambda: [
        GradientClip(.1), At('before_batch', lambda cb: setattr(cb.learn.gradient_clip, 'max_norm', .01*(1+cb.train_iter)))])),
    reached_late=(lambda o: o.fit(4, 1e-2), dict(model=Sometimes, drop_last=False, wd=.1)),
    two_outputs=(lambda o: o.fit(2, 1e-2), dict(model=Pair, loss_func=lambda: of_the_first, metrics=lambda: [])),
    own_batch=(lambda o: o.fit(2, 1e-2), dict(make=Dimmed)))


BETWEEN_BATCHES = 'max_norm', 'own_batch'      # where a graph would see nothing

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('case', CHANGES)
def test_a_graph_follows_what_changes_between_two_steps(case, device, tmp_path):
    act, kwargs = CHANGES[case]
    is_eager, is_refused_later = case in BETWEEN_BATCHES, case in ('own_step', 'forward_hook', 'gradient_hook')
    for o in compare(act, tmp_path, assert_close if is_eager or is_refused_later else assert_same, device=device, **kwargs)[1:]:
        assert (o.graphed_step.n_replays==0)==is_eager and bool(o.graphed_step.why_not)==(is_eager or is_refused_later)


# compiled kernels round differently. In parts of the way that a tensor went in training, that's 1e-6 here and, in bf16, 1e-2 (by
# inductor on a CPU)
COMPILED = 'one_cycle', 'short_last_batch', 'freeze', 'clip', 'bf16'

def without_dropout(): return nn.Sequential(network()[0][:3], network()[1])   # compiled, it draws other numbers

def compare_compiled(case, gathered, device, path):
    act, kwargs = CASES[case]
    def train(graph):
        learn = learner(graph, path=path, gathered=graph and gathered, model=without_dropout, device=device,
                        **kwargs | dict(cbs=kwargs.get('cbs', list)()))
        if graph: learn.graphed_step.compile = True
        start = [o.to(device, copy=True) for o in learn.model.state_dict().values()]
        seed_order(learn)
        act(learn)
        return learn, start, [*learn.model.state_dict().values(), torch.stack(learn.recorder.losses)]
    _, start, eager = train(False)
    learn, _, compiled = train(True)
    assert learn.graphed_step.why_not=='' and learn.graphed_step.n_replays>=4
    for a,b,o in zip(eager, compiled, [*start, 0.], strict=True):
        assert (a-b).float().norm()<=(.05 if case=='bf16' else .005)*(a-o).float().norm()


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('case, gathered', [*((o, g) for o in COMPILED for g in (False, True)),
                                            ('accumulate', False)])
def test_a_captured_step_of_compiled_kernels_trains_as_the_eager_one_does(case, gathered, device, autocast, compiler, tmp_path):
    compare_compiled(case, gathered, device, tmp_path)

class Dropped(nn.Module):
    "Keeps which fractions of the pixels it dropped"
    def __init__(self):
        super().__init__()
        self.body = without_dropout()
        self.register_buffer('fractions', torch.zeros(12))
    def forward(self, x):
        kept = nn.functional.dropout(torch.ones_like(x), .5, self.training)
        if self.training: self.fractions.copy_(torch.cat([self.fractions[1:], (kept==0).float().mean()[None]]))
        return self.body(x*kept)

@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('gathered', [False, True])
def test_each_replay_of_compiled_kernels_draws_its_own_random_numbers(gathered, device, compiler):
    learn = learner(True, gathered=gathered, device=device, splitter=params, model=Dropped)
    learn.graphed_step.compile, learn.dls.train.shuffle, learn.recorder.smooth_loss.beta = True, False, 0.
    learn.fit(4, 0.)                                                       # each epoch has the same weights and batches
    assert learn.graphed_step.why_not=='' and learn.graphed_step.n_replays==16
    losses = torch.stack(learn.recorder.losses).view(4, 5)[1:]             # of replays
    assert all(len(o.unique())==3 for o in losses.T)
    fractions = learn.model.fractions
    assert len(fractions.unique())>8 and abs(fractions.mean()-.5)<.02


class ScalarParameter(nn.Module):
    "Whose gradient is a view of the loss's own"
    def __init__(self):
        super().__init__()
        self.body, self.own = network(), nn.Parameter(torch.zeros(()))
    def forward(self, x): return self.body(x), self.own


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('gathered', [False, True])
@pytest.mark.parametrize('model, loss, cbs', [
    (ScalarParameter, lambda p, y: nn.functional.cross_entropy(p[0], y)+p[1].view(()), ()),
    (network, lambda p, y: nn.functional.cross_entropy(p, y).view(1), ()),
    (network, nn.functional.cross_entropy, [GradientAccumulation(100)])], ids=['scalar_parameter', 'loss_of_one', 'uneven_share'])
def test_unusual_losses_train_as_eager_ones_do(model, loss, cbs, gathered, tmp_path):
    def train(graph):
        learn = learner(graph, cbs, model=model, loss_func=lambda: loss, metrics=lambda: [], splitter=params, gathered=graph and gathered, path=tmp_path)
        seed_order(learn)
        learn.fit(2, 1e-2)
        return learn
    eager, graphed = train(False), train(True)
    assert graphed.graphed_step.why_not=='' and graphed.graphed_step.n_replays
    for a,b in zip(eager.model.parameters(), graphed.model.parameters()): assert a.equal(b)


class CountCallback(Callback):
    graph_safe = 'counts'
    def __init__(self, *names):
        self.seen = []
        for o in names: setattr(self, o, partial(self.seen.append, o))

def test_a_callback_that_counts_is_called_at_each_where_batches_are_gathered(tmp_path):
    names, seen = ('before_batch', 'after_step', 'after_batch'), []
    for graph in False, True:
        cb = CountCallback(*names)
        learn = learner(graph, [cb], gathered=True, path=tmp_path)
        learn.fit(2, 1e-2)
        seen.append(cb.seen)
    assert seen[0]==seen[1] and seen[0].count('after_step')==2*len(learn.dls.train)


class RunningLoss(nn.Module):
    "Keeps a mean of its losses in a buffer, and their number in a tensor that is none"
    def __init__(self):
        super().__init__()
        self.register_buffer('mean', torch.zeros(()))
        self.n = torch.zeros(())
    def forward(self, pred, y):
        loss = nn.functional.cross_entropy(pred, y)
        with torch.no_grad():
            self.mean.lerp_(loss, .1)
            self.n += 1
        return loss*(1+self.mean)

@pytest.mark.parametrize('gathered', [False, True])
def test_a_trial_trains_what_a_loss_keeps_once(gathered, tmp_path):
    learners = [learner(graph, loss_func=RunningLoss, gathered=graph and gathered, metrics=lambda: [], path=tmp_path) for graph in (False, True)]
    for o in learners:
        seed_order(o)
        o.fit(3, 1e-2)
    a, b = (o.loss_func for o in learners)
    assert learners[1].graphed_step.n_replays and not learners[1].graphed_step.why_not and a.n==b.n and a.mean.equal(b.mean)
    assert_same(*learners)

@pytest.mark.parametrize('device', DEVICES)
def test_autocast_ends_with_the_step(device, autocast):
    within, after = set(), []
    class Look(nn.Conv2d):
        def forward(self, x):
            out = super().forward(x)
            within.add(out.dtype)
            return out
    def model(): return nn.Sequential(nn.Sequential(Look(1, 4, 3)), network()[1])
    def look(cb): after.append(torch.is_autocast_enabled(device))
    learn = learner(True, cbs=[MixedPrecision(amp_mode='bf16'), At('before_validate', look), Declared('after_batch', look)], model=model, device=device)
    learn.fit(1)
    assert learn.graphed_step.n_replays and within=={torch.bfloat16} and not any(after)


class Hooked(Callback):
    "Registers a hook, as fastai's ActivationStats does"
    def before_fit(self): self.handle = self.learn.model[0].register_forward_hook(lambda *args: None)
class OwnLoss(Callback):
    "Computes the loss with a number of its own, as fastai's MixUp does"
    def before_train(self): self.learn.loss_func = self.own_loss
    def own_loss(self, pred, y): return nn.functional.cross_entropy(pred, y)*(1+self.epoch)
class Random(nn.Module):
    def forward(self, x): return x*np.random.rand()
class Item(nn.Module):
    def forward(self, x): return x if x.sum().item()>-1e9 else -x
class Inside(Callback):
    def after_pred(self): pass
class OwnStep(Callback):
    order = -100
    def before_fit(self): self.opt.step = self.opt.step

class Rarely(nn.Module):
    "Its first draws take the same branch"
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)
    def forward(self, x): return x*2 if self.rng.random()<.01 else x
outside = SimpleNamespace(n=0)
class OutsideCounting(nn.Module):
    def forward(self, x):
        outside.n += 1
        return x*outside.n
def other_mix_up():
    cb = MixUp()
    cb.distrib = torch.distributions.Uniform(0., 1.)
    return cb

@pytest.mark.parametrize('says, kwargs', [
    ('changes what it holds', dict(model=lambda: nn.Sequential(network(), Rarely()))),
    ('changes from batch to batch', dict(model=lambda: nn.Sequential(network(), OutsideCounting()))),
    ('what MixUp may change', dict(cbs=[other_mix_up()])),
    ('random numbers on the CPU', dict(model=lambda: nn.Sequential(network(), Random()))),
    ("can't wait for a value", dict(model=lambda: nn.Sequential(network(), Item()))),
    ('what Inside, Stop may change between batches', dict(cbs=[Inside(), type('Stop', (Inside,), {})()])),
    ('The network has hooks', dict(cbs=[Hooked()])),
    ('have the same part', dict(cbs=[GradientClip(.1), GradientClip(1.)])),
    ('a step or a zero_grad of its own', dict(cbs=[OwnStep()])),
    ('A callback computes the loss', dict(cbs=[OwnLoss()]))])
@pytest.mark.parametrize('device', DEVICES)
def test_what_cannot_be_captured_trains_eagerly_and_one_sentence_says_why(device, says, kwargs):
    says = 'capturing' if device=='cuda' and 'on the host' in says else says                      # in CUDA's words
    learn = learner(True, device=device, gathered='what it holds' in says or 'from batch to batch' in says, **kwargs)
    with pytest.warns(UserWarning, match='run eagerly instead of as a graph') as caught: learn.fit(2, 1e-3)
    assert says in learn.graphed_step.why_not and sum('as a graph' in str(o.message) for o in caught)==1
    assert len(learn.recorder.losses)==10 and all(torch.isfinite(o) for o in learn.recorder.losses)


@needs_gpu
@pytest.mark.parametrize('gathered', [False, True])
def test_a_graph_keeps_its_memory_while_others_capture_theirs(gathered, tmp_path):
    learners = [learner(graph, device='cuda', gathered=gathered) for graph in (False, True)]
    for i in range(2):
        for o in learners:
            set_seed(1+i)
            o.dls.train.rng.seed(1+i)
            o.fit(2, 1e-2)
        if i: break
        other = torch.compile(nn.Sequential(nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 500)).cuda(), mode='reduce-overhead')
        with torch.no_grad():
            for _ in range(4): other(torch.randn(300, 500, device='cuda'))
        torch.cuda.empty_cache()
        kept = [torch.full((1<<20,), float('nan'), device='cuda') for _ in range(200)]
    assert learners[1].graphed_step.n_replays>10 and len(kept)==200
    assert_same(*learners)


class Stop(Callback):
    graph_safe = 'counts'
    def before_batch(self):
        if self.training and self.iter==3: raise KeyboardInterrupt

@pytest.mark.parametrize('gathered', [False, True])
def test_an_error_in_an_epoch_leaves_a_learner_that_trains(gathered):
    learn = learner(True, gathered=gathered)
    learn.fit(1)
    for removed in [Stop], [Stop, GraphedStepCallback]:
        with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=Stop())
        learn.remove_cbs(removed)
        assert len(learn.recorder.losses)==3
        if GraphedStepCallback in removed:
            assert '_do_one_batch' not in vars(learn) and not any(p.grad.any() for p in learn.model.parameters())
        learn.fit(1)

def test_an_interrupted_capture_leaves_no_gradients_of_its_own():
    learn = learner(True)
    def stop(step):
        step()
        raise KeyboardInterrupt
    learn.graphed_step.capture.record = stop
    with pytest.raises(KeyboardInterrupt): learn.fit(1)
    assert not any(p.grad.any() for p in learn.model.parameters())

def test_what_fails_on_another_device_is_given_up_on_all(monkeypatch):
    monkeypatch.setattr(graphed, '_any_rank', lambda why, step: why or 'It failed on another device.')
    learn = learner(True, gathered=True)
    with pytest.warns(UserWarning, match='another device'): learn.fit(2)
    assert not learn.graphed_step.n_replays and not learn.graphed_step.n_graphs and len(learn.recorder.losses)==10

def test_an_optimizer_that_gets_a_function_between_epochs_steps_by_itself():
    learn, seen = learner(True), []
    class Changes(Callback):
        def before_epoch(self):
            if self.epoch==1: self.learn.opt.cbs = [*self.learn.opt.cbs, lambda p, **kwargs: seen.append(p)]
    with pytest.warns(UserWarning, match='changed within the fit'): learn.fit(2, cbs=Changes())
    assert seen and type(learn.opt) is Optimizer

@pytest.mark.parametrize('gathered', [False, True])
@pytest.mark.parametrize('device', DEVICES)
def test_the_timer_reports_the_replay_as_one_phase(device, gathered):
    learn = learner(True, cbs=[StepTimerCallback()], gathered=gathered, device=device, drop_last=False)
    learn.fit(3)
    df, replays = learn.step_timer.to_df(), learn.graphed_step.n_replays
    assert len(df)==18 and df.n_images.tolist()==[*[32]*5, 24]*3 and replays==1+2*5+1         # the short batch trains eagerly once
    assert df.graph_ms.notna().sum()==replays and df[df.graph_ms.notna()].backward_ms.isna().all()
    assert (df.step_ms>0).all() and (df.graph_ms.dropna()<=df.step_ms[df.graph_ms.notna()]+1e-3).all()
    assert learn.step_timer.epochs_df().n_images.tolist()==[184]*3


@pytest.mark.parametrize('gathered', [False, True])
def test_a_monitor_counts_the_images_of_replays(gathered):
    monitor = MonitorCallback(.01)
    learn = learner(True, cbs=[monitor], gathered=gathered, drop_last=False)
    learn.fit(3)
    spans = monitor.epochs_df()
    assert learn.graphed_step.n_replays and spans[spans.phase=='train'].n_images.tolist()==[184]*3


@pytest.mark.parametrize('name', ['_do_one_batch', 'all_batches'])
@pytest.mark.parametrize('gathered', [False, True])
def test_a_method_that_a_user_gave_the_learner_is_run_and_comes_back(gathered, name):
    learn, calls = learner(False), []
    learn.remove_cb(learn.fuse)
    def own():
        calls.append(name)
        getattr(Learner, name)(learn)
    setattr(learn, name, own)
    if gathered: defer(learn.recorder)
    learn.add_cb(cb := GraphedStepCallback(capture=TapeCapture()))
    with pytest.warns(UserWarning, match=f'has its own {name}'): learn.fit(1)
    assert len(calls)==(2 if name=='all_batches' else len(learn.dls.train)+len(learn.dls.valid)) and cb.n_replays==0
    learn.remove_cb(cb)
    assert vars(learn)[name] is own

class Keeps(nn.Module):
    "Keeps what it computed last"
    def forward(self, x):
        self.feature = x*2
        return self.feature
class Swa(Callback):
    "Has a method of a name that a callback of gpubench has"
    def average(self, w=.5): raise AssertionError('called in the step')
    def after_epoch(self): pass
class LooksWithin(Callback):
    graph_safe = True
    def after_pred(self): self.learn.seen_pred = True

def test_names_of_a_users_callback_mean_nothing_and_activations_may_be_kept():
    learn = learner(True, [Swa(), GradientClip()], model=lambda: nn.Sequential(network(), Keeps()), splitter=params)
    learn.average = Swa().average                                             # which fastai's callbacks delegate to
    learn.fit(2, 1e-2)
    assert learn.graphed_step.n_replays and learn.graphed_step.why_not==''

def test_our_own_callbacks_declare_themselves():
    modules = [import_module(o.name) for o in pkgutil.walk_packages(gpubench.__path__, 'gpubench.') if not o.name.endswith('__main__')]
    own = {o for m in modules for o in vars(m).values() if isinstance(o, type) and issubclass(o, Callback) and o.__module__==m.__name__}
    leaves = [o for o in own if not own & {*o.__subclasses__()}]
    assert len(leaves)>10 and {o.__name__ for o in leaves if not vars(o).get('graph_safe')}=={'SyncStepCallback', '_MemoryCallback', 'ParallelCallback'}   # XLA's; an eager step's; a part

def test_a_declaration_covers_no_event_that_a_replay_leaves_out():
    learn = learner(True, [LooksWithin()])
    with pytest.warns(UserWarning, match='what LooksWithin may change'): learn.fit(1, 1e-2)

def test_a_hook_within_a_loss_is_seen():
    learn, seen = learner(True), []
    learn.loss_func.func.register_forward_hook(lambda m, x, out: seen.append(1))
    with pytest.warns(UserWarning, match='has hooks'): learn.fit(1, 1e-2)
    assert len(seen)==len(learn.dls.train)+len(learn.dls.valid)

def test_a_learner_without_a_recorder_has_its_batches_copied():
    learn = learner(True, gathered=True)
    learn.remove_cb(learn.recorder)
    learn.fit(2)
    assert learn.graphed_step.n_replays and not learn.graphed_step.why_not


def test_a_deferred_recorder_records_the_same(tmp_path):
    plain, late = (learner(False) for _ in range(2))
    defer(late.recorder)
    late.recorder.every = 3
    ends = [], []
    for o,seen in zip((plain, late), ends):
        seed_order(o)
        o.add_cb(At('after_train', lambda cb, seen=seen: seen.append(float(cb.learn.smooth_loss))))
        one_cycle(o)
    assert_same(plain, late)
    assert ends[0]==ends[1] and len(set(ends[0]))==len(ends[0])>1
    assert plain.recorder.iters==late.recorder.iters


class Keep(Callback):
    "Looks at the losses of batches, before the next one starts"
    graph_safe = False
    def before_fit(self): self.kept, self.seen = [], []
    def before_batch(self): self.seen.append(float(getattr(self.learn, 'smooth_loss', 0.)))
    def after_batch(self): self.kept.append(self.learn.loss)


@pytest.mark.parametrize('device', DEVICES)
def test_who_looks_at_losses_gets_each_of_them(device, tmp_path):
    kept = [(o.keep.kept, o.keep.seen) for o in compare(lambda o: o.fit(2, 1e-2), tmp_path, device=device, cbs=lambda: [Keep()], assert_same=assert_close)]
    for o in kept[1:]: torch.testing.assert_close([list(map(float, k)) for k in o], [list(map(float, k)) for k in kept[0]], rtol=1e-3, atol=1e-5)
    assert len(set(map(float, kept[0][0])))>9


def ended(learn): learn.fit(1)
def after_lr_find(learn):
    learn.fit(1)
    learn.lr_find(num_it=5, show_plot=False)
def interrupted(learn):
    learn.fit(1)
    def stop(cb): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=Declared('after_batch', stop))

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('gathered', [False, True])
@pytest.mark.parametrize('act', [ended, after_lr_find, interrupted])
@pytest.mark.parametrize('device', DEVICES)
def test_a_learner_that_was_sped_up_is_exported_and_copied_without_gpubench(device, act, gathered, tmp_path):
    learn = learner(True, device=device, path=tmp_path, gathered=gathered, cbs=[FusedStepCallback()])
    act(learn)
    learn.export('a.pkl')
    data = (tmp_path/'a.pkl').read_bytes()
    assert not any(o in data for o in (b'gpubench.step.graphed', b'gpubench.step.recorder', b'gpubench.step.fast', b'gpubench.step.optim', b'gpubench.watch.timing'))
    loaded, item = load_learner(tmp_path/'a.pkl'), np.zeros((8, 8), np.uint8)
    assert torch.allclose(loaded.predict(item)[2].cpu(), learn.predict(item)[2].cpu(), atol=1e-5)
    copied = deepcopy(learn)
    for o in (learn, copied): o.fit(1)
    assert len(copied.recorder.losses)==5 and isinstance(copied.opt, FusedOptimizer)


def test_speed_up_on_a_cpu_and_back():
    learn = learner(False)
    learn.remove_cbs([FuseCallback])
    learn.validate()                                                      # no optimizer yet: nothing to say
    before, strides = [type(o) for o in learn.cbs], [p.stride() for p in learn.model.parameters()]
    with speed_up(learn) as fast:
        learn.fit(1)
        assert isinstance(learn.opt, FusedOptimizer)
        n = len(learn.cbs)
        again = speed_up(learn)                                           # changes nothing, and undoes nothing
        again.undo()
        assert len(learn.cbs)==n and again.to_df().why.str.contains('already').sum()==2
    assert [type(o) for o in learn.cbs]==before and not isinstance(learn.opt, FusedOptimizer)
    found = fast.to_df().set_index('part').on.to_dict()
    assert found=={'channels_last': True, 'fused step': True, 'pages': True}
    assert [p.stride() for p in learn.model.parameters()]==strides
    learn.fit(1)
    with pytest.raises(ValueError, match='precision'): speed_up(learn, precision='fp8')


def needed_bytes():
    "What tensors on the GPU need, unrounded, without the workspaces that cuBLAS keeps for each stream"
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_stats()['requested_bytes.all.current']

def large(): # 9 MiB
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 64, 3), nn.ReLU(), nn.Flatten(),
                         nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 10))

def large_learner():
    "After its first steps, so that it has gradients and moments"
    learn = learner(False, model=large, splitter=params, device='cuda')
    learn.remove_cb(learn.fuse)
    learn.fit(1, 1e-3)
    return learn

@needs_gpu
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('compile', [False, True])
def test_undo_puts_everything_on_a_gpu_back(compile, monkeypatch):
    def now(learn):
        return ([id(o) for o in learn.cbs.sorted('order')], [o.stride() for o in learn.model.parameters()], type(learn.opt),
                torch.backends.cudnn.benchmark, [o for o in vars(learn) if o in ('_do_one_batch', 'all_batches')])
    torch._dynamo.reset()
    monkeypatch.setattr(torch.backends.cudnn, 'deterministic', False)         # so that it may search for kernels
    monkeypatch.setattr(torch.backends.cudnn, 'benchmark', False)
    for is_first in True, False:                       # what the process needs once isn't the Learner's
        learn = large_learner()
        before, n_bytes = now(learn), needed_bytes()
        done = speed_up(learn, 'bf16', compile)
        learn.fit(2, 1e-3)
        assert learn.graphed_step.why_not=='' and learn.graphed_step.n_replays==6 and needed_bytes()>n_bytes
        changed = now(learn)
        assert all(a!=b for i,(a,b) in enumerate(zip(before, changed)) if i not in (1, 3)), changed      # strides and the search: in fits only
        assert not changed[3]
        done.undo()
        assert now(learn)==before
        assert is_first or abs(needed_bytes()-n_bytes)<2**13
        learn.fit(1, 1e-3)
        del learn, done

@needs_gpu
@pytest.mark.parametrize('is_undone', [False, True])
def test_twenty_fits_with_three_batch_sizes_need_no_more_memory_than_six(is_undone):
    learn, n_bytes = large_learner(), []
    done = speed_up(learn)
    for i in range(20):
        learn.dls.train.bs = (16, 24, 32)[i%3]
        learn.fit(1, 1e-3)
        assert learn.graphed_step.why_not=='' and learn.graphed_step.n_replays
        if is_undone:
            done.undo()
            n_bytes.append(needed_bytes())
            done = speed_up(learn)
        else: n_bytes.append(needed_bytes())
    assert n_bytes[5:8]==n_bytes[17:20], n_bytes


class StrictCallback(Callback):
    "An error where the host waits for the GPU in an epoch of replays, once the order of its images is on the GPU"
    graph_safe, n = 'counts', 0
    def before_batch(self):
        if self.training and self.epoch and self.iter: torch.cuda.set_sync_debug_mode('error')
    def after_batch(self): self.n += torch.cuda.get_sync_debug_mode()==2
    def after_train(self): torch.cuda.set_sync_debug_mode('default')

@needs_gpu
def test_the_host_does_not_wait_in_an_epoch_of_replays():
    learn = learner(True, [StrictCallback()], gathered=True, device='cuda')
    try: learn.fit(3, 1e-3)
    finally: torch.cuda.set_sync_debug_mode('default')
    assert learn.graphed_step.n_replays==11 and learn.strict.n==8


def test_speed_up_leaves_what_a_user_chose():
    learn = learner(False, opt_func=fused_adam)
    learn.model.to(memory_format=torch.channels_last)
    strides = [p.stride() for p in learn.model.parameters()]
    with speed_up(learn): learn.fit(1)
    assert [p.stride() for p in learn.model.parameters()]==strides and isinstance(learn.opt, FusedOptimizer)


# ---- what a network needs that a step of ours can't give

def fitted(model, change=None):
    "A Learner after two epochs, and what `change` made of it before them"
    set_seed(0)
    learn = Learner(get_dls('synthetic', bs=64, loader='resident', device='cpu', size=28, n_channels=1, max_images=400), model(),
                    loss_func=CrossEntropyLossFlat(), opt_func=SGD)
    done = change(learn) if change else None
    with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2)
    return learn, done

def test_bf16_is_refused_where_fp16_is_on():
    done = SpeedUp(learner(False, cbs=[MixedPrecision(amp_mode='fp16')]))
    done.device = torch.device('cuda')
    done.mix('bf16')
    assert done.to_df()[['on', 'why']].values.tolist()==[[False, 'The Learner trains in fp16.']]

@pytest.mark.parametrize('capability', [(7, 5), (8, 0)])
def test_bf16_only_where_the_card_has_it(monkeypatch, capability):
    from gpubench.show.gain import find_ways
    from gpubench.run.trial import Trial, resolve
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: capability)
    has_it = capability>=(8, 0)
    learn = learner(False)
    learn.dls._device = torch.device('cuda')   # without moving images there
    offered = [o.name for o in find_ways(learn)]
    assert any('bf16' in o for o in offered)==has_it and 'speed_up(learn)' in offered
    for device in ('cuda', 'cuda:0'):
        if has_it: resolve(Trial(device=device, precision='bf16'))
        else:
            with pytest.raises(ValueError, match="Use precision='fp16'"): resolve(Trial(device=device, precision='bf16'))
        resolve(Trial(device=device, precision='fp16'))
    resolve(Trial(device='cpu', precision='bf16'))

def test_sparse_gradients_are_not_fused():
    def model(): return nn.Sequential(nn.Flatten(), Tokens(), nn.Linear(16, 10))
    with pytest.warns(UserWarning, match='sparse gradients'): fast, done = fitted(model, speed_up)
    stock, _ = fitted(model)
    torch.testing.assert_close(fast.recorder.losses, stock.recorder.losses, rtol=1e-4, atol=1e-5)
    row = done.to_df().set_index('part').loc['fused step']
    assert not row.on and 'sparse gradients' in row.why

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(2, 16, sparse=True)
    def forward(self, x): return self.embedding((x[:, :50]>0).long()).mean(1)

def test_a_gradient_of_one_channel_lies_as_its_weight_does():
    weight = nn.Parameter(torch.empty_strided((4, 1, 3, 3), (9, 1, 3, 1)).fill_(1.))
    weight.grad = torch.empty_strided((4, 1, 3, 3), (9, 9, 3, 1)).fill_(1.)
    opt = fused_adam([weight], lr=.1)
    opt.step()
    assert optim.step_in_lists(opt, recipe_of(opt)) and (weight<1).all()


@pytest.mark.parametrize('dtype', [torch.float16, torch.float64])
def test_the_fused_step_is_for_float32(dtype):
    with pytest.raises(ValueError, match=f"there are parameters in {str(dtype)[6:]}"): fuse(Adam([nn.Parameter(torch.zeros(2, dtype=dtype))], lr=1e-3))

@pytest.fixture(params=['the parts', 'all'])
def new_tf32_switches(request):
    "As set by a user who follows PyTorch's advice; its old switches can't be read then"
    b = torch.backends
    matmul, convolutions = b.cuda.matmul, {'the parts': b.cudnn.conv, 'all': b}[request.param]
    before = convolutions.fp32_precision
    matmul.fp32_precision, convolutions.fp32_precision = 'tf32', 'ieee' if request.param=='the parts' else 'tf32'
    with pytest.raises(RuntimeError): matmul.allow_tf32
    yield True, request.param!='the parts'
    convolutions.fp32_precision, matmul.allow_tf32, b.cudnn.allow_tf32 = before, False, True

def test_the_new_switches_of_tf32(new_tf32_switches):
    def now(): return tuple(map(allows_tf32, (torch.backends.cuda.matmul, torch.backends.cudnn)))
    learn = learner(True)
    learn.fit(2)
    assert learn.graphed_step.n_replays and not learn.graphed_step.why_not
    machine = describe_machine('cpu')
    assert (machine['tf32_matmul'], machine['tf32_cudnn'])==now()==new_tf32_switches
    kept = inherited()
    with tf32_set('ieee'): assert now()==(False, False) and torch.backends.cudnn.conv.fp32_precision=='ieee'
    assert now()==new_tf32_switches
    torch.backends.cuda.matmul.allow_tf32 = False
    adopt_switches(kept)
    assert now()==new_tf32_switches


def test_each_shape_is_compiled_however_many_there_are():
    learn = learner(True)
    learn.fit(1)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(torch, 'compile', partial(torch.compile, backend='eager'))
        for n in range(1, 11):
            learn.xb, learn.yb = (torch.rand(n, 1, 8, 8),), (torch.zeros(n, dtype=torch.long),)
            step = capture.Step(learn, capture.Copied(learn.xb, learn.yb), {}, compile=True)
            assert step.net(*learn.xb).shape==(n, 10)


@pytest.mark.filterwarnings('ignore')
def test_a_step_is_compiled_once_for_a_network_and_a_shape(tmp_path, compiler_counts):
    learn = learner(True, path=tmp_path, model=without_dropout)
    learn.graphed_step.compile = True
    learn.fit(1)
    n = len(compiler_counts)
    learn.save('here')
    learn.fit(1)
    learn.load('here')
    learn.fit(2)
    learn.graphed_step.release()
    learn.fit(1)
    assert len(compiler_counts)==n>0 and learn.graphed_step.why_not==''

@pytest.fixture
def compiler_counts(compiler, monkeypatch):
    "What was compiled, by a backend that leaves it as it is"
    seen = []
    def backend(graph, _):
        seen.append(graph)
        return graph.forward
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend=backend))
    return seen

def test_four_shapes_of_a_fit_get_a_graph():
    learn = learner(True, splitter=params)
    class Cuts(Callback):
        order, graph_safe = -10, True
        def before_batch(self): self.learn.xb, self.learn.yb = ((o[0][:3+self.iter],) for o in (self.xb, self.yb))
    with pytest.warns(UserWarning, match='more than 4 shapes') as caught: learn.fit(6, cbs=Cuts())
    assert sum('shapes' in str(o.message) for o in caught)==1
    cb = learn.graphed_step
    assert cb.n_graphs==4 and not cb.why_not
    learn.fit(4)                                     # a new fit has room again, for its one shape
    assert (cb.n_graphs, cb.n_done)==(1, 4*len(learn.dls.train)-1-1)

def test_graphs_of_earlier_loaders_are_given_back():
    learn = learner(True, gathered=True)
    for _ in range(6):
        learn.dls = learner(False).dls
        learn.fit(1)
    assert 0<len(learn.graphed_step.steps)<=graphed.MAX_SHAPES and learn.graphed_step.n_replays==(5-4)+5*(5-2)


def test_the_table_names_those_who_want_each_loss():
    learn = learner(False)
    done = SpeedUp(learn)
    done.defer_losses()
    def row(): return done.to_df().set_index('part').loc['recorder']
    assert row().on
    learn.fit(1, cbs=TerminateOnNaNCallback())
    assert not row().on and 'terminate_on_na_n may need each loss' in row().why
    learn.fit(1)
    assert row().on
    learn.recorder.train_metrics = True
    learn.fit(1)
    assert not row().on and 'Metrics of the training' in row().why

def test_pixels_on_the_host_of_a_gpu_are_named():
    train = SimpleNamespace(dataset=SimpleNamespace(x=torch.zeros(1)))
    done = SpeedUp(SimpleNamespace(dls=SimpleNamespace(device='cuda', train=train)))
    done.feed()
    assert done.to_df().on.tolist()==[False]

class OwnDL(TfmdDL): "May rely on its batch size"

@pytest.mark.parametrize('valid', [lambda dl: dl.new(bs=5, drop_last=True), lambda dl: OwnDL(list(range(8)), bs=4), lambda dl: [1, 2]],
                         ids=['drops the rest', 'own', 'no loader'])
def test_a_loader_that_may_rely_on_its_batch_size_keeps_it(valid):
    dls = get_dls('digits', bs=32, loader='resident', device='cpu', max_images=410, size=8)
    dls.loaders[1] = valid(dls.valid)
    done, before = SpeedUp(Learner(dls, nn.Linear(1, 1))), getattr(dls.valid, 'bs', None)
    done.enlarge_validation()
    assert done.rows==[] and getattr(dls.valid, 'bs', None)==before


# ---- what a try, a change by the user, or an undo must not do

def test_undo_goes_on_without_the_recorder_and_after_an_error():
    learn = learner(False)
    learn.remove_cb(learn.fuse)
    def fail(): raise ZeroDivisionError
    done = SpeedUp(learn)
    done.fuse_step()
    done.defer_losses()
    learn.remove_cb(learn.recorder)
    done.undos.callback(fail)
    with pytest.raises(ZeroDivisionError): done.undo()
    assert not any(isinstance(o, FusedStepCallback) for o in learn.cbs) and 'recorder' not in vars(learn)
    done.undo()


class Scale(Callback):
    "Takes part in each step"
    def after_backward(self): torch._foreach_mul_([p.grad for p in self.model.parameters()], .1)
def set_own_step(learn):
    step = learn._step
    learn._step = wraps(step)(lambda: (learn.opt.set_hypers(lr=1e-4), step()))

JOINING = dict(
    stranger=([], lambda learn: learn.add_cb(Scale())),
    clip=([], lambda learn: learn.add_cb(GradientClip(.01))),
    no_clip=([GradientClip], lambda learn: learn.remove_cbs(GradientClip)),
    own_step=([], set_own_step))

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('case', JOINING)
def test_who_comes_or_leaves_within_a_fit_is_noticed(case, tmp_path):
    kinds, change = JOINING[case]
    def cbs(): return [At('before_train', lambda cb: change(cb.learn) if cb.epoch==1 else None), *[o(.01) for o in kinds]]
    compare(lambda learn: learn.fit(3, 1e-2), tmp_path, assert_close, cbs=cbs, opt_func=partial(SGD, mom=.9))


def test_a_validation_is_no_fit(tmp_path):
    learn = learner(True, path=tmp_path)
    learn.fit(2, 1e-2)
    n = learn.graphed_step.n_done
    learn.validate()
    assert learn.graphed_step.n_done==n>0


class ReadStateCallback(Callback):
    graph_safe = True
    def after_batch(self): self.learn.opt.state

def test_steps_are_counted_whoever_reads_them():
    ours, without = (learner(True, cbs=cbs) for cbs in ([ReadStateCallback()], []))
    for o in (ours, without):
        with o.no_bar(), o.no_logging(): o.fit(2)
    assert ours.graphed_step.n_replays==without.graphed_step.n_replays>0
    assert [o['step'] for o in ours.opt.state.values()]==[o['step'] for o in without.opt.state.values()]
