"A function that returns a `Learner`, in a sweep"
import random
import tempfile
from pathlib import Path
from time import sleep

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback, CancelBatchException, CancelFitException
from fastai.callback.mixup import MixUp
from fastai.callback.progress import CSVLogger
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation, ShortEpochCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.test_utils import synth_learner

from gpubench.data.loaders import get_dls
from gpubench.step.fast import speed_up
from gpubench.data.images import FeedCallback
from gpubench.run.learner import time_learner
from gpubench.run.sweep import sweep
from gpubench.run.trial import run_trial

def make_learner(bs, n_trn):
    "`synth_learner` has batches of 16, whatever is asked for"
    return synth_learner(n_trn=n_trn)

def sweep_of(run, capsys, **point):
    df = sweep(point, run=run, repeats=1, isolate=False, progress=False, twin=None)
    return df, capsys.readouterr().out

def test_a_sweep_times_a_learner_and_names_what_it_cannot_verify(capsys):
    df, said = sweep_of(make_learner, capsys, bs=16, n_trn=[10, 20])
    assert (df.status.tolist(), sorted(df.n_images)) == (['ok', 'ok'], [160, 320])
    assert df.unverified.tolist()==['n_trn', 'n_trn'] and "can't be observed during training: n_trn." in said

# ---- learners as a practitioner has them

def test_steps_that_add_up_batches_are_measured_as_rounds():
    class SlowOptimizerCallback(Callback):
        def after_step(self): sleep(.04)
    def run(): return synth_learner(n_trn=24, cbs=[GradientAccumulation(64), SlowOptimizerCallback()])
    record = time_learner(run(), {})
    assert record['n_opt_steps']==6 and .24<=record['epoch_s']<1        # 24 batches of 16

def test_groups_of_batches_that_run_from_one_epoch_into_the_next():
    for n_trn, n_epoch in (11, 2), (11, 1):
        record = time_learner(synth_learner(n_trn=n_trn, cbs=GradientAccumulation(96)), dict(accumulate=6, n_epoch=n_epoch))
        assert record['n_opt_steps']==n_trn*n_epoch//6 and 'accumulate' not in (record['unverified'] or '')

def test_a_short_last_batch_counts_as_part_of_a_step():
    class SlowCallback(Callback):
        def after_pred(self): sleep(.01*len(self.xb[0])*self.training)
    data = [(torch.randn(4), torch.randn(1)) for _ in range(49)]
    dls = DataLoaders.from_dsets(data[:33], data[33:], bs=8, drop_last=False, num_workers=0, device='cpu')
    record = time_learner(Learner(dls, torch.nn.Linear(4, 1), loss_func=torch.nn.MSELoss(), cbs=SlowCallback()), dict(n_epoch=3))
    assert (record['n_steps'], record['n_images'])==(5, 33) and abs(record['epoch_s']/record['epoch_whole_s']-1)<.12

def test_a_training_that_stops_early_is_no_record_of_all_its_epochs():
    class StopCallback(Callback):
        order = 99
        def after_epoch(self): raise CancelFitException()
    with pytest.raises(RuntimeError, match='n_epoch should have been 3, but was 1'):
        time_learner(synth_learner(n_trn=10, cbs=StopCallback()), dict(n_epoch=3))
    with pytest.raises(ValueError, match='n_epoch must be a whole number of at least 1'): time_learner(synth_learner(n_trn=10), dict(n_epoch=0))

# ---- the record has the loss of one plain training

def data(bs, n=64, **kwargs):
    x = torch.randn(n+24, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(n+24)%4
    pairs = [*zip(x+.3*y[:, None, None, None], y)]
    return DataLoaders.from_dsets(pairs[:n], pairs[n:], bs=bs, num_workers=0, device='cpu', **kwargs)

class OwnNet(torch.nn.Module):
    "Keeps a buffer, a count and a generator of its own"
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Dropout(.3),
                                        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 4))
        self.n, self.generator = 0, torch.Generator().manual_seed(3)
    def forward(self, x):
        self.n += self.training
        return self.body(x)/(1+.1*self.n) + .1*torch.randn(4, generator=self.generator) + .1*random.random()

def own(bs=8, **kwargs):
    "A Learner from a function that seeds itself"
    torch.manual_seed(1)
    return unseeded(bs, **kwargs)

def unseeded(bs=8, **kwargs):
    how = dict(loss_func=CrossEntropyLossFlat(), metrics=accuracy, lr=.01, path=Path(tempfile.mkdtemp()))
    return Learner(data(bs), OwnNet(), **how | kwargs)

KINDS = dict( # name -> makes a Learner
    seeded=own, unseeded=unseeded, save=lambda: own(cbs=SaveModelCallback()), csv=lambda: own(cbs=CSVLogger(append=True)),
    mixup=lambda: own(cbs=MixUp(.4)), accumulate=lambda: own(cbs=GradientAccumulation(24)))

def seed_all():
    for seed in (random.seed, np.random.seed, torch.manual_seed): seed(5)

def draws(): return torch.rand(1).item(), np.random.rand(), random.random()

def trained(learn, train):
    "Losses and accuracy that a plain training ends with, and what is drawn next"
    with learn.no_bar(), learn.no_logging(): train(learn)
    return [*learn.recorder.values[-1]], draws()

def check_same(make, fit='fit', train=lambda learn: learn.fit(2)):
    "A record of `make()` has what the plain `train` ends with"
    made = []
    def run(n_epoch):
        made.append(make())
        return made[-1]
    seed_all()
    right = trained(make(), train)
    seed_all()
    df = sweep(dict(n_epoch=2), run=run, fit=fit, repeats=1, isolate=False, progress=False, twin=None)
    assert df.status.tolist()==['ok'], df.error[0]
    assert ([*df.loc[0, ['loss', 'valid_loss', 'accuracy']]], draws())==right
    return df.iloc[0], made[0]

@pytest.mark.parametrize('kind', KINDS)
def test_a_record_has_the_loss_of_one_plain_training(kind):
    record, learn = check_same(KINDS[kind])
    assert record.n_warmup_steps>0 and learn.model.n==16

def in_stages(learn):
    learn.fit(1)
    learn.lr_find(num_it=5, show_plot=False)
    learn.fit_one_cycle(2, .02)

@pytest.mark.parametrize('fit,train', [('fit_one_cycle', lambda learn: learn.fit_one_cycle(2)), ('fine_tune', lambda learn: learn.fine_tune(2)),
                                       (in_stages, in_stages)], ids=['fit_one_cycle', 'fine_tune', 'function'])
def test_other_ways_to_train(fit, train):
    record, learn = check_same(own, fit, train)
    assert (record.n_timed_steps, record.n_opt_steps, record.unverified)==(16, 16, None)
    assert (record.fit, record.settings)==(fit if isinstance(fit, str) else 'in_stages', ['fit'])

def test_files_and_loggers_are_those_of_one_training(capsys):
    rows = []
    class LogCallback(Callback):
        def __init__(self, log_file): self.log_file = log_file
        def after_epoch(self): print(self.epoch, file=self.log_file, flush=True)
    def run(n_epoch):
        path = Path(tempfile.mkdtemp())
        learn = own(cbs=[SaveModelCallback(every_epoch=True), CSVLogger(append=True), LogCallback(open(path/'own.txt', 'w'))], path=path)
        learn.logger = rows.append
        return learn
    made = []
    df = sweep(dict(n_epoch=2), run=lambda n_epoch: made.append(run(n_epoch)) or made[-1], repeats=1, isolate=False, progress=False, twin=None)
    path = made[0].path
    assert df.n_warmup_steps[0]>0 and sorted(o.name for o in (path/'models').iterdir())==['model_0.pth', 'model_1.pth']
    assert (path/'own.txt').read_text()=='0\n1\n' and [o[0] for o in rows]==[0, 1]
    assert [o.split(',')[0] for o in (path/'history.csv').read_text().split()]==['epoch', '0', '1']

def test_a_batch_larger_than_the_data():
    df = sweep(dict(bs=[8, 128]), run=own, repeats=1, isolate=False, progress=False, twin=None).set_index('bs')
    assert df.status.to_dict()=={8: 'ok', 128: 'skipped'}
    assert 'The batch size is larger than the 64 training images, so no step would run.' in df.error[128]

def test_fits_that_train_nothing():
    class CancelCallback(Callback):
        def before_batch(self):
            if self.training: raise CancelBatchException()
    with pytest.raises(RuntimeError, match='trained 0 steps'): time_learner(own(cbs=CancelCallback()), {})
    with pytest.raises(RuntimeError, match='trained 0 steps'): time_learner(own(), {}, fit=lambda learn: None)

def test_a_fit_that_cannot_be():
    for fit, run, words in (('tune', own, "fit is 'tune', but"), (3, own, 'fit is 3, but'), ('fine_tune', run_trial, 'your own function')):
        with pytest.raises(ValueError, match=words): sweep(dict(bs=[8]), run=run, fit=fit)

def test_settings_in_a_user_s_own_words():
    for point, unverified in ((dict(lr=.01*10**.123456789, precision=16, n_workers=None, device='cpu'), 'precision, n_workers'),
                              (dict(lr=.01, device='auto', precision='ieee'), 'device, precision')):
        assert time_learner(own(lr=point['lr']), point)['unverified']==unverified

@pytest.mark.parametrize('order', [0, 90])                # before and after the Recorder
def test_validations_beside_the_training(order):
    class TestSetCallback(Callback):
        def after_epoch(self):
            if not self.learn.lock.locked() and self.epoch==1: self.learn.validate(0)
    def validated(learn):
        cb = TestSetCallback()
        cb.order = order
        learn.fit(2, cbs=cb)
        learn.validate(0)
        learn.get_preds()
    seed_all()
    right, _ = trained(own(), lambda learn: learn.fit(2))
    seed_all()
    record = time_learner(own(), dict(n_epoch=2, lr=.01), validated)
    assert [record[o] for o in ('loss', 'valid_loss', 'accuracy')]==right
    assert (record['n_opt_steps'], record['unverified'])==(16, None)

def test_losses_of_a_recorder_that_keeps_more_or_less():
    learn = own()
    learn.recorder.train_metrics = True
    record = time_learner(learn, {})
    assert [record[o] for o in ('loss', 'valid_loss', 'accuracy')]==[learn.recorder.values[-1][i] for i in (0, 2, 3)]
    learn = own(cbs=ShortEpochCallback(.5, short_valid=False))          # of an epoch that is cut short there is no loss
    record = time_learner(learn, {})
    assert [record[o] for o in ('loss', 'valid_loss', 'accuracy')]==[None, *learn.recorder.values[-1]]

def saving(n_epoch):
    seed_all()
    return own(cbs=SaveModelCallback())
def two_fits(learn): learn.fit(1), learn.fit(2)

def test_a_function_that_trains_travels_to_a_fresh_process_and_back_into_the_same_record(tmp_path, capsys):
    how = dict(run=saving, fit=two_fits, repeats=1, out=tmp_path, progress=False)
    df = sweep(dict(n_epoch=2), **how)
    right, _ = trained(saving(2), two_fits)
    assert [*df.loc[0, ['loss', 'valid_loss', 'accuracy', 'fit']]]==[*right, 'two_fits'], df.error[0]
    assert len(sweep(dict(n_epoch=2), **how))==1 and '1 of 1 visits are in' in capsys.readouterr().out

def test_a_learner_that_is_sped_up():
    def made():
        seed_all()
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 4))
        learn = Learner(data(8), net, loss_func=CrossEntropyLossFlat(), lr=1e-3)
        speed_up(learn)
        return learn
    plain = made()
    with plain.no_bar(), plain.no_logging(): plain.fit(1)
    found = time_learner(made(), {})
    assert found['n_warmup_steps']==8 and found['loss']==pytest.approx(plain.recorder.values[-1][0], rel=1e-5)

def test_the_batches_that_a_feed_made_ahead_are_not_timed():
    "Of 13 steps, one and the four made ahead are the start, and four the end"
    def made(*cbs):
        dls = get_dls('digits', bs=16, loader='files', device='cpu', max_images=270)
        return time_learner(Learner(dls, torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)), loss_func=CrossEntropyLossFlat(), cbs=cbs), {})
    found = [made(), made(cb := FeedCallback(1))]
    cb.release()
    assert [(o['n_steps'], o['n_rounds']) for o in found]==[(13, 12), (13, 4)]
    assert found[0]['n_images']==found[1]['n_images']
