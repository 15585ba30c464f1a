"Trials on XLA. What needs torch_xla is skipped without it; CONTRIBUTING shows how to run it on a CPU"
import os
import sys
from time import perf_counter
from types import SimpleNamespace

import pytest
import torch
from fastai.basics import Learner, SGD
from fastai.losses import CrossEntropyLossFlat

from gpubench.ground import core
from gpubench.ground.core import pick_device, wait_for
from gpubench.data.loaders import get_dls
from gpubench.step.fast import speed_up
from gpubench.course.labs import plan_jobs
from gpubench.run.models import get_model
from gpubench.run.sweep import sweep
from gpubench.watch.timing import StepTimerCallback
from gpubench.run.trial import Trial, make_learner, resolve, run_trial, warm_up

small = dict(max_images=600, bs=128)

@pytest.fixture(scope='module')
def xla():
    os.environ.setdefault('PJRT_DEVICE', 'CPU')
    return pytest.importorskip('torch_xla')

@pytest.fixture
def named_xla(monkeypatch): # as if torch_xla were there, for what is refused before it is used
    monkeypatch.setattr(core, '_import_xla', lambda: True)

@pytest.mark.parametrize('ask', [
    lambda: pick_device('xla'), lambda: wait_for('xla'), lambda: run_trial(device='xla'), lambda: get_dls(device='xla'),
    lambda: sweep(dict(device=['xla'])), lambda: plan_jobs([], device='xla')], ids='pick wait run dls sweep labs'.split())
def test_without_torch_xla_one_sentence_says_how_to_get_it(ask, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch_xla', None)
    with pytest.raises(ValueError) as e: ask()
    text = str(e.value)
    assert 'pip install torch==2.9.0 torchvision==0.24.0 torch_xla==2.9.0' in text and text.endswith('.')
    assert '. ' not in text and '\n' not in text

@pytest.mark.parametrize('setting', [
    dict(speed_up='all'), dict(speed_up='fused'), dict(pin_memory=True), dict(sync_bn=True), dict(n_devices=2), dict(accumulate=2),
    dict(loader='resident'), dict(precision='tf32'), dict(precision='fp16')], ids=str)
def test_settings_that_xla_lacks_are_refused(setting, named_xla):
    [(name, value)] = setting.items()
    with pytest.raises(ValueError, match=f'{name}={value!r} .* Use {name}='): resolve(Trial(device='xla', **setting))

def test_other_ways_in_are_refused(named_xla):
    with pytest.raises(ValueError, match='labs run on'): plan_jobs([], device='xla')
    learn = Learner(get_dls(device='cpu'), get_model('lenet', n_in=1))
    learn.dls = SimpleNamespace(device=torch.device('xla'))
    with pytest.raises(ValueError, match='speed_up is for'): speed_up(learn)

@pytest.mark.slow
def test_a_trial_trains_as_on_the_cpu(xla):
    a, b = (run_trial(device=o, **small, max_s=1.) for o in ('cpu', 'xla'))
    assert b['status']=='ok' and b['xla']==xla.__version__ and a['xla'] is None and a['machine']!=b['machine']
    for o in ('loss', 'valid_loss'): assert a[o]==pytest.approx(b[o], abs=1e-3)
    assert a['accuracy']==pytest.approx(b['accuracy'], abs=.02)
    assert a['graph_ms'] is None and b['graph_ms']>b['forward_ms']+b['backward_ms']    # the work is where it is waited for
    assert b['peak_allocated_mib'] is None and b['dtype_seen']=='float32'

@pytest.mark.slow
def test_nothing_is_compiled_once_it_is_timed(xla):
    from torch_xla.debug.metrics import counter_value
    trial = resolve(Trial(device='xla', max_images=600, bs=96))          # shapes that no other test has compiled
    learn = make_learner(trial)
    with learn.no_bar(), learn.no_logging():
        warm_up(learn, trial, StepTimerCallback(clock=lambda: 100*perf_counter()))       # however long compiling takes
        before = counter_value('UncachedCompile')
        learn.fit(2, lr=trial.lr, cbs=StepTimerCallback())
    assert before and counter_value('UncachedCompile')==before

def test_lazy_times_are_refused(xla):
    dls = get_dls('digits', device='xla', **small)
    learn = Learner(dls, get_model('lenet', n_in=1), loss_func=CrossEntropyLossFlat(), opt_func=SGD)
    with learn.no_bar(), learn.no_logging():
        with pytest.raises(RuntimeError, match='Add SyncStepCallback'): learn.fit(1, cbs=StepTimerCallback())
