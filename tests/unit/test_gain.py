"""What `gain` answers for Learners with planted faults, and what it leaves behind; delays are planted with wide margins"""
import gc
from functools import partial
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from time import sleep
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from fastai.callback.core import Callback, CancelFitException, CancelTrainException, CancelValidException
from fastai.callback.tracker import SaveModelCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.layers import ConvLayer
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.test_utils import synth_learner
from fastai.vision.augment import Resize
from fastai.vision.data import ImageDataLoaders
from fastai.vision.learner import vision_learner
from torch import nn
from torchvision.models import resnet18
import gpubench.show.gain
from gpubench import gain
from gpubench.data.loaders import get_dls
from gpubench.data.made import draw_birds
from gpubench.run.forecast import FitTimes, PartTimes
from gpubench.run.memory import GPU_8GB_BYTES
from gpubench.run.remedies import Remedy, parts, remedies, sped_up
from gpubench.ground.core import StateError
from gpubench.show.gain import Gain, Way, predicted, visit

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')

def slow_tfm(x):
    "Takes 30 ms for each image"
    sleep(.03)
    return x

class SleepsCallback(Callback):
    "Sleeps 30 ms after each training batch"
    def after_batch(self): sleep(.03*self.training)

def photos(item_tfms=(), device='cpu', n_workers=0):
    return ImageDataLoaders.from_folder(draw_birds(80), valid_pct=.2, bs=8, item_tfms=[Resize(32), *item_tfms], num_workers=n_workers, device=device)

def small_cnn(dls, **kwargs):
    net = nn.Sequential(ConvLayer(3, 8, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, dls.c))
    return Learner(dls, net, loss_func=CrossEntropyLossFlat(), metrics=accuracy, **kwargs)

@pytest.fixture(autouse=True)
def short(monkeypatch): monkeypatch.setattr(gpubench.show.gain, 'TIMES_S', dict(cpu=(.5, .3), cuda=(.5, .3)))

@pytest.mark.slow
def test_a_slow_transform_is_named():
    found = gain(small_cnn(photos([slow_tfm])), 2)
    assert 'wait for data' in found.reason() and 'slow_tfm' in found.reason()
    assert predicted(found.stock, found.noise).mid>2*80*.03

def test_a_slow_callback_is_named_and_the_learner_stays_as_it_was():
    learn = synth_learner(n_trn=20, cbs=SleepsCallback())
    before = {k: v.clone() for k,v in learn.model.state_dict().items()}
    cbs, random_state = [*learn.cbs], torch.get_rng_state()
    found = gain(learn, 3, 'fit')
    assert 'without SleepsCallback' in found.reason() and found.now.what.str.contains('SleepsCallback').any()
    assert [*learn.cbs]==cbs and type(learn.cbs[-1]) in (SleepsCallback, *map(type, cbs))
    assert all(torch.equal(v, before[k]) for k,v in learn.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)

@pytest.mark.slow
def test_both_fits_of_fine_tune_count():
    learn = vision_learner(photos(), resnet18, pretrained=False, metrics=accuracy)
    found = gain(learn, 2, 'fine_tune')
    assert [o.n_epochs for o in found.stock.visits[0]]==[1, 2]
    found.apply()
    with learn.no_bar(), learn.no_logging(): learn.fine_tune(2)
    assert [n for n,_ in found.got_cb.fits]==[1, 2]
    assert found.got[1]==sum(s for _,s in found.got_cb.fits)
    record = found.as_dict()
    assert [o['got_s'] for o in record['fits']]==[found.got[1]] and record['n_missed'] in (0, 1)

def test_after_too_little_memory_it_explains(monkeypatch):
    def out_of_memory(*args, **kwargs): raise torch.cuda.OutOfMemoryError('CUDA out of memory.')
    monkeypatch.setattr(gpubench.show.gain, 'glance', out_of_memory)
    with pytest.raises(RuntimeError, match='^A training step with a batch of 8 needs about'): gain(small_cnn(photos()), 1)
    monkeypatch.setattr('gpubench.run.twins.copy_training', out_of_memory)
    with pytest.raises(RuntimeError, match='^There is no room for a copy'): gain(small_cnn(photos()), 1)

def test_an_error_of_the_users_code_comes_through():
    class RaisesCallback(Callback):
        def after_loss(self): raise KeyError('of the user')
    with pytest.raises(KeyError, match='of the user'): gain(synth_learner(cbs=RaisesCallback()), 1, 'fit')

def test_images_in_memory_need_neither_workers_nor_decoding(monkeypatch):
    monkeypatch.setattr('gpubench.run.remedies.n_cores', lambda: 8)
    def about_data(dls): return [o.name for o in remedies(small_cnn(dls)) if o.about=='data']
    assert about_data(photos())==['8 workers instead of 0', 'images decoded once']
    assert not about_data(get_dls('digits', max_images=64, bs=8, loader='resident', device='cpu'))

@pytest.mark.slow
def test_a_remedy_that_fails_is_a_row_of_the_table():
    class TeacherCallback(Callback): pass
    class AsksCallback(Callback):
        def before_batch(self): self.learn.teacher
    found = gain(synth_learner(cbs=[TeacherCallback(), AsksCallback()]), 1, 'fit').to_df().set_index('what')
    assert found.how['without TeacherCallback'].startswith("It couldn't be tried: AttributeError")
    assert found.epoch_s['without TeacherCallback']=='' and found.epoch_s['without AsksCallback']

@pytest.mark.parametrize('event', ['before_train', 'before_batch'])
def test_a_fit_that_trains_no_epoch_predicts_nothing(event):
    class EndsCallback(Callback): pass
    def end(self): raise CancelTrainException() if event=='before_train' else CancelFitException()
    setattr(EndsCallback, event, end)
    with pytest.raises(RuntimeError, match='cancels the training or the fit'): gain(synth_learner(cbs=EndsCallback()), 1, 'fit')

@pytest.mark.slow
def test_a_validation_that_is_canceled_takes_no_time():
    class SkipsCallback(Callback):
        def before_validate(self): raise CancelValidException()
    found = gain(synth_learner(cbs=SkipsCallback()), 2, 'fit')
    assert found.now.set_index('what').s['validation']==0

@pytest.mark.slow
def test_what_is_measured_later_draws_no_random_numbers(tmp_path):
    found = gain(synth_learner(), 1, 'fit')
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    found.to_html(tmp_path/'gain.html')
    assert torch.equal(torch.get_rng_state(), before[0]) and (np.random.get_state()[1]==before[1]).all()

@pytest.mark.slow
def test_a_function_that_makes_learners():
    found = gain(synth_learner, 1, 'fit')
    with pytest.raises(ValueError, match='Name yours'): found.apply()
    learn = synth_learner()
    found.apply(learn)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert found.got[1]>0

@on_gpu
def test_on_a_gpu_speed_up_is_tried_with_and_without_bf16():
    learn = small_cnn(photos(device='cuda'))
    found = gain(learn, 2)
    assert {"speed_up(learn)", "speed_up(learn, 'bf16')"} <= {o.remedy.name for o in found.ways}
    assert found.memory().kinds['weights']>0 and found.idle().ms.iloc[-1]>0

@on_gpu
def test_a_callback_that_prevents_graphs_is_named():
    found = gain(small_cnn(photos(device='cuda'), cbs=SleepsCallback()), 2)
    assert any('without SleepsCallback' in o.remedy.name and o.remedy.kind=='together' for o in found.ways)
    assert 'graph_safe' in found.refusal()

workers = set()

class KeepsIterCallback(Callback):
    "Keeps the iterator of each loader, in a cycle, and notes its workers"
    def before_train(self): self.learn.dl = self.keeps = KeepingDL(self.learn.dl)
    before_validate = before_train
    def after_pred(self): workers.update(active_children())

class KeepingDL:
    def __init__(self, dl): self.dl = dl
    def __getattr__(self, k): return getattr(self.dl, k)
    def __len__(self): return len(self.dl)
    def __iter__(self):
        self.batches = iter(self.dl)
        return self.batches

@pytest.mark.slow
@pytest.mark.parametrize('fails', [False, True])
def test_a_glance_that_ends_early_waits_for_no_worker(fails, monkeypatch):
    killed = []                                                 # PyTorch does so after 5 s
    monkeypatch.setattr(BaseProcess, 'terminate', killed.append)
    class FailsCallback(Callback):
        def after_loss(self):
            if fails: raise torch.OutOfMemoryError('CUDA out of memory.')
    workers.clear()
    learn = small_cnn(photos(n_workers=2), cbs=[KeepsIterCallback(), FailsCallback()])
    visit(Way(Remedy('as it is', lambda learn: None, 'part')), lambda: learn, 'fit', 2, (.01, .01))
    del learn
    gc.collect()
    assert len(workers)==(2 if fails else 4)                    # of training and of validation
    assert {o.exitcode for o in workers}=={0} and not killed

def made_fit(first_s, later_s): # of 5 epochs
    parts = [PartTimes(100, 100, o, .01, True) for o in (first_s, later_s)]
    return [FitTimes(5, parts, [PartTimes(10, 10, 0., 0., True)]*2)]

def made_way(name, kind, *times_s, change=None, **kwargs):
    return Way(Remedy(name, change, kind, **kwargs), [made_fit(o, o/2) for o in times_s])

def test_what_could_not_be_tried_is_not_said_to_bring_no_difference():
    ways = [made_way('as it is', 'stock', 4., 4.4), failed := made_way('speed_up(learn)', 'all')]
    failed.failed = 'It fails here: ValueError: no'
    found = Gain(None, synth_learner(), 'fit', ways)
    assert "speed_up couldn't be tried" in found.headline() and failed.failed in found.to_df().how.tolist()

class OwnDL:
    "A loader of the user's"
    def __len__(self): return 12
    def __iter__(self): return iter([(torch.ones(8, 1),)*2]*12)

@pytest.mark.parametrize('loader,untried', [
    (DataLoader([(torch.ones(1),)*2]*96, bs=8), {'images decoded once'}),
    (torch.utils.data.DataLoader([(torch.ones(1),)*2]*96, batch_size=8, num_workers=1, persistent_workers=True), {'batch 16 instead of 8', 'images decoded once'}),
    (OwnDL(), {'images decoded once'})], ids=['fastai', 'torch', 'own'])
def test_loaders_that_it_does_not_know(loader, untried, monkeypatch):
    monkeypatch.setattr('gpubench.run.remedies.n_cores', lambda: 2)
    monkeypatch.setattr('gpubench.run.remedies.MIN_CORES', 2)
    learn = Learner(DataLoaders(loader, loader), nn.Linear(1, 1), loss_func=nn.MSELoss())
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    found = gain(learn, 1, 'fit')
    assert untried<=found.failed.keys() and found.stock.epoch_s>0
    if 'batch 16 instead of 8' in untried: assert found.failed['batch 16 instead of 8'].startswith("It couldn't be tried: TypeError: gpubench")
    with learn.no_bar(), learn.no_logging(): learn.fit(1)                   # with its own workers
    if hasattr(loader, '_iterator'): loader._iterator = None                # which end here

def test_after_everyday_calls_with_callbacks_that_write(tmp_path):
    class SavesCallback(Callback):
        def after_epoch(self): self.learn.save('last')
    class LogCallback(Callback):
        def __init__(self): self.file = (tmp_path/'log.txt').open('w')
    learn = synth_learner(n_trn=20, path=tmp_path, cbs=[SavesCallback(), LogCallback(), SaveModelCallback()])
    with learn.no_bar():
        learn.lr_find(num_it=6, show_plot=False)
        learn.fit(1)
    files = {o: o.read_bytes() for o in tmp_path.rglob('*') if o.is_file()}
    found = gain(learn, 2, 'fit')
    assert 'without SavesCallback' in [o.remedy.name for o in found.ways]
    assert found.why().endswith(f"This is without LogCallback: {tmp_path/'log.txt'} is open.")
    assert found.memory().kinds['weights'] and {o: o.read_bytes() for o in tmp_path.rglob('*') if o.is_file()}==files

def test_apply_does_what_is_said_to_bring_most():
    stock = made_way('as it is', 'stock', 4., 4.4)
    once = made_way('images decoded once', 'part', 1., change=partial(parts, names=('feed',)))
    unsure = made_way('speed_up(learn)', 'all', 3., 4., change=sped_up)
    learn = synth_learner()
    found = Gain(None, learn, 'fit', [stock, once, unsure])
    assert '`apply()` (images decoded once)' in found.headline() and 'at least' in found.headline()
    assert found.reason().startswith('At least') and found.reason().endswith('images decoded once.')
    assert [*found.to_df().how]==['', 'apply()', '']
    assert [o['part'] for o in found.apply().rows]==['images']

@pytest.mark.parametrize('s,named', [(1.05, 'speed_up without ReadsCallback'), (1.6, 'before they are trained')])
def test_what_can_be_done_is_named_unless_a_limit_is_shown_to_be_more(s, named, monkeypatch):
    monkeypatch.setattr(Gain, 'bringing', lambda self: 'the wait for data')
    stock, limit = made_way('as it is', 'stock', 4., 4.2), made_way('no wait for images', 'limit', 1., 1.1)
    done = made_way('speed_up without ReadsCallback', 'together', s, 1.1*s)
    assert named in Gain(None, synth_learner(), 'fit', [stock, limit, done]).reason()

def test_fits_outside_of_their_prediction_are_counted():
    found = Gain(None, synth_learner(), 'fit', [made_way('as it is', 'stock', 4., 4.01), made_way('speed_up(learn)', 'all', 1., 1.01)])
    found.applied, found.got_cb = found.best, SimpleNamespace(fits=[(5, 3.), (5, 30.), (2, 1.5)])
    assert found.n_missed==1 and found.got==found.fits[2]
    assert 'Of 3 fits, 1 came outside' in found.headline()

def test_a_larger_batch_says_what_it_does_to_memory():
    stock, more = made_way('as it is', 'stock', 4., 4.4), made_way('batch 8 instead of 4', 'hand', 3.9, how='bs=8', about='batch')
    stock.peak_bytes, more.peak_bytes = 2**30, 3*2**29
    assert [*Gain(None, None, None, [stock, more]).to_df().how]==['', 'bs=8; 1.5 GiB of GPU memory instead of 1.0 GiB']

@pytest.mark.parametrize('fails', [False, True])
def test_a_gpus_page_has_the_largest_batch(fails, monkeypatch, tmp_path):
    limits = []
    def fake_largest(make, limit_bytes, line):
        limits.append((limit_bytes, line))
        if fails: raise StateError('Not even two items fit.\nmore')
        return f'A batch of {len(limits)} fits.'
    monkeypatch.setattr(gpubench.show.gain, 'largest_batch', fake_largest)
    monkeypatch.setattr(gpubench.show.gain, 'memory_line', lambda make: 'a line')
    monkeypatch.setattr(Gain, 'idle', lambda self: pd.DataFrame(dict(cause=['data'], ms=[1.])))
    monkeypatch.setattr(Gain, 'memory', lambda self: SimpleNamespace(to_df=lambda: pd.DataFrame(dict(kind=['weights'], mib=[1.]))))
    learn = synth_learner()
    found = Gain(None, learn, 'fit', [made_way('as it is', 'stock', 4., 4.4)], pd.DataFrame(dict(what=['forward'], s=[1.], share=[1.])), learn)
    found.device = torch.device('cuda')
    page = found.to_html(tmp_path/'gain.html').read_text()
    assert limits==[(None, 'a line'), (GPU_8GB_BYTES, 'a line')]
    words = ['Not even two items fit. more'] if fails else ['A batch of 1 fits.', 'A batch of 2 fits.']
    assert all(o in page for o in words)
