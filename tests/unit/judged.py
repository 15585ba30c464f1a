"""What `judge` is asked about: an honest training of half a second, and changes of it that cheat or don't"""
from itertools import repeat
from time import sleep

import torch
from fastai.basics import Callback, DataLoaders, Learner
from fastai.data.core import TfmdDL
from fastai.vision.augment import RandTransform
from torch import nn

from gpubench.run.models import get_model
from gpubench.run.observed import AutocastCallback

class Squares:
    "Noise of which a quarter is brighter, and which one"
    n_inp = 1
    def __init__(self, first, n, size, split_idx): self.first, self.n, self.size, self.split_idx = first, n, size, split_idx
    def __len__(self): return self.n
    def __getitem__(self, i):
        x = torch.rand((1, self.size, self.size), generator=torch.Generator().manual_seed(self.first+i))
        y, half = i%4, self.size//2
        x[:, half*(y//2):half*(y//2)+half, half*(y%2):half*(y%2)+half] += .5
        return x, torch.tensor(y)

class Shift(RandTransform):
    "Adds a little to all pixels of a batch"
    def encodes(self, x:torch.Tensor): return x+.1*torch.randn(1) if x.is_floating_point() else x

class SlowCallback(Callback):
    "Waits at each step"
    def __init__(self, seconds=.03): self.seconds = seconds
    def after_batch(self): sleep(self.seconds*self.training)

def loaders(n=320, n_valid=80, bs=32, size=16, tfms=(Shift,), drop_last=False, kind=TfmdDL):
    def dl(*rows, kind=TfmdDL, **kwargs):
        return kind(Squares(*rows), after_batch=[o() for o in tfms], num_workers=0, **kwargs)
    return DataLoaders(dl(0, n, size, 0, kind=kind, bs=bs, shuffle=True, drop_last=drop_last),
                       dl(1000, n_valid, size, 1, bs=80), device='cpu')

def learner(dls=None, cbs=(), model=None):
    model = model or get_model('lenet', n_classes=4, n_in=1)
    return Learner(dls or loaders(), model, loss_func=nn.CrossEntropyLoss(), lr=.01, cbs=cbs)

def before(seed): return learner(cbs=SlowCallback())


# honest

def faster(seed): return learner()
def very_slow(seed): return learner(cbs=SlowCallback(.2))
def crashes(seed): raise ValueError('no such file')


# cheats

class RepeatDL(TfmdDL):
    "Trains the first batch again and again"
    def create_batches(self, samps): return repeat_first(super().create_batches(samps), len(self))

def repeat_first(batches, n): return repeat(next(iter(batches)), n)

def short_epoch(seed): return learner(loaders(n=160))
def drops_last(seed): return learner(loaders(bs=256, drop_last=True))
def repeats_a_batch(seed): return learner(loaders(kind=RepeatDL))
def small_images(seed): return learner(loaders(size=12))
def no_augmentation(seed): return learner(loaders(tfms=()))
def half_validation(seed): return learner(loaders(n_valid=40))
def frozen(seed):
    model = get_model('lenet', n_classes=4, n_in=1)
    next(model.children()).requires_grad_(False)
    return learner(model=model)
def bf16(seed): return learner(cbs=AutocastCallback())
def tf32(seed):
    torch.backends.cuda.matmul.allow_tf32 = True
    return learner()

class CachedLearner(Learner):
    "Validates once, and reports that again"
    def _do_epoch_validate(self, *args, **kwargs):
        if self.epoch==0: super()._do_epoch_validate(*args, **kwargs)
        else: self('before_validate'), self('after_validate')

def cached_validation(seed):
    return CachedLearner(loaders(), get_model('lenet', n_classes=4, n_in=1), loss_func=nn.CrossEntropyLoss(), lr=.01)

class Remembers(nn.Module):
    "Remembers what it predicted in its first validation"
    def __init__(self):
        super().__init__()
        self.body, self.known = get_model('lenet', n_classes=4, n_in=1), None
    def forward(self, x):
        if self.training: return self.body(x)
        if self.known is None: self.known = self.body(x)
        return self.known

def cached_predictions(seed): return learner(model=Remembers())
def before_in_body(seed): # honest: the same network in a module
    return learner(model=type('Body', (Remembers,), dict(forward=lambda self, x: self.body(x)))(), cbs=SlowCallback())

def returns_early(seed): # the device is still busy
    from gpubench.show import judge
    judge.wait_for = lambda device: sleep(1.5)
    return learner()

def works_in_make(seed):
    sleep(1.5)   # such as decoding all images
    return learner()

def trained(): # a finished training
    learn = learner()
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(4)
    return learn
def trained_in_make(seed): return learner(model=trained().model)
def loads_weights(learn):
    learn.fit_one_cycle(2)
    learn.model.load_state_dict(trained().model.state_dict())

def lucky_seed(seed):
    torch.manual_seed(3)
    return learner()
