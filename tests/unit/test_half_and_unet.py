"""What a captured step also does: fp16 with its scale and its skipped steps, and networks that hold hooks, as U-Nets do"""
import fastai.callback.fp16
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.hook import hook_outputs
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.layers import ConvLayer
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import TensorImage, TensorMask, set_seed
from fastai.vision.models.unet import DynamicUnet
from gpubench.step import graphed
from gpubench.step.capture import TapeCapture
from gpubench.step.layout import ChannelsLastCallback
from gpubench.step.fast import GraphedStepCallback, defer
from gpubench.data.loaders import get_dls
from on_tape import FuseCallback, autocast  # noqa: F401 (a fixture)
from torch import nn

DEVICES = ['cpu', *['cuda']*torch.cuda.is_available()]
pytestmark = pytest.mark.usefixtures('one_thread')

class Scales(Callback):
    "What fastai counts: the scale of each step that wasn't skipped, and the steps of the optimizer"
    graph_safe = True
    def before_fit(self): self.epochs = []
    def after_epoch(self):
        steps = {int(o['step']) for o in self.learn.opt.state.values()}
        scale = float(self.learn.scaler.get_scale())
        self.epochs.append(([float(o) for o in self.learn.mixed_precision.scales], steps, scale))

def quiet(learn):
    learn.remove_cb(learn.progress)
    learn.logger = lambda *args: None
    return learn

def step_callback(how, device):
    return FuseCallback() if how=='eager' else GraphedStepCallback(capture=TapeCapture() if device=='cpu' else None)

def half(how, device, cbs):
    set_seed(0)
    dls = get_dls('digits', bs=16, loader='resident', device=device, max_images=230, size=8)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    scale = MixedPrecision(init_scale=2.**19, growth_interval=3)         # too large at first, and after each growth
    learn = quiet(Learner(dls, net, loss_func=CrossEntropyLossFlat(), cbs=[step_callback(how, device), scale, Scales(), *cbs()]))
    if how=='gathered': defer(learn.recorder)
    set_seed(1)
    learn.dls.train.rng.seed(1)
    learn.fit_one_cycle(3, 1e-2)
    return learn

@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('how', ['captured', 'gathered'])
@pytest.mark.parametrize('cbs', [lambda: [], lambda: [GradientClip(.1)], lambda: [GradientAccumulation(40)]], ids=['plain', 'clip', 'accumulate'])
def test_fp16_scales_skips_and_counts_as_fastai_does(autocast, monkeypatch, device, how, cbs):
    if device=='cpu': monkeypatch.setattr(fastai.callback.fp16, 'GradScaler', lambda _, **kwargs: torch.amp.GradScaler('cpu', **kwargs))
    a, b = half('eager', device, cbs), half(how, device, cbs)
    assert b.graphed_step.why_not=='' and b.graphed_step.n_done>10
    seen, n_steps = a.scales.epochs, len(a.recorder.lrs)
    assert seen==b.scales.epochs and 0<len(seen[-1][0])<n_steps       # some were skipped
    for x,y in zip(a.model.parameters(), b.model.parameters()): torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-4)
    assert a.recorder.values[-1][1]==pytest.approx(b.recorder.values[-1][1], rel=1e-2)

class Interrupted(Callback):
    "Ends a fit between the check of the second batch's gradients, which finds an infinite one, and fp16's new scale"
    graph_safe = True
    def before_batch(self):
        if not self.training or self.iter!=1: return
        self.plan = self.learn.opt.plan()
        torch.nn.utils.clip_grad_norm_ = self.interrupt
    def interrupt(self, *args):
        self.plan.skip.fill_(1.)
        raise KeyboardInterrupt

def test_an_interrupted_step_leaves_no_later_one_skipped(autocast, monkeypatch):
    monkeypatch.setattr(fastai.callback.fp16, 'GradScaler', lambda _, **kwargs: torch.amp.GradScaler('cpu', **kwargs))
    monkeypatch.setattr(torch.nn.utils, 'clip_grad_norm_', torch.nn.utils.clip_grad_norm_)     # and put back
    cb = Interrupted()
    with pytest.raises(KeyboardInterrupt): half('captured', 'cpu', lambda: [GradientClip(.1), cb])
    assert cb.plan.skip==0

def test_a_step_is_skipped_as_well_where_its_capture_failed(autocast, monkeypatch):
    def scaler(_, **kwargs): return torch.amp.GradScaler('cpu', **kwargs | dict(init_scale=2.**24))    # the first are skipped
    monkeypatch.setattr(fastai.callback.fp16, 'GradScaler', scaler)
    monkeypatch.setattr(graphed, 'N_WARM_UP', 1)
    def fail(self, step): raise RuntimeError('not today')
    monkeypatch.setattr(TapeCapture, 'record', fail)
    with pytest.warns(UserWarning, match='not today'): learn = half('captured', 'cpu', lambda: [])
    assert learn.scales.epochs==half('eager', 'cpu', lambda: []).scales.epochs
    assert all(o.isfinite().all() for o in learn.model.parameters())

def unet(how, device, cbs=()):
    set_seed(0)
    items = [(TensorImage(torch.rand(1, 16, 16)), TensorMask((torch.rand(16, 16)>.5).long())) for _ in range(40)]
    dls = DataLoaders.from_dsets(items, items[:8], bs=8, device=torch.device(device), num_workers=0)
    encoder = nn.Sequential(ConvLayer(1, 4, stride=2), ConvLayer(4, 8, stride=2))
    net = DynamicUnet(encoder, 2, (16, 16)).to(device)
    learn = quiet(Learner(dls, net, loss_func=CrossEntropyLossFlat(axis=1), cbs=[step_callback(how, device), *cbs]))
    set_seed(1)
    learn.dls.train.rng.seed(1)
    return learn

@pytest.mark.parametrize('device', DEVICES)
def test_a_u_net_is_captured_with_its_own_hooks(device):
    a, b = (unet(how, device) for how in ('eager', 'captured'))
    for o in a, b: o.fit(2, 1e-3)
    assert b.graphed_step.why_not=='' and b.graphed_step.n_done==6
    for x,y in zip(a.model.parameters(), b.model.parameters()): torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(torch.stack([*a.recorder.losses]), torch.stack([*b.recorder.losses]), rtol=1e-4, atol=1e-6)

def test_an_activation_of_a_u_nets_last_step_is_no_obstacle_to_channels_last():
    learn = unet('captured', 'cpu', [ChannelsLastCallback()])
    learn.lr_find(num_it=20, show_plot=False)                   # which validates nothing at its end
    learn.fit(1, 1e-3)
    assert (learn.channels_last.why_not, learn.channels_last.n_done)==('', 5)

@pytest.mark.parametrize('hook', [
    lambda model: hook_outputs([model.layers[0]]), lambda model: model.layers[0].register_forward_hook(lambda *args: None)], ids=['fastai', 'torch'])
def test_a_users_hook_on_a_u_net_keeps_its_steps_eager(hook):
    learn = unet('captured', 'cpu')
    kept = hook(learn.model)        # noqa: F841 (it acts as long as it lives)
    with pytest.warns(UserWarning, match='has hooks'): learn.fit(1, 1e-3)
    assert learn.graphed_step.n_done==0
