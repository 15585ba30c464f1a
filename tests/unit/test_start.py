"""What a sped-up fit does at its start, and when it decides to do more: cuDNN's search and compiled kernels. Clocks are fake."""
import pytest
import torch
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
from torch import nn

from gpubench import fast
from gpubench.capture import TapeCapture
from gpubench.data import get_dls
from gpubench.fast import GraphedStepCallback, KernelSearch, SpeedUp


@pytest.fixture(autouse=True, scope='module')
def one_thread():
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


class Watched(nn.Sequential):
    "Notes whether cuDNN may search in each forward pass in Python"
    seen = []
    def forward(self, x):
        self.seen.append((self.training, torch.backends.cudnn.benchmark))
        return super().forward(x)

def network(): return [nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 10)]
def learner(cb, model=nn.Sequential, size=8):
    set_seed(0)
    dls = get_dls('digits', bs=32, loader='resident', device='cpu', max_images=230, size=size)
    learn = Learner(dls, model(*network()), cbs=cb, loss_func=CrossEntropyLossFlat())
    learn.remove_cb(learn.progress)
    learn.logger = lambda *args: None
    return learn


@pytest.mark.parametrize('is_small, is_long', [(True, True), (False, True), (True, False)])
def test_cudnn_searches_in_the_first_batches_of_a_small_shape_that_a_long_fit_brings(is_small, is_long, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, 'benchmark', False)
    monkeypatch.setattr(fast, 'MAX_SEARCH_PIXELS', 32*8*8-(not is_small))
    monkeypatch.setattr(fast, 'SEARCH_S', 15*fast.SMALL_STEP_S*fast.SEARCH_SAVES*(.9 if is_long else 1.1))
    Watched.seen.clear()
    learn = learner(GraphedStepCallback(capture=TapeCapture(), search=KernelSearch()), Watched)
    learn.fit(3, 1e-2)
    pays, search = is_small and is_long, learn.graphed_step.search
    trained = [o for is_training,o in Watched.seen if is_training]
    assert trained[:3]==[pays]*3 and not any(o for is_training,o in Watched.seen if not is_training)
    assert learn.graphed_step.n_replays==9 and not torch.backends.cudnn.benchmark
    assert search.n_done==pays and ('pixels' in search.why_not, 'can save' in search.why_not)==(not is_small, not is_long)

def test_the_row_says_why_there_is_no_search(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, 'benchmark', False)
    monkeypatch.setattr(torch.backends.cudnn, 'deterministic', False)
    monkeypatch.setattr(fast, '_uses_tf32', lambda device: False)                # it asks the GPU
    done = SpeedUp(learn := learner([]))
    search = done.search_kernels()
    learn.add_cb(GraphedStepCallback(capture=TapeCapture(), search=search))
    assert 'from the next fit on' in done.to_df().why[0]
    learn.fit(1, 1e-2)
    row = done.to_df().iloc[0]
    assert not row.on and row.why=='It takes 1.4 s or more, and 5 steps can save 0.0011 s.'
    monkeypatch.setattr(fast, 'SEARCH_S', 0)
    learn.fit(1, 1e-2)
    assert done.to_df().on[0] and '1 times in the last fit' in done.to_df().why[0]
    again = SpeedUp(learn)
    assert again.search_kernels() is None and 'has it already' in again.to_df().why[0]
