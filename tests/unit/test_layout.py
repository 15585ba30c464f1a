"""Layouts on a CPU: a training in them is a stock training, and whoever looks sees what a stock training shows."""
import random
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.core import Callback, CancelBatchException, CancelFitException
from fastai.callback.hook import ActivationStats, hook_output
from fastai.callback.mixup import MixUp
from fastai.learner import Learner, load_learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
from torch import nn

from gpubench.data.loaders import get_dls
from gpubench.step.fast import SpeedUp, speed_up
from gpubench.run.models import get_model


pytestmark = pytest.mark.usefixtures('one_thread')


class At(Callback):
    "Calls a function at an event of training; nobody knows what it does"
    def __init__(self, event, do): setattr(self, event, lambda: do(self) if self.training or event!='before_batch' else None)

def pooled(): return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True),
                                   nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
def learner(model=pooled, cbs=(), make=Learner, loss_func=None, size=12, bs=16, **kwargs):
    "4 training batches an epoch"
    set_seed(0)
    dls = get_dls('synthetic', bs=bs, loader='resident', device='cpu', size=size, n_channels=1, max_images=80)
    learn = make(dls, model(), loss_func=loss_func or CrossEntropyLossFlat(), cbs=[o() if isinstance(o, type) else o for o in cbs], **kwargs)
    learn.remove_cb(learn.progress)
    learn.logger = lambda *args: None
    return learn
def in_channels_last(learn):
    done = SpeedUp(learn)
    done.order_channels()
    return done
def rows(done): return done.to_df().set_index('part')
def fitted(change=None, n_epoch=2, **kwargs):
    "A Learner after a training, and what `change` made of it before it"
    learn = learner(**kwargs)
    done = change(learn) if change else None
    set_seed(1)
    learn.dls.train.rng.seed(1)
    learn.fit(n_epoch, 1e-2)
    return learn, done
def assert_close(a, b, exact=False):
    tolerance = dict(rtol=0, atol=0) if exact else dict(rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(list(a.recorder.losses), list(b.recorder.losses), **tolerance)
    a_all, b_all = (torch.cat([p.detach().flatten() for p in (*o.model.parameters(), *o.model.buffers())]) for o in (a, b))
    assert (a_all-b_all).norm()<=(0 if exact else .01*a_all.norm())         # Adam makes a step of a gradient of 1e-9, too
    torch.testing.assert_close(torch.tensor([o[:2] for o in a.recorder.values]), torch.tensor([o[:2] for o in b.recorder.values]), **tolerance)
def seen(model): return [(n, p.stride()) for n,p in model.named_parameters()], repr(model), [sorted(vars(o)) for o in model.modules()]


class Viewed(nn.Module):
    "The classic: a `view` after a convolution"
    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(1, 4, 3), nn.Linear(400, 10)
    def forward(self, x): return self.linear((x := self.conv(x)).view(len(x), -1))

class Residual(nn.Module):
    "What a ResNet does: norms in training, a sum, ReLUs in place"
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    def forward(self, x):
        x = self.relu(self.a(x))
        return self.head(self.relu(self.norm(self.b(x))+x))

class View(nn.Module):
    def forward(self, x): return x.view(len(x), -1)


# ---- the same training, and a table that counts

@pytest.mark.parametrize('model', [pooled, partial(get_model, 'lenet', n_in=1), Residual])
def test_training_in_layouts_is_a_stock_training(model):
    (stock, _), (fast, done) = fitted(model=model, size=28), fitted(speed_up, model=model, size=28)
    assert '; 8 times in the last fit' in rows(done).why['channels_last']
    assert_close(stock, fast)

def test_validation_is_no_fit():
    learn, done = fitted(speed_up)
    learn.validate()
    learn.get_preds()
    assert '8 times' in rows(done).why['channels_last']

def test_a_first_batch_that_is_cancelled_counts_as_others_do():
    def cancel(cb):
        if not cb.iter: raise CancelBatchException()
    _, done = fitted(in_channels_last, cbs=[At('before_batch', cancel)])
    assert '6 times' in rows(done).why['channels_last']

# ---- somebody else's turn

class LateCallback(Callback):
    order = 1000
    def before_batch(self): self.learn.xb = (self.xb[0].view(-1, 1, 12, 12),)
class RowsCallback(Callback):
    order = -5
    def before_batch(self): self.learn.xb = (self.xb[0].flatten(1),)
def test_a_callback_that_makes_images_of_rows_is_no_obstacle():
    (stock, _), (fast, done) = (fitted(o, cbs=[RowsCallback, LateCallback]) for o in (None, speed_up))
    assert_close(stock, fast)
    assert rows(done).on['channels_last']

def test_fastais_own_channels_last_stays():
    done = in_channels_last(learner(cbs=[ChannelsLast]))
    assert rows(done).why['channels_last']=='The Learner has it already'

class InPlace(nn.Sequential):
    "Normalizes its input where it is"
    def forward(self, x): return super().forward(x.sub_(.5).div_(.25))

@pytest.mark.parametrize('change', [in_channels_last, speed_up])
def test_a_try_leaves_the_batch_of_a_network_that_changes_its_input(change):
    (stock, _), (fast, _) = (fitted(o, model=lambda: InPlace(*pooled())) for o in (None, change))
    assert_close(fast, stock)

def swap_for_view(cb): cb.model[6] = View()
@pytest.mark.parametrize('event, when', [('before_epoch', lambda cb: cb.epoch==1), ('before_train', lambda cb: cb.epoch==1),
    ('before_batch', lambda cb: cb.iter==2), ('after_batch', lambda cb: cb.training and cb.iter==1), ('before_validate', lambda cb: True)])
def test_a_layer_that_is_exchanged_for_a_view_trains_as_stock(event, when):
    def model(): return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Identity(), nn.Identity(), nn.Identity(), nn.Flatten(),
                                      nn.Linear(256, 10))
    def go(change): return fitted(change, model=model, cbs=[At(event, lambda cb: swap_for_view(cb) if when(cb) else None)])
    (stock, _), (fast, done) = go(None), go(in_channels_last)
    assert_close(stock, fast)
    assert 'view' in rows(done).why.iloc[0] and all(p.is_contiguous() for p in fast.model.parameters())

@pytest.mark.parametrize('event', ['before_train', 'after_batch', 'before_batch'])
def test_a_hook_that_comes_later_sees_a_stock_pass(event):
    def go(change):
        found = []
        def hook(m, x, out): found.append((out.stride(), out.shape))
        def add(cb):
            if cb.epoch==1 and not cb.model[1]._forward_hooks: cb.model[1].register_forward_hook(hook)
        learn, done = fitted(change, cbs=[At(event, add)])
        return learn, done, found
    (stock, _, a), (fast, done, b) = go(None), go(in_channels_last)
    assert_close(stock, fast)
    assert a==b and len(a)>3 and 'A hook watches' in rows(done).why.iloc[0]
    assert fast.model[1]._forward_hooks.clear() is None
    fast.fit(1)
    assert '4 times in the last fit' in rows(done).why.iloc[0] and 'hook' not in rows(done).why.iloc[0]

def test_statistics_of_a_relu_are_those_of_a_stock_training():
    def go(fast):
        learn = learner()
        with speed_up(learn) if fast else nullcontext() as done:
            stats = ActivationStats(include_paramless=True)
            learn.fit(1, cbs=stats)
            with hook_output(learn.model[1]) as h: learn.model(torch.ones(1, 1, 12, 12))
        return [[o['mean'] for o in layer] for layer in stats.stats], h.stored.shape, done
    (a, shape, _), (b, fast_shape, done) = go(False), go(True)
    for x,y in zip(a, b, strict=True): torch.testing.assert_close(x, y)
    assert shape==fast_shape==(1, 8, 10, 10)
    assert not rows(done).on['channels_last'] and 'A hook watches' in rows(done).why['channels_last']

class OwnStep(Learner):
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self.loss_grad = self.loss_func(self.pred, *self.yb)
        self.loss = self.loss_grad.clone()
        if self.training:
            self.loss_grad.backward()
            self.opt.step()
            self.opt.zero_grad()
def test_a_learner_with_its_own_step_is_left_alone():
    (stock, _), (fast, done) = (fitted(o, make=OwnStep, metrics=[]) for o in (None, in_channels_last))
    assert torch.equal(*(torch.cat([p.flatten() for p in o.model.parameters()]) for o in (stock, fast)))
    assert not done.to_df().on[0] and 'its own' in done.to_df().why[0]

@pytest.mark.parametrize('change', [in_channels_last, speed_up])
def test_callbacks_see_what_they_see_in_a_stock_training(change):
    def segment(): return nn.Sequential(nn.Conv2d(1, 10, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(10, 10, 3))
    def loss(pred, y): return nn.functional.cross_entropy(pred.mean((2, 3)), y)
    def flat(pred, y): return pred.view(-1).mean()
    def go(change):
        found = []
        def look(cb): found.append((repr(cb.model), *((o.stride(), o.dtype, type(o)) for o in (*cb.xb, cb.pred))))
        learn, done = fitted(change, model=segment, loss_func=loss, metrics=[flat], cbs=[At('after_loss', look), At('after_batch', look)])
        return learn, done, found
    (stock, _, a), (fast, done, b) = go(None), go(change)
    assert a==b and len(a)>8 and rows(done).on.iloc[0]
    assert_close(stock, fast)

def test_mixup_trains_in_layouts():
    def go(change):
        np.random.seed(0)
        return fitted(change, cbs=[MixUp()])
    (stock, _), (fast, done) = go(None), go(speed_up)
    assert_close(stock, fast)
    assert rows(done).on['channels_last']


# ---- what doesn't run in a layout

class InEvaluation(nn.Sequential):
    def forward(self, x): return self[1](self[0](x).flatten(1) if self.training else self[0](x).view(len(x), -1))
def dice(pred, y): return 1-(pred.view(-1)*nn.functional.one_hot(y, 10)[..., None, None].expand(-1, -1, *pred.shape[2:]).reshape(-1)).mean()
@pytest.mark.parametrize('model, loss', [(lambda: nn.Sequential(nn.Conv2d(1, 10, 3), nn.Sigmoid()), dice), (Viewed, None),
    (lambda: InEvaluation(nn.Conv2d(1, 4, 3), nn.Linear(400, 10)), None)])
def test_what_needs_the_usual_order_gets_it(model, loss):
    (stock, _), (fast, done) = (fitted(o, model=model, loss_func=loss) for o in (None, in_channels_last))
    assert_close(stock, fast, exact=True)
    assert not done.to_df().on[0] and "doesn't run in channels_last: view size" in done.to_df().why[0]

class Counts(Residual):
    "Draws on the host, also from a generator of its own, keeps a list, and has a buffer that it replaces"
    def __init__(self):
        super().__init__()
        self.n_calls, self.rng, self.sizes = 0, random.Random(0), []
        self.register_buffer('n', torch.zeros(()))
    def forward(self, x):
        self.n_calls += 1
        self.sizes.append((len(x), self.rng.random()))
        if self.training: self.n, self.drawn = self.n+1, (random.random(), np.random.rand(), torch.rand(1).item())
        return super().forward(x)
@pytest.mark.parametrize('cbs', [[], [At('before_batch', lambda cb: None)]])
def test_a_try_leaves_no_trace(cbs):
    def go(change):
        random.seed(0)
        np.random.seed(0)
        return fitted(change, model=Counts, cbs=cbs)
    (stock, _), (fast, done) = go(None), go(speed_up)
    assert rows(done).on['channels_last']
    assert stock.model.n==fast.model.n==8 and stock.model.drawn==fast.model.drawn and stock.model.n_calls==fast.model.n_calls
    assert stock.model.sizes==fast.model.sizes
    assert_close(stock, fast)


# ---- afterwards, everything is the user's own

class StopError(Exception): pass
class Fails(nn.Module):
    n, error = 0, StopError
    def forward(self, x):
        if self.training and len(x)>2: Fails.n += 1
        if Fails.n==3: raise self.error('early')
        return x

@pytest.mark.parametrize('error', [StopError, KeyboardInterrupt, CancelFitException])
@pytest.mark.parametrize('event', ['before_epoch', 'before_batch', 'after_pred', 'after_batch', 'forward'])
def test_after_a_fit_that_ended_early_the_model_is_as_before(event, error):
    learn = learner(model=lambda: pooled().append(Fails()) if event=='forward' else pooled())
    Fails.n, Fails.error = 0, error
    before = seen(learn.model)
    done = speed_up(learn)
    def fail(cb):
        if not hasattr(cb, 'iter') or not cb.training or cb.iter==2 or 'epoch' in event: raise error('early')
    with pytest.raises(error) if error is not CancelFitException else nullcontext():
        learn.fit(2, cbs=[] if event=='forward' else At(event, fail))
    Fails.n = 10
    for o in list(learn.cbs): learn.remove_cb(o) if type(o) is At else None
    learn.fit(1)
    assert rows(done).on['channels_last'], rows(done).why.tolist()
    done.undo()
    assert seen(learn.model)==before and '_do_fit' not in vars(learn)

def test_a_single_image_is_predicted_before_any_fit():
    learn = learner()
    speed_up(learn)
    assert len(learn.get_preds(dl=learn.dls.test_dl([np.zeros((12, 12), np.uint8)]))[0])==1

def test_a_network_that_was_replaced_is_left_as_it_came():
    learn = learner()
    old_seen = seen(learn.model)
    with speed_up(learn) as done:
        learn.fit(1)
        old, learn.model = learn.model, pooled()
        learn.create_opt()
        new_seen = seen(learn.model)
        learn.fit(1)
        assert '4 times' in rows(done).why['channels_last']
    assert seen(learn.model)==new_seen and seen(old)==old_seen
    assert all(p.is_contiguous() and p.grad.is_contiguous() for p in learn.model.parameters())

def test_a_layout_that_the_user_chose_stays():
    learn = learner()
    learn.model[0].to(memory_format=torch.channels_last)
    learn.model[3].weight.data = learn.model[3].weight.data.clone(memory_format=torch.channels_last)
    before = seen(learn.model)
    with speed_up(learn): learn.fit(1)
    assert seen(learn.model)==before

@pytest.mark.parametrize('event', ['before_epoch', 'before_batch'])
def test_weights_that_are_exchanged_or_frozen_in_a_fit_train_as_stock(event):
    def exchange(cb):
        if cb.epoch==1 and not getattr(cb, 'is_done', False):
            cb.is_done = True
            cb.model[3].weight.data = cb.model[3].weight.data*.5
            cb.model[0].weight.requires_grad_(False)
    (stock, _), (fast, done) = (fitted(o, cbs=[At(event, exchange)]) for o in (None, speed_up))
    assert_close(stock, fast)
    done.undo()
    for a,b in zip(stock.model.parameters(), fast.model.parameters()): assert a.stride()==b.stride()

@pytest.mark.filterwarnings('ignore')
def test_copies_and_exports_are_plain_fastai(tmp_path):
    learn = learner(path=tmp_path)
    done = speed_up(learn)
    learn.fit(1)
    copied = deepcopy(learn)
    learn.export('x.pkl')
    loaded = load_learner(tmp_path/'x.pkl')
    for o in (copied, loaded):
        assert not any(type(cb).__module__.startswith('gpubench.step.layout') for cb in o.cbs)
    copied.fit(1)
    again = speed_up(copied)
    copied.fit(1)
    assert rows(again).on['channels_last'] and len(copied.recorder.losses)==4
    learn.fit(1)
    assert rows(done).on['channels_last']

def test_callbacks_may_leave_in_the_middle_of_a_fit():
    learn = learner()
    before, done = seen(learn.model), speed_up(learn)
    learn.fit(2, cbs=At('after_epoch', lambda cb: done.undo() if cb.epoch==0 else None))
    assert seen(learn.model)==before and '_do_fit' not in vars(learn)

