"""What `gain` answers for Learners with planted faults, and what it leaves behind; delays are planted with wide margins"""
from time import sleep

import pandas as pd
import pytest
import torch
from fastai.callback.core import Callback, CancelFitException, CancelTrainException, CancelValidException
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.layers import ConvLayer
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.test_utils import synth_learner
from fastai.vision.augment import Resize
from fastai.vision.data import ImageDataLoaders
from fastcore.basics import noop
from torch import nn

import gpubench.show.gain
from gpubench import gain
from gpubench.data.loaders import get_dls
from gpubench.data.made import draw_birds
from gpubench.run.twins import Twins
from gpubench.show.gain import APPLY, FitTimes, Gain, PartTimes, Way, decode_once, find_ways, glance, visit
from gpubench.step.fast import speed_up

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')

def slow_tfm(x):
    "Takes 30 ms for each image"
    sleep(.03)
    return x

class SleepsCallback(Callback):
    "Sleeps after each training batch"
    def __init__(self, seconds=.03): self.seconds = seconds
    def after_batch(self): sleep(self.seconds*self.training)

def photos(item_tfms=(), device='cpu', n_workers=0, n=80):
    return ImageDataLoaders.from_folder(draw_birds(n), valid_pct=.2, bs=8, item_tfms=[Resize(32), *item_tfms], num_workers=n_workers, device=device)

def small_cnn(dls, **kwargs):
    net = nn.Sequential(ConvLayer(3, 8, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, dls.c))
    return Learner(dls, net, loss_func=CrossEntropyLossFlat(), metrics=accuracy, **kwargs)

def quiet(learn, fit='fit', n=1):
    with learn.no_bar(), learn.no_logging(): getattr(learn, fit)(n)

@pytest.fixture(autouse=True)
def short(monkeypatch): monkeypatch.setattr(gpubench.show.gain, 'TIMES', {k: dict(first_s=a, later_s=b) for k,a,b in (('cpu', .1, .05), ('cuda', .5, .3))})

# ---- whole ones

@pytest.mark.slow
def test_a_slow_transform_is_named():
    found = gain(small_cnn(photos([slow_tfm])), 2)
    assert 'waiting for data' in found.reason() and 'slow_tfm' in found.reason()
    assert found.predicted(found.stock).mid>2*80*.03

def test_a_slow_callback_is_named_and_the_learner_stays_as_it_was():
    learn = synth_learner(n_trn=20, cbs=SleepsCallback())
    before = {k: v.clone() for k,v in learn.model.state_dict().items()}
    cbs, random_state = [*learn.cbs], torch.get_rng_state()
    found = gain(learn, 3, 'fit')
    found.idle(), found.memory()
    assert 'SleepsCallback' in found.reason() and found.now.what.str.contains('SleepsCallback').any()
    assert [*learn.cbs]==cbs and torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(v, before[k]) for k,v in learn.model.state_dict().items())

def test_both_fits_of_fine_tune_count():
    learn = small_cnn(photos(n=40))
    found = gain(learn, 2, 'fine_tune')
    assert [o.n_epochs for o in found.stock.visits[0]]==[1, 2]
    found.apply()
    quiet(learn, 'fine_tune', 2)
    assert [n for n,_ in found.got_cb.fits]==[1, 2] and found.got[1]==sum(s for _,s in found.got_cb.fits)
    assert found.as_dict()['got']['got_s']==found.got[1] and 'got_s' in found.to_df()

def test_an_error_of_the_users_code_comes_through():
    class RaisesCallback(Callback):
        def after_loss(self): raise KeyError('of the user')
    with pytest.raises(KeyError, match='of the user'): gain(synth_learner(cbs=RaisesCallback()), 1, 'fit')

@pytest.mark.parametrize('event', ['before_train', 'before_batch'])
def test_a_fit_that_trains_no_epoch_predicts_nothing(event):
    class EndsCallback(Callback): pass
    def end(self): raise CancelTrainException() if event=='before_train' else CancelFitException()
    setattr(EndsCallback, event, end)
    with pytest.raises(RuntimeError, match='cancels the training or the fit'): gain(synth_learner(cbs=EndsCallback()), 1, 'fit')

def test_a_function_that_makes_learners_without_validation():
    class SkipsCallback(Callback):
        def before_validate(self): raise CancelValidException()
    def make(): return synth_learner(cbs=SkipsCallback())
    found = gain(make, 1, 'fit')
    assert found.now.set_index('what').s['validation']==0
    with pytest.raises(ValueError, match='Name yours'): found.apply()
    learn = make()
    found.apply(learn)
    quiet(learn)
    assert found.got[1]>0

class OwnDL:
    "A loader of the user's"
    def __len__(self): return 12
    def __iter__(self): return iter([(torch.ones(8, 1),)*2]*12)

@pytest.mark.parametrize('loader,untried', [
    (DataLoader([(torch.ones(1),)*2]*96, bs=8), {'images decoded once'}),
    (torch.utils.data.DataLoader([(torch.ones(1),)*2]*96, batch_size=8), {'images decoded once'}),
    (OwnDL(), {'images decoded once'})], ids=['fastai', 'torch', 'own'])
def test_loaders_that_it_does_not_know(loader, untried, monkeypatch):
    monkeypatch.setattr('gpubench.show.gain.MIN_CORES', 10**6)
    learn = Learner(DataLoaders(loader, loader), nn.Linear(1, 1), loss_func=nn.MSELoss())
    quiet(learn)
    found = gain(learn, 1, 'fit')
    assert untried<=found.failed.keys() and found.stock.epoch_s>0

def test_of_a_learner_that_is_fast_already():
    learn = synth_learner()
    speed_up(learn)
    assert [o.name for o in find_ways(learn)]==['as it is', 'no wait for images', 'batch 32 instead of 16']
    found = gain(learn, 1, 'fit')
    assert 'speed_up' not in found.headline() and found.apply() is None

@on_gpu
def test_on_a_gpu_speed_up_is_tried_with_and_without_bf16():
    found = gain(small_cnn(photos(device='cuda'), cbs=SleepsCallback()), 2)
    assert {"speed_up(learn)", "speed_up(learn, 'bf16')"} <= {o.name for o in found.ways}
    assert found.memory().mib.min()>=0 and found.idle().ms.iloc[-1]>0 and 'SleepsCallback' in found.reason()

# ---- glances

def test_workers_end_with_their_glance():
    from multiprocessing import active_children
    before = {*active_children()}
    learn = small_cnn(photos(n_workers=2))
    with learn.no_bar(), learn.no_logging(): [found] = glance(learn, 'fit', 2, .01, .01)
    assert [o.n_batches for o in found.train]==[8, 8] and {*active_children()}==before

def test_a_later_epoch_of_decoded_images_is_a_whole_one():
    "It trains the images that the first one has decoded, and predicts all"
    learn = small_cnn(photos(), cbs=SleepsCallback(.1))
    decode_once(learn)
    with learn.no_bar(), learn.no_logging(): [found] = glance(learn, 'fit', 3, .3, 5.)
    learn.feed.release()
    first, later = found.train
    assert learn.feed.n_done and first.n_seen>=later.n_seen<later.n_batches==8 and later.seconds()>later.seen_s

# ---- made ones

def made_way(name, how, *times_s, change=noop, **kwargs): # fits of 5 epochs, whose first takes twice as long
    visits = [[FitTimes(5, [PartTimes(100, 100, o), PartTimes(100, 100, o/2)])] for o in times_s]
    return Way(name, change, how, visits=visits, **kwargs)

NOW = pd.DataFrame(dict(what=['wait for data', 'forward', '  of it in LogCallback'], s=[1., 3., .4], share=[.25, .75, .1]))
def made_gain(*ways, learn=synth_learner):
    return Gain([made_way('as it is', '', 4., 4.4), *ways], Twins(learn), 'fit', NOW, {}, dict(device='cpu', n_workers=0, n_cores=2))

def test_images_in_memory_need_neither_workers_nor_decoding(monkeypatch):
    monkeypatch.setattr('gpubench.show.gain.n_cores', lambda: 8)
    def about_data(dls): return [o.name for o in find_ways(small_cnn(dls)) if o.is_of_data]
    assert about_data(photos())==['8 workers instead of 0', 'images decoded once']
    assert not about_data(get_dls('digits', max_images=64, bs=8, loader='resident', device='cpu'))

def test_a_change_that_fails_is_a_row_of_the_table():
    def change(twin): raise ValueError('no')
    failed = made_way('speed_up(learn)', APPLY, change=change)
    visit(failed, Twins(synth_learner), glance)
    found = made_gain(failed)
    assert "speed_up wasn't tried" in found.headline() and found.failed=={'speed_up(learn)': "It couldn't be tried: ValueError: no"}
    assert found.to_df().how.tolist()[-1]==failed.failed

def test_a_change_that_fails_later_is_not_applied():
    failed = made_way('speed_up(learn)', APPLY, 1., 1.)
    failed.failed = 'no memory'
    found = made_gain(failed)
    assert found.best is None and [*found.to_df().what].count('speed_up(learn)')==1

def test_apply_does_what_is_said_to_bring_most():
    once = made_way('images decoded once', APPLY, 1., change=decode_once)
    found = made_gain(once, made_way('speed_up(learn)', APPLY, 3., 4.), learn=synth_learner())
    assert '`apply()` (images decoded once)' in found.headline() and 'at least' in found.headline()
    assert [*found.to_df().how]==['', 'apply()', '']
    assert [o['part'] for o in found.apply().rows]==['images']

def test_what_takes_most_of_an_epoch_is_named():
    assert made_gain().reason().startswith('75 % of an epoch is the network (3 s).')
    found = made_gain()
    found.now = NOW.assign(s=[4., 1., .4])
    found.costs = dict(item={'Resize': 2., 'ToTensor': 1.})
    assert 'is waiting for data, without workers (4 s; Resize takes 2 ms for each item). ' in found.reason()
    found.now = NOW.assign(s=[1., 3., 2.9], share=[.25, .75, .7])
    assert found.reason()=='70 % of an epoch goes to LogCallback.'
    found.now = pd.DataFrame(dict(what=['forward', 'validation'], s=[1., 3.], share=[.25, .75]))
    assert found.reason().startswith('75 % of an epoch is validation (3 s). ')
    refused = made_way('speed_up(learn)', APPLY, 4., 4.4, refused={'CUDA graph': 'A reason.'})
    assert made_gain(refused).reason().startswith('A reason. ')
