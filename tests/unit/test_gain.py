"""What `gain` answers for Learners with planted faults, and what it leaves behind; delays are planted with wide margins"""
import gc
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from time import sleep

import pytest
import torch
from fastai.callback.core import Callback
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
from gpubench.data.made import draw_birds
from gpubench.run.remedies import Remedy
from gpubench.show.gain import Way, predicted, visit

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')

def slow_tfm(x):
    "Takes 10 ms for each image"
    sleep(.01)
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

def test_a_slow_transform_is_named():
    found = gain(small_cnn(photos([slow_tfm])), 2)
    assert 'wait for data' in found.reason() and 'slow_tfm' in found.reason()
    assert predicted(found.stock, found.noise).mid>2*80*.01

def test_a_slow_callback_is_named_and_the_learner_stays_as_it_was():
    learn = synth_learner(n_trn=20, cbs=SleepsCallback())
    before = {k: v.clone() for k,v in learn.model.state_dict().items()}
    cbs, random_state = [*learn.cbs], torch.get_rng_state()
    found = gain(learn, 3, 'fit')
    assert 'without SleepsCallback' in found.reason() and found.now.what.str.contains('SleepsCallback').any()
    assert [*learn.cbs]==cbs and type(learn.cbs[-1]) in (SleepsCallback, *map(type, cbs))
    assert all(torch.equal(v, before[k]) for k,v in learn.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)

def test_both_fits_of_fine_tune_count():
    learn = vision_learner(photos(), resnet18, pretrained=False, metrics=accuracy)
    found = gain(learn, 2, 'fine_tune')
    assert [o.n_epochs for o in found.stock.visits[0]]==[1, 2]
    found.apply()
    with learn.no_bar(), learn.no_logging(): learn.fine_tune(2)
    assert [n for n,_ in found.got_cb.fits]==[1, 2]
    assert found.got[1]==sum(s for _,s in found.got_cb.fits)
    record = found.as_dict()
    assert record['got_s']>0 and record['holds'] in (True, False)

def test_after_too_little_memory_it_explains(monkeypatch):
    def out_of_memory(*args, **kwargs): raise torch.cuda.OutOfMemoryError('CUDA out of memory.')
    monkeypatch.setattr(gpubench.show.gain, 'glance', out_of_memory)
    with pytest.raises(RuntimeError, match='(?i)memory'): gain(small_cnn(photos()), 1)

def test_an_error_of_the_users_code_comes_through():
    class RaisesCallback(Callback):
        def after_loss(self): raise KeyError('of the user')
    with pytest.raises(KeyError, match='of the user'): gain(synth_learner(cbs=RaisesCallback()), 1, 'fit')

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
