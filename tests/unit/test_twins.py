"One copy of a training: equal at first, trains alike, and leaves the original's weights and files alone"
import copy
import random
import threading
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import torch.utils.data as tud
from fastai.callback.core import Callback, CancelValidException
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.hook import ActivationStats, hook_outputs
from fastai.callback.mixup import MixUp
from fastai.callback.progress import CSVLogger
from fastai.callback.tracker import ReduceLROnPlateau, SaveModelCallback, TerminateOnNaNCallback
from fastai.callback.training import GradientAccumulation, ShortEpochCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner, Metric
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.optimizer import Adam, OptimWrapper, ranger
from fastai.tabular.all import Categorify, Normalize, TabularDataLoaders, tabular_learner
from fastai.torch_core import Module, params
from fastai.vision.gan import GANLearner, basic_critic, basic_generator
from fastai.vision.models.unet import DynamicUnet
from fastcore.foundation import L
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from gpubench.run.twins import Twins, copy_training
from gpubench.step.fast import EMACallback, speed_up
from gpubench.watch.timing import StepTimerCallback

KINDS = {}      # name -> makes a Learner
def kind(f): KINDS[f.__name__] = f


# ---- what Learners are made of

def pairs(n=32):
    x, y = torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(n)%4
    return [*zip(x+y[:, None, None, None], y)]

def loaders(make=DataLoader, data=pairs, **kwargs): return DataLoaders(*(make(data(), **kwargs) for _ in range(2)))
torch_loaders = partial(loaders, tud.DataLoader, batch_size=8)

def net(dropout=.3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(dropout), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))

def learner(tmp, model=None, dls=None, **kwargs):
    tmp.mkdir(exist_ok=True)
    dls = dls or DataLoaders.from_dsets(pairs(), pairs(16), bs=8, num_workers=0, device='cpu')
    return Learner(dls, model or net(), path=tmp, **dict(loss_func=CrossEntropyLossFlat(), metrics=accuracy, lr=.01) | kwargs)

def fit(learn, n_epoch=1, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, **kwargs)
    return learn

def penalty_of(m): return .1*sum(o.pow(2).sum() for o in m.parameters())


# ---- after everyday calls

@kind
def new(tmp): return learner(tmp)
@kind
def after_a_fit(tmp): return fit(learner(tmp))
@kind
def after_lr_find(tmp):
    learn = learner(tmp)
    with learn.no_bar(): learn.lr_find(num_it=6, show_plot=False)
    return learn
@kind
def after_nan(tmp): return fit(learner(tmp, cbs=TerminateOnNaNCallback(), lr=1e30))
@kind
def short_epochs(tmp): return fit(learner(tmp, cbs=ShortEpochCallback(.3)))
@kind
def after_a_first_batch(tmp):
    learn = learner(tmp)
    next(iter(learn.dls.train))
    return learn
@kind
def without_validation(tmp):
    class SkipsCallback(Callback):
        def before_validate(self): raise CancelValidException()
    return fit(learner(tmp, cbs=SkipsCallback()))
@kind
def without_validation_set(tmp): return fit(learner(tmp, dls=DataLoaders.from_dsets(pairs(), [], bs=8, num_workers=0, device='cpu')))
@kind
def gradients_left_over(tmp): return fit(learner(tmp, cbs=GradientAccumulation(20)))

class InterruptCallback(Callback):
    order = 100
    def __init__(self, event): self.event = event
    def __call__(self, event):
        if event==self.event and self.learn.train_iter==2: raise KeyboardInterrupt

def interrupted(tmp, event, *cbs, prepare=None):
    learn = learner(tmp, cbs=[*cbs])
    if prepare: prepare(learn)
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=InterruptCallback(event))    # with its progress bar
    while torch.is_autocast_enabled('cuda'): torch.set_autocast_enabled('cuda', False)
    return learn

for event in ('after_pred', 'before_step', 'after_step', 'after_batch'): KINDS[f'interrupted {event}'] = partial(interrupted, event=event)
for cb in (ActivationStats, MixedPrecision, SaveModelCallback, StepTimerCallback):
    KINDS[f'interrupted {cb.__name__}'] = lambda tmp, cb=cb: interrupted(tmp, 'after_loss', cb())
KINDS['interrupted speed_up'] = lambda tmp: interrupted(tmp, 'after_loss', prepare=speed_up)


# ---- loaders and data sets

@kind
def plain_loaders(tmp): return fit(learner(tmp, dls=loaders(bs=8, shuffle=True)))
@kind
def torchs_loaders(tmp): return fit(learner(tmp, dls=torch_loaders(shuffle=True, generator=torch.Generator().manual_seed(2))))
@kind
def persistent_workers(tmp): # a reused iterator draws nothing, a new one does: so no dropout and no shuffling
    return fit(learner(tmp, net(0), torch_loaders(num_workers=1, persistent_workers=True)))
@kind
def lists_of_batches(tmp): return fit(learner(tmp, dls=DataLoaders(*map(list, torch_loaders()))))

class AroundDL:
    "A loader of the user's around PyTorch's"
    def __init__(self, dl): self.dl = dl
    def __len__(self): return len(self.dl)
    def __iter__(self): return ((1.1*x, y) for x,y in self.dl)
@kind
def own_loaders(tmp): return fit(learner(tmp, net(0), DataLoaders(*map(AroundDL, torch_loaders(num_workers=1, persistent_workers=True)))))

class NoisySet:
    "Has a generator and a count of its own"
    def __init__(self, items): self.items, self.rng, self.n = items, np.random.default_rng(0), 0
    def __len__(self): return len(self.items)
    def __getitem__(self, i):
        self.n += 1
        x, y = self.items[i]
        return x+float(self.rng.normal())+.001*self.n, y
@kind
def noisy_sets(tmp): return fit(learner(tmp, dls=loaders(data=lambda: NoisySet(pairs()), bs=8)))
@kind
def noisy_subsets(tmp):
    def data(): return tud.ConcatDataset([tud.Subset(NoisySet(pairs()), range(24))]*2)
    return fit(learner(tmp, dls=torch_loaders(data=data, shuffle=True)))

class StreamSet(tud.IterableDataset):
    "Shuffles its list in place"
    def __init__(self): self.items = pairs()
    def __len__(self): return len(self.items)
    def __iter__(self):
        random.shuffle(self.items)
        yield from self.items
for name,make in dict(torchs=torch_loaders, fastais=partial(loaders, bs=8)).items():
    KINDS[f'{name} streams'] = lambda tmp, make=make: fit(learner(tmp, dls=make(data=StreamSet)))
@kind
def data_from_the_network(tmp):
    model = net()
    class Seen(NoisySet):
        def __getitem__(self, i): return self.items[i][0]+model[0].weight.mean().item(), self.items[i][1]
    return fit(learner(tmp, model, loaders(data=lambda: Seen(pairs()), bs=8)))
@kind
def tabular(tmp):
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(a=rng.choice([*'xyz'], 60), b=rng.normal(size=60), y=rng.choice([*'np'], 60)))
    dls = TabularDataLoaders.from_df(df, tmp, procs=[Categorify, Normalize], cat_names=['a'], cont_names=['b'], y_names='y', bs=8)
    return fit(tabular_learner(dls, layers=[8]))


# ---- losses, hooks, callbacks, methods that hold the network

@kind
def loss_by_closure(tmp):
    model, n = net(), 0
    def loss(pred, y):
        nonlocal n
        n += 1
        return n*F.cross_entropy(pred, y)+penalty_of(model)
    return fit(learner(tmp, model, loss_func=loss))
@kind
def loss_by_defaults(tmp):
    model = net()
    def loss(pred, y, m=model, *, n=[0]):
        n[0] += 1
        return n[0]*F.cross_entropy(pred, y)+penalty_of(m)
    return fit(learner(tmp, model, loss_func=loss))

class PenaltyLoss:
    def __init__(self, model): self.model = model
    def __call__(self, pred, y): return F.cross_entropy(pred, y)+penalty_of(self.model)
@kind
def loss_object(tmp):
    model = net()
    return fit(learner(tmp, model, loss_func=PenaltyLoss(model)))

held = None     # as in a notebook, a network or a Learner
def penalty(): return penalty_of(held)
def loss_by_name(pred, y): return F.cross_entropy(pred, y)+penalty()
class LossByName:
    def __call__(self, pred, y): return F.cross_entropy(pred, y)+sum(o.pow(2).sum() for o in held.parameters())
class ModuleByName(Module):     # has a metaclass
    def __init__(self): self.scale = nn.Parameter(torch.ones(4))
    def forward(self, pred, y): return F.cross_entropy(pred*self.scale, y)+penalty()
class SavesByName(Callback):
    graph_safe = True
    def after_epoch(self): held.save('last')

def named(tmp, loss):
    global held
    held = net()
    return fit(learner(tmp, held, loss_func=loss))
for loss in (lambda: loss_by_name, LossByName, ModuleByName): KINDS[f'loss by name {len(KINDS)}'] = lambda tmp, loss=loss: named(tmp, loss())
@kind
def callback_by_name(tmp):
    global held
    held = learner(tmp, cbs=SavesByName())
    return fit(held)
@kind
def local_classes(tmp):
    model = net()
    class LocalLoss:
        def __call__(self, pred, y): return F.cross_entropy(pred, y)+penalty_of(model)
    class LocalCallback(Callback):
        def after_epoch(self): learn.opt.set_hyper('lr', .5*learn.opt.hypers[0]['lr']), learn.save('last')
    learn = learner(tmp, model, loss_func=LocalLoss(), cbs=LocalCallback())
    return fit(learn)
@kind
def function_as_callback(tmp):
    seen = []
    def after_loss(self):
        seen.append(1)
        self.learn.loss_grad *= 1+.1*len(seen)
    return fit(learner(tmp, cbs=Callback(after_loss=after_loss)))
@kind
def own_step(tmp):
    learn = learner(tmp)
    step = learn._step
    def smaller(): learn.opt.set_hyper('lr', .9*learn.opt.hypers[0]['lr']), step()
    learn._step = smaller
    return fit(learn)
@kind
def own_optimizer(tmp):
    model = net()
    return learner(tmp, model, opt_func=lambda ps, lr: Adam(params(model), lr=lr), splitter=lambda _: params(model[-1:]))
@kind
def hooks(tmp):
    model, kept = net(), []
    model[0].register_forward_hook(lambda m, x, out: out*(1+model[-1].bias.abs().sum()))
    model[2].register_forward_pre_hook(lambda m, x: setattr(m, 'kept', x[0]))
    model[-1].register_full_backward_hook(lambda m, gi, go: kept.append(len(kept)))
    model[0].weight.register_hook(lambda g: g.clamp(-.01, .01)+model[-1].bias.sum().detach())
    model[-1].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, 'grad', .5*p.grad))
    return fit(learner(tmp, model))
@kind
def hook_of_frozen_weights(tmp):
    model = net()
    for p in model.parameters(): p.register_hook(lambda g: g*(1+model[-1].bias.abs().sum().detach()))
    learn = learner(tmp, model, splitter=lambda m: [params(m[:3]), params(m[3:])])
    learn.freeze()
    return fit(learn)
@kind
def own_forward(tmp):
    model = net()
    forward = model.forward
    model.forward = lambda x: forward(x)*(1+model[-1].bias.abs().sum())
    return fit(learner(tmp, model))
@kind
def parents(tmp):
    model = net()
    model[0].parent, model[0].weak, model.libraries = [model], weakref.ref(model), [np, F]
    model[0].register_forward_hook(lambda m, x, out: out*(1+m.weak()[-1].bias.abs().sum()+m.parent[0][-1].bias.sum()))
    learn = learner(tmp, model)
    model.learn = learn
    return fit(learn)
@kind
def metric_of_weights(tmp):
    model = net()
    return fit(learner(tmp, model, metrics=lambda pred, y: model[0].weight.mean()))


# ---- networks, callbacks, optimizers

class CountingNet(nn.Module):
    "Has counts, a list and a generator of its own"
    def __init__(self):
        super().__init__()
        self.body, self.n, self.seen, self.generator = net(), 0, [], torch.Generator().manual_seed(3)
    def forward(self, x):
        self.n += self.training
        self.seen.append(len(x))
        return self.body(x)/(1+.1*self.n)+.1*torch.randn(4, generator=self.generator)+.1*random.random()*len(self.seen)
@kind
def counting_net(tmp): return fit(learner(tmp, CountingNet()))
for norm in (weight_norm, spectral_norm, parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal):
    def normed(tmp, norm=norm):
        model = net()
        model[-1] = norm(model[-1])
        return fit(learner(tmp, model))
    KINDS[f'{norm.__module__}.{norm.__name__}'] = normed
for name,wrap in dict(compiled=partial(torch.compile, backend='eager'), parallel=nn.DataParallel).items():
    KINDS[name] = lambda tmp, wrap=wrap: fit(learner(tmp, wrap(net())))
@kind
def lazy(tmp):
    model = net()
    model[-1] = nn.LazyLinear(4)
    model(torch.zeros(2, 3, 8, 8))
    return learner(tmp, model)
@kind
def unet(tmp):
    data = [(x, (x[0]>0).long()) for x,_ in pairs()]
    torch.manual_seed(0)
    model = DynamicUnet(nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 8, 3, 2, 1)), 2, (8, 8))
    return fit(learner(tmp, model, loaders(data=lambda: data, bs=8), loss_func=CrossEntropyLossFlat(axis=1), metrics=None))
@kind
def gan(tmp):
    torch.manual_seed(0)
    data = [(torch.randn(4), torch.randn(1, 16, 16)) for _ in range(16)]
    dls = DataLoaders.from_dsets(data, data, bs=4, num_workers=0, device='cpu')
    return fit(GANLearner.wgan(dls, basic_generator(16, n_channels=1, in_sz=4), basic_critic(16, n_channels=1), path=tmp, opt_func=partial(Adam, mom=0.)))

class FeaturesCallback(Callback):
    "Keeps the activations of a layer"
    def before_fit(self): self.hooks = hook_outputs([self.model[0]])
    def after_pred(self): self.learn.pred = self.pred*(1+self.hooks.stored[0].mean())
    def after_fit(self): self.hooks.remove()
class SchedulerCallback(Callback):
    "Has a schedule of PyTorch's, which changes the optimizer's step"
    def before_fit(self):
        if not hasattr(self, 'steps'): self.steps = torch.optim.lr_scheduler.StepLR(self.opt.opt, 3, .5)
    def after_step(self): self.steps.step()
class SavesCallback(Callback):
    def after_epoch(self): self.learn.save('last')
class MeanMetric(Metric):
    "Never forgets"
    total, name, value = 0., 'mean', property(lambda self: self.total)
    def reset(self): self.total += 1
    def accumulate(self, learn): self.total += float(learn.pred.mean())

torchs_sgd = partial(OptimWrapper, opt=torch.optim.SGD)
WITH = dict( # arguments of a Learner
    stats=dict(cbs=lambda: ActivationStats(with_hist=True)), csv=dict(cbs=CSVLogger), saves=dict(cbs=SavesCallback),
    saves_best=dict(cbs=lambda: [SaveModelCallback(with_opt=True), ReduceLROnPlateau(patience=0, min_delta=9.)]),
    mixup=dict(cbs=MixUp), fp16=dict(cbs=MixedPrecision), average=dict(cbs=EMACallback), features=dict(cbs=FeaturesCallback),
    torchs_adamw=dict(opt_func=lambda: partial(OptimWrapper, opt=torch.optim.AdamW)), ranger=dict(opt_func=lambda: ranger),
    scheduler=dict(opt_func=lambda: torchs_sgd, cbs=SchedulerCallback), metric=dict(metrics=MeanMetric))
for name,made in WITH.items(): KINDS[f'with {name}'] = lambda tmp, made=made: fit(learner(tmp, **{k: f() for k,f in made.items()}))
@kind
def saves_elsewhere(tmp): return fit(learner(tmp, cbs=SaveModelCallback(), model_dir=tmp/'elsewhere'))
@kind
def sped_up(tmp):
    learn = learner(tmp)
    speed_up(learn)
    return fit(learn)
class OwnLearner(Learner):
    n_batches = 0
    def _do_one_batch(self):
        self.n_batches += 1
        super()._do_one_batch()
        self.loss_grad = self.loss_grad*self.n_batches
@kind
def own_learner(tmp): return fit(OwnLearner(learner(tmp).dls, net(), loss_func=CrossEntropyLossFlat(), path=tmp))


# ---- the test

def state(learn):
    "Weights, buffers, gradients, and the optimizer's state, with NaN as a number"
    found = [*learn.model.state_dict().values(), *(p.grad for p in learn.model.parameters())]
    if learn.opt: found += [v for *_,kept,hypers in learn.opt.all_params() for v in (*kept.values(), *hypers.values())]
    return [o.detach().clone().nan_to_num(7) if isinstance(o, torch.Tensor) else o for o in found]

def equal(a, b):
    return len(a)==len(b) and all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x==y for x,y in zip(a, b))

def files_in(folder): return {o: o.read_bytes() for o in folder.rglob('*') if o.is_file()}

def trained(learn, seed=4):
    for seed_one in (random.seed, np.random.seed, torch.manual_seed): seed_one(seed)
    with torch.random.fork_rng(): fit(learn, 2)
    return state(learn), str(L(learn.recorder.values))

@pytest.mark.parametrize('name', KINDS)
def test_a_copy_trains_alike_and_leaves_the_original_alone(name, tmp_path):
    learn = KINDS[name](tmp_path/'own')
    before, files, cbs, names = state(learn), files_in(tmp_path/'own'), [*learn.cbs], [*vars(learn)]
    twin, left_out = copy_training(learn, tmp_path/'copy')
    assert not left_out and equal(state(twin), before)
    trained(twin, seed=3)
    assert equal(state(learn), before) and files_in(tmp_path/'own')==files
    assert ([*learn.cbs], [*vars(learn)])==(cbs, names)
    twin, _ = copy_training(learn, tmp_path/'copy')
    weights, values = trained(twin)
    right, right_values = trained(learn)
    assert equal(weights, right) and values==right_values
    assert not equal(right, before) or name=='after_nan'


# ---- what can't be copied

class HoldsCallback(Callback):
    def __init__(self, held): self.held = held

def test_callbacks_that_cannot_be_copied_are_named(tmp_path):
    files = [(tmp_path/o).open('w') for o in ('open.txt', 'closed.txt')]
    files[1].close()
    kinds = [type(f'{o}Callback', (HoldsCallback,), {}) for o in ('File', 'Closed', 'Lock', 'Service', 'Refers')]
    cbs = [k(o) for k,o in zip(kinds, [*files, threading.Lock(), None, None])]
    kinds[3].__module__, cbs[-1].held = 'fastai.callback.wandb', cbs[0]
    learn = learner(tmp_path, cbs=cbs)
    twin, left_out = copy_training(learn, tmp_path/'copy')
    assert left_out==dict(FileCallback=f'{files[0].name} is open', LockCallback="cannot pickle '_thread.lock' object", ServiceCallback='it reports to a service')
    assert [o.name for o in twin.cbs if isinstance(o, HoldsCallback)]==['closed', 'refers'] and not hasattr(twin, 'file')
    assert type(twin.refers.held) is Callback
    fit(twin)

@pytest.mark.parametrize('change,part', [
    (lambda o: setattr(o.model[0], 'lock', threading.Lock()), 'learn.model._modules.0.lock'),
    (lambda o: setattr(o, 'model', torch.jit.script(o.model)), 'learn.model'),
    (lambda o: setattr(o, 'loss_func', partial(F.cross_entropy, weight=(i for i in 'a'))), 'learn.loss_func'),
    (lambda o: setattr(o.dls.train, 'stream', (i for i in 'a')), 'learn.dls.loaders.0.stream'),
    (lambda o: setattr(o, 'notes', dict(log=[1, threading.Lock()])), 'learn.notes.log.1')])
def test_a_part_that_cannot_be_copied_is_named(change, part, tmp_path):
    learn = learner(tmp_path)
    change(learn)
    with pytest.raises(RuntimeError, match=f"can't be copied because of {part} "): copy_training(learn, tmp_path/'copy')

def test_too_little_memory_is_an_error_of_its_own(tmp_path):
    class Large:
        def __deepcopy__(self, memo): raise torch.OutOfMemoryError('CUDA out of memory.')
    for held in ('model', 'cbs'):
        learn = learner(tmp_path)
        if held=='model': learn.model.large = Large()
        else: learn.add_cb(HoldsCallback(Large()))
        with pytest.raises(torch.OutOfMemoryError): copy_training(learn, tmp_path/'copy')

def test_deepcopy_is_itself_again(tmp_path):
    learn, n = learner(tmp_path), [0]
    def f(): return n
    learn.model.lock = threading.Lock()
    with pytest.raises(RuntimeError): copy_training(learn, tmp_path/'copy')
    computed = torch.ones(1, requires_grad=True)*2
    assert copy.deepcopy(f) is f and copy.deepcopy(HoldsCallback) is HoldsCallback
    with pytest.raises(RuntimeError, match='graph leaves'): copy.deepcopy(computed)
    assert not any('__deepcopy__' in vars(o) for o in (DataLoader, tud.DataLoader))

def test_a_data_set_shares_its_arrays(tmp_path):
    x = torch.randn(8, 3, 8, 8)
    data = tud.TensorDataset(x, torch.arange(8)%4)
    data.rows, data.file = np.arange(8), (tmp_path/'data.txt').open('w')
    learn = learner(tmp_path, dls=torch_loaders(data=lambda: tud.Subset(data, range(8))))
    own = copy_training(learn, tmp_path/'copy')[0].dls.train.dataset.dataset
    assert own is not data and own.tensors[0] is x and own.rows is data.rows and own.file is data.file


# ---- twins

def test_twins_save_into_a_folder_that_goes_with_them(tmp_path):
    for source in (learner(tmp_path, cbs=SaveModelCallback()), lambda: learner(tmp_path, cbs=SavesCallback())):
        make = Twins(source)
        twin = fit(make())
        twin.save('weights')
        assert (twin.path/'models'/'weights.pth').exists() and not [*tmp_path.iterdir()]
        del make
        assert not twin.path.exists()
