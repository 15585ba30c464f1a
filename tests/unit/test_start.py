"""What a sped-up fit does at its start, and when it decides to do more: cuDNN's search and compiled kernels. Clocks are fake."""

import pytest
import torch
from fastai.callback.core import Callback
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
from torch import nn

from gpubench.step import fast, payback
from gpubench.step.capture import EpochStep, Step, TapeCapture
from gpubench.data.loaders import get_dls
from gpubench.step.fast import DeferredRecorder, GraphedStepCallback, KernelSearch, SpeedUp, speed_up, swap_recorder
from on_tape import Broken, compiler  # noqa: F401 (a fixture)


pytestmark = pytest.mark.usefixtures('one_thread')


class Watched(nn.Sequential):
    "Notes whether cuDNN may search in each forward pass in Python"
    seen = []
    def forward(self, x):
        self.seen.append((self.training, torch.backends.cudnn.benchmark))
        return super().forward(x)

def network(): return [nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 10)]
def learner(cb, model=nn.Sequential, bs=32):
    set_seed(0)
    dls = get_dls('digits', bs=bs, loader='resident', device='cpu', max_images=230, size=8)
    learn = Learner(dls, model(*network()), cbs=cb, loss_func=CrossEntropyLossFlat())
    learn.remove_cb(learn.progress)
    learn.logger = lambda *args: None
    return learn


@pytest.mark.parametrize('is_small, is_long', [(True, True), (False, True), (True, False)])
def test_cudnn_searches_in_the_first_batches_of_a_small_shape_that_a_long_fit_brings(is_small, is_long, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, 'benchmark', False)
    monkeypatch.setattr(payback, 'MAX_SEARCH_PIXELS', 32*8*8-(not is_small))
    monkeypatch.setattr(payback, 'SEARCH_S', 15*payback.SMALL_STEP_S*payback.SEARCH_SAVES*(.9 if is_long else 1.1))
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
    monkeypatch.setattr(payback, 'SEARCH_S', 0)
    learn.fit(1, 1e-2)
    assert done.to_df().on[0] and '1 times in the last fit' in done.to_df().why[0]
    again = SpeedUp(learn)
    assert again.search_kernels() is None and 'has it already' in again.to_df().why[0]


class FakeTime:
    "Seconds that pass in each replay, in each batch that is fetched, and when something is compiled"
    def __init__(self, monkeypatch, replay_s=.1, share=.7, batch_s=0., compile_s=2.):
        self.now, step_call, run, compiles = 0., Step.__call__, EpochStep.run, torch.compile
        def spend(step, n=1): self.now += n*replay_s*(share if step.compile else 1)
        def call(step, *args):
            spend(step)
            return step_call(step, *args)
        def run_all(step, first, last, *args):
            spend(step, last-first)
            return run(step, first, last, *args)
        def compiled(*args, **kwargs):
            self.now += compile_s
            return compiles(*args, **kwargs)
        monkeypatch.setattr(Step, '__call__', call)
        monkeypatch.setattr(EpochStep, 'run', run_all)
        monkeypatch.setattr(torch, 'compile', compiled)
        self.batch_s = batch_s
    def __call__(self): return self.now

class SlowLoader(Callback):
    graph_safe = 'counts'
    def __init__(self, time): self.time = time
    def before_batch(self): self.time.now += self.time.batch_s*self.training
class EpochsCallback(Callback):
    "Whether each epoch ended with compiled kernels"
    order, graph_safe = 99, 'counts'
    def before_fit(self): self.compiled = []
    def after_train(self): self.compiled.append(self.learn.graphed_step.compile)

def fitted(monkeypatch, n_epoch=4, gathered=False, compile='auto', cbs=(), model=nn.Sequential, **kwargs):
    time = FakeTime(monkeypatch, **kwargs)
    learn = learner([GraphedStepCallback(compile, capture=TapeCapture(), clock=time), EpochsCallback(), *cbs], model, bs=20)
    if gathered: swap_recorder(learn, DeferredRecorder())
    elif time.batch_s: learn.add_cb(SlowLoader(time))
    set_seed(1)
    learn.dls.train.rng.seed(1)
    learn.fit(n_epoch, 1e-2)
    return learn

@pytest.mark.parametrize('gathered', [False, True])
@pytest.mark.parametrize('n_epoch, kwargs, compiled', [
    (4, {}, [False, True, True, True]), (3, {}, [False]*3), (4, dict(share=1.1), [False, True, False, False]), (1, dict(replay_s=1e3), [False])])
def test_kernels_are_compiled_before_the_first_epoch_from_which_they_pay(n_epoch, kwargs, compiled, gathered, compiler, monkeypatch):
    monkeypatch.setattr(payback, 'COMPILE_S', .2)                        # 27 steps save .405 s, more than 1.5 times as much; 18 steps .27
    learn = fitted(monkeypatch, n_epoch, gathered, **kwargs)
    graph = learn.graphed_step
    assert learn.epochs.compiled==compiled and graph.why_not=='' and graph.n_replays>=3*(n_epoch-1)
    is_kept = compiled[-1]
    assert ('were compiled' in graph.payback.why, 'given up' in graph.payback.why)==(is_kept, any(compiled) and not is_kept)
    assert bool(graph.payback.result)==is_kept

def test_nothing_is_compiled_while_the_device_waits_for_the_loader(compiler, monkeypatch):
    with monkeypatch.context() as mp: learn = fitted(mp, 9, batch_s=.02, replay_s=100.)
    assert any(learn.epochs.compiled)                                  # a wait of .02 s in 100
    with monkeypatch.context() as mp: learn = fitted(mp, 9, batch_s=20., replay_s=100.)
    assert not any(learn.epochs.compiled) and 'a faster step saves nothing' in learn.graphed_step.payback.why

@pytest.mark.parametrize('kwargs, n', [({}, 1), (dict(batch_s=20.), 3)])
def test_a_replay_is_timed_until_it_is_clear_that_the_fit_is_too_short(kwargs, n, compiler, monkeypatch):
    timed, time = [], payback.Payback.time
    monkeypatch.setattr(payback.Payback, 'time', lambda self, *args: timed.append(time(self, *args)))
    assert not any(fitted(monkeypatch, 3, **kwargs).epochs.compiled) and len(timed)==n

@pytest.mark.parametrize('gathered', [False, True])
def test_a_fit_whose_kernels_are_compiled_midway_trains_the_same(gathered, compiler, monkeypatch):
    monkeypatch.setattr(payback, 'COMPILE_S', .2)
    with monkeypatch.context() as mp: auto = fitted(mp, gathered=gathered)
    with monkeypatch.context() as mp: eager = fitted(mp, gathered=gathered, compile=False)
    assert any(auto.epochs.compiled) and not any(eager.epochs.compiled)
    for a,b in zip(auto.model.parameters(), eager.model.parameters(), strict=True): torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    losses = [torch.stack(list(o.recorder.losses)) for o in (auto, eager)]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-5)

@pytest.mark.parametrize('gathered', [False, True])
def test_where_compiling_fails_the_graph_of_pytorchs_kernels_comes_back(gathered, compiler, monkeypatch):
    monkeypatch.setattr(payback, 'COMPILE_S', .2)
    learn = fitted(monkeypatch, gathered=gathered, model=Broken)
    graph = learn.graphed_step
    assert graph.why_not=='' and "can't be compiled" in graph.payback.why and graph.payback.result==''
    assert learn.epochs.compiled==[False]*4 and graph.n_replays>=9
    learn.fit(3, 1e-2)
    assert graph.why_not=='' and "can't be compiled" in graph.payback.why

def test_a_refused_compiled_graph_leaves_the_other_one(compiler, monkeypatch):
    monkeypatch.setattr(payback, 'COMPILE_S', .2)
    record = TapeCapture.record
    def refuse(self, step):
        if learn and learn[0].graphed_step.compile: raise RuntimeError('No.')
        return record(self, step)
    learn = []
    class Find(Callback):
        graph_safe = 'counts'
        def before_fit(self): learn.append(self.learn)
    monkeypatch.setattr(TapeCapture, 'record', refuse)
    graph = fitted(monkeypatch, cbs=[Find()]).graphed_step
    assert graph.why_not=='' and 'RuntimeError: No.' in graph.payback.why and graph.n_replays>=9

def test_the_table_has_what_was_expected_and_what_came(compiler, monkeypatch):
    monkeypatch.setattr(payback, 'COMPILE_S', .2)
    learn = fitted(monkeypatch)
    done = SpeedUp(learn)
    done.has('CUDA graph', GraphedStepCallback)
    assert 'Kernels were compiled, for some 0.2 s to save 0.405 s in the rest of the fit' in done.to_df().why[0]
    assert 'a step takes 0.70 of its time' in done.to_df().why[0]

@pytest.mark.parametrize('compile', ['always', None, 2])
def test_compile_is_true_false_or_auto(compile):
    with pytest.raises(ValueError, match="True, False or 'auto'"): GraphedStepCallback(compile)
    with pytest.raises(ValueError, match="True, False or 'auto'"): speed_up(learner([]), compile=compile)
