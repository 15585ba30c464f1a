"What a step timer does on a device that works behind the host's back"
import torch
from fastai.callback.core import Callback
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.test_utils import synth_learner
from fastai.torch_basics import ItemTransform
import fastai.callback.progress   # noqa: F401  gives Learner its no_bar

from gpubench.data import images
from gpubench.data.loaders import get_dls
from gpubench.watch.timing import DeviceMarks, StepTimerCallback


def test_work_that_waits_on_the_device_is_in_its_steps_and_in_the_epoch_once(monkeypatch):
    "The host queues in no time, and the device works for 1 s a step: its marks are passed later than they are made"
    now_s, device_s = [0.], [0.]
    class Behind(DeviceMarks):
        def __init__(self): self.clock = lambda: now_s[0]
        def mark(self): return max(now_s[0], device_s[0])
        def ms(self, a, b): return 1e3*(b-a)
        def passed(self, mark): return mark<=now_s[0]
        def wait(self): now_s[0] = max(now_s[0], device_s[0])
        def reuse(self, marks): pass
    class WorkCallback(Callback):
        def after_step(self): device_s[0] = max(now_s[0], device_s[0])+1.
    timer = StepTimerCallback(clock=lambda: now_s[0])
    monkeypatch.setattr(StepTimerCallback, '_marks', lambda self: Behind())
    learn = synth_learner(n_trn=4, cbs=[WorkCallback(), timer])
    with learn.no_bar(), learn.no_logging(): learn.fit(2)
    epochs = timer.epochs_df()
    assert timer.to_df().step_ms.tolist()==[1000.]*8
    assert epochs.train_s.tolist()==[4., 4.] and epochs.closing_ms.tolist()==[0., 0.]


def test_batches_after_a_validation_in_mid_epoch_are_not_counted_as_trained():
    "fastai leaves `training` False behind it, so that the rest of the epoch isn't trained"
    class LookCallback(Callback):
        n_steps = 0
        def after_step(self): self.n_steps += 1
        def after_batch(self):
            if self.training and self.iter==2: self.learn.validate()
    look, timer = LookCallback(), StepTimerCallback()
    learn = synth_learner(n_trn=6, cbs=[look, timer])
    with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-3)
    assert look.n_steps==6==len(timer.steps)==timer.epochs_df().n_steps.sum()


def test_the_phases_of_a_feed(monkeypatch):
    "A batch takes 2 ms to make, 19 to copy and 3 to transform; each shows in its own column"
    now_s = [0.]
    def later(ms, f):
        def run(*args, **kwargs):
            now_s[0] += ms/1e3
            return f(*args, **kwargs)
        return run
    monkeypatch.setattr(images.ItemStages, 'in_order', later(2, images.ItemStages.in_order))
    monkeypatch.setattr(images, 'to_device', later(19, images.to_device))
    dls = get_dls('digits', bs=8, loader='files', device='cpu', max_images=40, size=8)
    dls.train.after_batch.add(ItemTransform(later(3, lambda o: o)))
    cb, timer = images.FeedCallback(2), StepTimerCallback(clock=lambda: now_s[0])
    learn = Learner(dls, torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), loss_func=CrossEntropyLossFlat(), cbs=[cb, timer])
    with learn.no_bar(), learn.no_logging(): learn.fit(2)
    assert (cb.why_not, cb.n_done)==('', 4)
    times = timer.to_df(skip=1)[['wait_ms', 'copy_ms', 'transform_ms', 'step_ms']].round(6)
    assert times.values.tolist()==[[2., 19., 3., 24.]]*4                # the two epochs' second and third batches
    assert timer.epochs_df().first_batch_ms.round(6).tolist()==[2., 2.]
    cb.release()
