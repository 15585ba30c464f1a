"""What tests of captured steps share: they run on a CPU, where a tape repeats a step's operations"""
from functools import partial, wraps

import pytest
import torch
from fastai.callback.core import Callback, TrainEvalCallback
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpubench.step import capture, optim


def on_cpu(request):
    "Is the test, or its case, for a CPU?"
    return getattr(request.node, 'callspec', None) is None or request.node.callspec.params.get('device', 'cpu')=='cpu'

@pytest.fixture
def autocast(request, monkeypatch):
    "Lets `autocast('cuda')`, which turns itself off where there is no GPU, round on a CPU"
    init = torch.autocast.__init__
    def rounds(self, device_type, *args, **kwargs): init(self, 'cpu', *args, **kwargs)
    if on_cpu(request): monkeypatch.setattr(torch.autocast, '__init__', wraps(init)(rounds))

@pytest.fixture
def compiler(request, monkeypatch):
    "Lets a tape on a CPU record what is compiled: Dynamo's graph, forward and backward, run by PyTorch's own kernels"
    torch._dynamo.reset()                            # it compiles one function for eight cases at most
    if not on_cpu(request): return
    if not hasattr(TorchDispatchMode, 'ignore_compile_internals'): pytest.skip('This torch runs nothing compiled on a tape.')
    monkeypatch.setattr(capture._Tape, 'ignore_compile_internals', classmethod(lambda cls: True))
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend='aot_eager'))


def step_as_captured(opt, recipe=None): # Was it done? `step_in_lists` says so, too
    optim.Update(opt.plan()).step()
    return True

class FuseCallback(Callback):
    "The eager side: the same optimizer and the same arithmetic, without a graph"
    order = TrainEvalCallback.order
    def before_fit(self):
        if self.learn.opt is None: return            # a validation
        opt = optim.fuse(self.learn.opt)
        opt.step = partial(step_as_captured, opt)

class Broken(nn.Sequential):
    "Python that a compiler can't follow"
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)
