"""What a visit does with time, by clocks that the tests turn: warm-up, further steps, the stretch with the monitor; and what it refuses"""

import gc
import multiprocessing
import time
from functools import partial
from itertools import count

import pytest
import torch
from fastai.callback.core import Callback
from fastai.test_utils import synth_learner
from on_tape import compiler  # noqa: F401 (a fixture)

import gpubench.run.trial as library
from gpubench.step import graphed
from gpubench.data import images
from gpubench.step.capture import TapeCapture
from gpubench.watch.timing import StepTimerCallback
from gpubench.run.trial import SeenCallback, Trial, make_learner, run_trial, time_more, train_monitored, warm_up

SMALL = Trial(device='cpu', max_images=500)

class Clock(Callback):
    "Training steps that take the milliseconds of `ms`; `lengths` holds the steps of each epoch"
    order = 0
    def __init__(self, ms): self.ms, self.now_s, self.lengths = iter(ms), 0., []
    def __call__(self, event_name):
        if event_name=='before_train': self.lengths.append(0)
        if event_name=='after_pred' and self.learn.training:
            self.now_s += next(self.ms)/1e3
            self.lengths[-1] += 1
    def seconds(self): return self.now_s

def clocked(ms, n_trn, **names):
    "A Learner with epochs of `n_trn` steps, its clock, and a timer that goes by it"
    clock = Clock(ms)
    learn = synth_learner(n_trn=n_trn, cbs=[clock, *names.get('cbs', [])])
    learn.remove_cb(learn.progress)
    learn.logger = lambda *_: None
    return learn, clock, StepTimerCallback(clock.seconds)

@pytest.mark.parametrize('ms, n', [
    ([9.]+[2.]*99, 10),                                 # two steps, then eight: steady
    ([2.*.8**i for i in range(99)], 40),                # ever faster: the cap on steps
    ([1e3]*99, 3),                                      # a second a step: the cap on seconds
    ([9e3]*99, 2)])                                     # two steps at least
def test_warm_up_ends(ms, n):
    learn, _, timer = clocked(ms, n_trn=8)
    found = warm_up(learn, Trial(device='cpu'), timer)
    assert found['n_warmup_steps']==n and learn.dls.train.n==128

@pytest.mark.parametrize('ms, n_trn, max_s, n', [
    ([1e3]*999, 4, 100., 8),                            # four steps an epoch, the first left out: six after two epochs
    ([1e3]*999, 1, 100., 6),                            # one step an epoch
    ([1e3, 2e3]*999, 4, 50., None), ([1e3]*9, 4, 0., 0)])
def test_further_steps_end(ms, n_trn, max_s, n):
    learn, clock, timer = clocked(ms, n_trn)
    learn.add_cb(timer)
    if not max_s: learn.fit(1)                          # time is up at once
    before = len(timer.steps)
    time_more(learn, Trial(device='cpu', bs=16), .05, max_s)
    if n is not None: assert len(timer.steps)-before==n
    else: assert 45<=clock.now_s<=60                    # never tight: time is up
    assert learn.dls.train.n==n_trn*16

class EnoughCallback(Callback):
    "A monitor that has seen enough after `n` steps"
    order, name = 1, 'monitor'
    def __init__(self, clock, n): self.clock, self.n = clock, n
    @property
    def is_enough(self): return sum(self.clock.lengths)>=self.n
    def summary(self): return dict(energy_j_per_image=2.)

@pytest.mark.parametrize('step_ms, n_enough, max_s, lengths', [
    (1., 20, 100., [8, 8, 8]),                          # whole epochs where they are short
    (1000., 4, 100., [3, 1]),                           # 3.5 s, then 1 s at a time
    (3000., 4, 100., [1]*4),                            # a step at least
    (1000., 99, 4.5, [3, 1, 1])])                       # time is up
def test_the_monitored_stretch_ends(step_ms, n_enough, max_s, lengths, monkeypatch):
    monkeypatch.setattr(SeenCallback, 'verify', lambda self, trial: None)
    learn, clock, timer = clocked([step_ms]*999, n_trn=8, cbs=[SeenCallback()])
    learn.fit(1, cbs=timer)
    clock.lengths.clear()
    learn.add_cb(timer)
    found = train_monitored(learn, Trial(device='cpu'), max_s, EnoughCallback(clock, n_enough))
    assert clock.lengths==lengths
    assert found==dict(energy_j_per_image=2.)

def test_an_error_in_the_warm_up_leaves_the_epoch_its_length():
    class FailCallback(Callback):
        order = 58
        def before_batch(self): raise OSError('before anything was computed')
    learn = make_learner(SMALL)
    with learn.no_bar(), learn.no_logging(), learn.added_cbs(FailCallback()), pytest.raises(OSError): warm_up(learn, SMALL)
    assert learn.dls.train.n==400
    with learn.no_bar(): assert learn.validate()[0]>0
    assert len(learn.model._forward_hooks)==0 and learn.seen.dtype=='float32'       # nothing is left that looks

def test_buffers_are_as_before_although_a_model_gets_others_on_its_way_to_a_gpu():
    class MoveCallback(Callback):
        order = -9                                      # just after fastai moves the model
        def before_fit(self): self.model._apply(torch.clone)
    trial = SMALL.but(model='cnn_small')
    learn = make_learner(trial)
    before = {k: v.clone() for k,v in learn.model.state_dict().items()}
    mean = next(v for k,v in learn.model.named_buffers() if k.endswith('running_mean'))
    with learn.no_bar(), learn.no_logging(), learn.added_cbs(MoveCallback()): warm_up(learn, trial)
    assert not any(o is mean for o in learn.model.buffers())                        # they are others
    assert all(torch.equal(v, before[k]) for k,v in learn.model.state_dict().items())

def test_the_layout_is_that_of_the_first_product_that_shows_one():
    learn = make_learner(SMALL)
    seen = learn.seen
    seen.before_fit()
    for o in (torch.ones(2, 1, 4, 4), torch.ones(2, 3, 4, 4).half().to(memory_format=torch.channels_last), torch.ones(2, 3, 4, 4)): seen.saw_product(o)
    assert (seen.dtype, seen.is_channels_last)==('float32', True)

def test_workers_that_fastai_takes_back(monkeypatch):
    "As it does on macOS"
    real = library.get_dls
    monkeypatch.setattr(library, 'get_dls', lambda *args, **kwargs: real(*args, **kwargs | dict(n_workers=0)))
    with pytest.raises(ValueError, match='n_workers=2 became 0'): make_learner(SMALL.but(n_workers=2))

def test_a_fast_trial_trains_the_same_and_says_what_ran():
    base = Trial(device='cpu', max_images=500, loader='resident', n_epoch=2)
    a, b = (run_trial(base.but(**o), half_width=.9, max_s=0.) for o in ({}, dict(speed_up='fused defer_losses')))
    assert (b['fused'], b['defer_losses'], b['graph'])==(True, True, False)
    assert abs(a['valid_loss']-b['valid_loss'])<1e-3 and a['trial_id']!=b['trial_id']

def test_pages_are_kept_for_good():
    quick = dict(device='cpu', max_images=500, loader='resident', half_width=.9, max_s=0., whole_epoch=False)
    assert [run_trial(**quick, speed_up=o)['keep_pages'] for o in ('', 'keep_pages', '')]==[False, True, True]      # as it ran

@pytest.mark.parametrize('n_eager', [3, 11]) # as for one device and for DDP; steady eager steps don't end the warm-up
def test_a_graph_that_was_warmed_up_is_what_is_timed(n_eager, monkeypatch):
    "On a tape, since a CPU has no graphs: the weights are put back without another capture"
    monkeypatch.setattr(graphed, 'N_WARM_UP', n_eager)
    monkeypatch.setattr(library, 'is_steady', lambda ms: len(ms)>=8)
    trial = Trial(device='cpu', max_images=500, loader='resident', speed_up='graph defer_losses')
    plain, learn = make_learner(trial.but(speed_up='fused')), make_learner(trial)
    learn.graphed_step.capture = TapeCapture()
    for o in (plain, learn):
        with o.no_bar(), o.no_logging():
            timer = StepTimerCallback(partial(next, count(0, 1e-4)))      # this machine may be busy
            warm_up(o, trial, timer)
            n_before = learn.graphed_step.n_replays
            o.add_cb(StepTimerCallback())
            o.fit(1, lr=trial.lr)
    assert learn.graphed_step.n_graphs==1 and learn.graphed_step.n_replays-n_before==len(learn.dls.train)
    assert learn.step_timer.to_df().graph_ms.notna().all()
    eager = [o['graph_ms'] is None for o in timer.steps]                     # one more, with which the first replay is compared
    assert eager==[True]*n_eager+[False, True]+[False]*(len(timer.steps)-n_eager-2) and len(timer.steps)>=n_eager+8
    torch.testing.assert_close(learn.recorder.losses, plain.recorder.losses, rtol=1e-4, atol=1e-5)
    learn.seen.verify(trial)
    learn.graphed_step.why_not = 'The network has hooks.'
    with pytest.raises(RuntimeError, match="speed_up=graph should have been True, but was The network has hooks"): learn.seen.verify(trial)

def test_a_compiled_step_is_looked_at_once_its_layout_is_decided(compiler):
    learn = make_learner(Trial(device='cpu', model='cnn_small', bs=16, max_images=200, loader='resident', speed_up='channels_last graph compile'))
    learn.graphed_step.capture = TapeCapture()
    learn.model.held = learn.model[0].weight*1                 # as a norm of weights holds
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert learn.seen.is_channels_last and learn.graphed_step.n_replays

def test_a_folder_is_told_apart_by_where_it_is(tmp_path, monkeypatch):
    ids = []
    for name in 'one', 'two':
        (tmp_path/name/'data').mkdir(parents=True)
        monkeypatch.chdir(tmp_path/name)
        ids.append(Trial(dataset='./data').trial_id)
    assert ids[0]!=ids[1]

def test_all_that_speed_up_does_is_recorded_part_by_part():
    found = run_trial(device='cpu', max_images=500, loader='cached', bs=16, speed_up=True, half_width=.9, max_s=0.)
    assert [found[o] for o in ('status', 'fused', 'channels_last', 'keep_pages', 'graph', 'compile')]==['ok', True, True, True, False, False]

CACHED = dict(device='cpu', max_images=200, bs=16, loader='cached', half_width=.9, max_s=0.)

def test_cached_learns_what_files_teach_and_decodes_in_the_set_up(monkeypatch):
    feeds, n_at_start, warm = [], [], library.warm_up
    def n_decoded(): return sum(o.n_decoded for o in feeds[0].pool.sets.values())
    def started(learn, *args, **kwargs):
        feeds.append(learn.feed)
        n_at_start.append(n_decoded())
        return warm(learn, *args, **kwargs)
    monkeypatch.setattr(library, 'warm_up', started)
    found = run_trial(**CACHED, n_epoch=2)
    assert (n_at_start, n_decoded())==([200], 200)      # those for training and those held out; none again
    del feeds[:]
    monkeypatch.undo()
    files = run_trial(**CACHED | dict(loader='files'), n_epoch=2)
    same = 'accuracy', 'n_images', 'n_opt_steps', 'classes', 'split'
    assert [found[o] for o in same]==[files[o] for o in same] and found['trial_id']!=files['trial_id']
    until = time.monotonic()+20
    gc.collect()                                     # of loaders that earlier tests left in cycles
    while multiprocessing.active_children() and time.monotonic()<until: time.sleep(.1)
    assert not multiprocessing.active_children()

def gives_way(self): raise images.NotTaken('Its data set is made of wood.')

@pytest.mark.parametrize('name, what, says', [
    ('take_over', lambda self, *then: setattr(self, 'why_not', 'It has its own wif.'), 'the feed of decoded images should have been True, but was It has its own wif'),
    ('before_validate', lambda self: None, 'the feed of decoded images should have been True, but was False'),     # half of the passes
    ('decode_all', gives_way, "loader='cached' did nothing. Its data set is made of wood")])
def test_a_feed_that_gave_way_is_an_error(name, what, says, monkeypatch):
    monkeypatch.setattr(images.FeedCallback, name, what)
    with pytest.raises(RuntimeError, match=says): run_trial(**CACHED)

def test_images_that_do_not_fit_are_an_error(monkeypatch):
    monkeypatch.setattr(images, 'memory_bytes', lambda: (2**30, 2*100*28*28))     # room for 100 small images
    with pytest.raises(RuntimeError, match=r'Only (\d\d|100) of 160 decoded images fit in half of the free memory. Use fewer or smaller images'): run_trial(**CACHED)
