"What a step timer does on a device that works behind the host's back"
from fastai.callback.core import Callback
from fastai.test_utils import synth_learner
import fastai.callback.progress   # noqa: F401  gives Learner its no_bar

from gpubench.timing import HostMarks, StepTimerCallback


def test_an_epoch_ends_when_the_device_has_done_its_work(monkeypatch):
    now_s = [0.]
    class Behind(HostMarks):
        "The host queues in no time, and the device then has work for 3 s"
        def wait(self): now_s[0] += 3.
    timer = StepTimerCallback(clock=lambda: now_s[0])
    monkeypatch.setattr(StepTimerCallback, '_marks', lambda self: Behind(self.clock))
    learn = synth_learner(n_trn=4, cbs=[timer])
    with learn.no_bar(), learn.no_logging(): learn.fit(2)
    epochs = timer.epochs_df()
    assert epochs.train_s.tolist()==[3., 3.] and epochs.closing_ms.tolist()==[3000., 3000.]


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
