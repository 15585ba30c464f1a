"One copy of a training: equal at first, trains alike, and leaves the original's weights and files alone"
import copy
import random
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.data as tud
from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.hook import ActivationStats
from fastai.callback.mixup import MixUp
from fastai.callback.progress import CSVLogger
from fastai.callback.tracker import ReduceLROnPlateau, SaveModelCallback, TerminateOnNaNCallback
from fastai.callback.training import ShortEpochCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner, Recorder
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.optimizer import OptimWrapper
from fastai.vision.models.unet import DynamicUnet
from fastcore.foundation import L
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from gpubench.run.twins import Twins, copy_training
from gpubench.step.fast import SpeedUp, speed_up

# ---- what Learners are made of

def pairs(n=32):
    x, y = torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(n)%4
    return [*zip(x+y[:, None, None, None], y)]

def loaders(make=DataLoader, **kwargs): return DataLoaders(*(make(pairs(), **kwargs) for _ in range(2)))
torch_loaders = partial(loaders, tud.DataLoader, batch_size=8)

def net(dropout=.3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(dropout),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))

def learner(model=None, dls=None, valid=16, **kwargs):
    dls = dls or DataLoaders.from_dsets(pairs(), pairs(valid), bs=8, num_workers=0, device='cpu')
    return Learner(dls, model or net(), **dict(loss_func=CrossEntropyLossFlat(), metrics=accuracy, lr=.01) | kwargs)

def fit(learn, n_epoch=1, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, **kwargs)
    return learn

def penalty_of(m): return .1*sum(o.pow(2).sum() for o in m.parameters())

# ---- objects that hold the network

class ObjectLoss:
    def __init__(self, model): self.model = model
    def __call__(self, pred, y): return F.cross_entropy(pred, y)+penalty_of(self.model)

def with_model(change, **kwargs):
    "A Learner whose network or arguments were changed"
    model = net()
    return learner(model, **change(model) or {}, **kwargs)
def hooked(model):
    model[0].register_forward_hook(lambda m, x, out: out*(1+m.bias.abs().sum()))
    model[2].register_forward_pre_hook(lambda m, x: setattr(m, 'kept', x[0]))
def normed(norm, model): model[-1] = norm(model[-1])

class SavesCallback(Callback):
    def after_epoch(self): self.learn.save('last')
def unet():
    data = [(x, (x[0]>0).long()) for x,_ in pairs()]
    model = DynamicUnet(nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 8, 3, 2, 1)), 2, (8, 8))
    return learner(model, DataLoaders(*(DataLoader(data, bs=8) for _ in range(2))), loss_func=CrossEntropyLossFlat(axis=1), metrics=None)
# ---- the table: name -> makes a Learner, which then trains for an epoch

KINDS = dict(
    nan=lambda: learner(cbs=TerminateOnNaNCallback(), lr=1e30), short_epochs=lambda: learner(cbs=ShortEpochCallback(.3)),
    no_validation_set=lambda: learner(valid=0),
    fastais_loaders=lambda: learner(dls=loaders(bs=8, shuffle=True)), one_loader=lambda: learner(dls=DataLoaders(*[DataLoader(pairs(), bs=8)]*2)),
    torchs_loaders=lambda: learner(dls=torch_loaders(shuffle=True, generator=torch.Generator().manual_seed(2))),
    workers=lambda: learner(net(0), torch_loaders(num_workers=1, persistent_workers=True)), # a reused iterator draws nothing
    unet=unet, hooks=lambda: with_model(hooked))
KINDS |= dict(object_loss=lambda: with_model(lambda m: dict(loss_func=ObjectLoss(m))),
              expanded=lambda: with_model(lambda m: m.register_buffer('mask', torch.ones(1).expand(4))))
KINDS |= {f'{o.__module__}.{o.__name__}': lambda o=o: with_model(partial(normed, o)) for o in (weight_norm, parametrizations.weight_norm)}
KINDS |= {o.__name__: lambda o=o: learner(cbs=o()) for o in (CSVLogger, SavesCallback, MixUp)}
KINDS |= dict(
    activation_stats=lambda: learner(cbs=ActivationStats(with_hist=True)),
    saves_best=lambda: learner(cbs=[SaveModelCallback(with_opt=True), ReduceLROnPlateau(patience=0, min_delta=9.)]),
    torchs_adamw=lambda: learner(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)))

class InterruptCallback(Callback):
    order = 100
    def __init__(self, event): self.event = event
    def __call__(self, event):
        if event==self.event and self.learn.train_iter==2: raise KeyboardInterrupt
def interrupted(learn, event='after_loss'):
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=InterruptCallback(event))    # with its progress bar
    while torch.is_autocast_enabled('cuda'): torch.set_autocast_enabled('cuda', False)
def speed_up_and(learn, then): speed_up(learn), then(learn)
def find_lr(learn):
    with learn.no_bar(): learn.lr_find(num_it=6, show_plot=False)
def nothing(learn): pass

HISTORIES = dict(   # what happened to a Learner before it's copied
    nothing=nothing, lr_find=find_lr, first_batch=lambda learn: next(iter(learn.dls.train)),
    frozen=lambda learn: (learn.freeze(), fit(learn)), sped_up=lambda learn: speed_up_and(learn, fit),
    interrupted_speed_up=lambda learn: speed_up_and(learn, interrupted))
EVENTS = 'after_pred', 'after_step'
HISTORIES |= {f'interrupted {o}': partial(interrupted, event=o) for o in EVENTS}
CASES = {k: (make, fit) for k,make in KINDS.items()} | {k: (learner, o) for k,o in HISTORIES.items()}
CASES |= {f'interrupted {o.__name__}': (lambda o=o: learner(cbs=o()), interrupted)
          for o in (MixedPrecision, SaveModelCallback)}

# ---- the test

def state(learn):
    "Weights, buffers, and the optimizer's state, with NaN as a number"
    found = [*learn.model.state_dict().values()]
    if learn.opt: found += [v for *_,kept,hypers in learn.opt.all_params() for v in (*kept.values(), *hypers.values())]
    return [o.detach().clone().nan_to_num(7) if isinstance(o, torch.Tensor) else o for o in found]

def equal(a, b):
    return len(a)==len(b) and all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x==y for x,y in zip(a, b))

def files_in(folder): return {o: o.read_bytes() for o in folder.rglob('*') if o.is_file()}

def trained(learn, seed=4):
    for seed_one in (random.seed, np.random.seed, torch.manual_seed): seed_one(seed)
    with torch.random.fork_rng(): fit(learn)
    return state(learn), str(L(learn.recorder.values))

def end_workers(learn):
    "Of torch's own loaders: the garbage collector would wait 5 s for each"
    for o in learn.dls.loaders:
        if getattr(o, '_iterator', None): o._iterator._shutdown_workers()

@pytest.mark.parametrize('name', CASES)
def test_a_copy_trains_alike_and_leaves_the_original_alone(name, tmp_path):
    make, happen = CASES[name]
    torch.manual_seed(0)
    learn = make()
    learn.path = tmp_path/'own'
    learn.path.mkdir()
    happen(learn)
    learn.model.zero_grad()         # what an interrupt has left isn't copied
    before, files, cbs, names = state(learn), files_in(tmp_path/'own'), [*learn.cbs], [*vars(learn)]
    twins = Twins(learn)
    twin = twins.new()
    assert equal(state(twin), before)
    trained(twin, seed=3)
    assert equal(state(learn), before) and files_in(tmp_path/'own')==files
    assert ([*learn.cbs], [*vars(learn)])==(cbs, names)
    end_workers(twin)
    twin = twins.new()
    weights, values = trained(twin)
    right, right_values = trained(learn)
    assert equal(weights, right) and values==right_values
    assert not equal(right, before) or name=='nan'
    end_workers(learn), end_workers(twin)

# ---- what can't be copied

class HoldsCallback(Callback):
    def __init__(self, held): self.held = held

def test_a_recorder_that_reads_losses_late_has_a_copy():
    learn = fit(learner())
    SpeedUp(learn).defer_losses()
    with Twins(learn).one() as twin: assert type(twin.recorder) is Recorder and len(fit(twin).recorder.losses)==4

def test_a_function_s_learners_may_share_their_loaders():
    dls, path = learner().dls, Path('mine')
    dls.path, before = path, [*dls.loaders]
    with Twins(lambda: learner(dls=dls)).one() as twin:
        twin.dls.train.bs, twin.dls.loaders = 2, twin.dls.loaders[::-1]
        assert fit(twin) and twin.dls.valid.dataset is dls.train.dataset
    assert (dls.path, dls.train.bs, dls.loaders)==(path, 8, before)

def test_what_reports_to_a_service_is_left_out():
    Service = type('ServiceCallback', (HoldsCallback,), dict(__module__='fastai.callback.wandb'))
    def make(): return learner(cbs=[Service(threading.Lock()), HoldsCallback('text')])
    for source in (make(), make):
        twin = Twins(source).new()
        assert [o.name for o in twin.cbs if isinstance(o, HoldsCallback)]==['holds'] and not hasattr(twin, 'service')
        fit(twin)

@pytest.mark.parametrize('part', ['model', 'loss_func', 'dls', 'holds'])
def test_a_part_that_cannot_be_copied_is_named(part):
    learn = learner(loss_func=ObjectLoss(None), cbs=HoldsCallback('text'))
    getattr(learn, part).own_lock = threading.Lock()
    with pytest.raises(RuntimeError, match=f"can't be copied because of learn.{part} "): copy_training(learn)
    computed = torch.ones(1, requires_grad=True)*2
    with pytest.raises(RuntimeError, match='graph leaves'): copy.deepcopy(computed)    # `deepcopy` is itself again

def test_too_little_memory_is_an_error_of_its_own():
    class Large:
        def __deepcopy__(self, memo): raise torch.OutOfMemoryError('CUDA out of memory.')
    learn = learner(loss_func=ObjectLoss(Large()))
    with pytest.raises(torch.OutOfMemoryError): copy_training(learn)

# ---- twins

def test_twins_save_into_a_folder_that_goes_with_them(tmp_path):
    for source in (learner(cbs=SaveModelCallback(), path=tmp_path), lambda: learner(cbs=SavesCallback(), path=tmp_path)):
        make = Twins(source)
        twin = fit(make.new())
        twin.save('weights')
        assert (twin.path/'models'/'weights.pth').exists() and not [*tmp_path.iterdir()]
        del make
        assert not twin.path.exists()

def test_functions_that_hold_the_network_leave_it_as_it_was():
    "Twins share functions, with what these hold"
    model = net()
    forward = model.forward
    model.forward = lambda x: forward(x)*2
    learn = fit(learner(model, loss_func=lambda pred, y: F.cross_entropy(pred, y)+penalty_of(model)))
    before, grads = state(learn), [(o.grad, o.grad.clone()) for o in model.parameters()]
    with Twins(learn).one() as twin: fit(twin)
    assert equal(state(learn), before)
    assert all(p.grad is grad and p.grad.equal(was) for p,(grad,was) in zip(model.parameters(), grads))

def test_a_function_that_takes_arguments_is_refused():
    with pytest.raises(ValueError, match="function without arguments .*missing a required argument: 'seed'"): Twins(lambda seed: learner())
