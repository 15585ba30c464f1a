"""The captured step against the eager one, on a CPU: the tape repeats a step's operations with the tensors and numbers of the
recording, as a CUDA graph does, so that a rate, a batch or a gradient that was forgotten shows here too."""
from functools import partial

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback, TrainEvalCallback
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.schedule import ParamScheduler  # noqa: F401 (adds fit_one_cycle and others to Learner)
from fastai.callback.tracker import TerminateOnNaNCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.learner import Learner, load_learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.optimizer import SGD, Adam, RAdam
from fastai.torch_core import params, set_seed
from torch import nn

from gpubench import fast, optim
from gpubench.data import get_dls
from gpubench.fast import DeferredRecorder, GraphedStepCallback, TapeCapture, keep_pages, loss_readers, speed_up, swap_recorder
from gpubench.optim import FusedOptimizer, fuse
from gpubench.timing import StepTimerCallback


def network():
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(.2)),
        nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 10)))


class FuseCallback(Callback):
    "The eager side: the same optimizer and the same arithmetic, without a graph"
    order, leaves_the_loss = TrainEvalCallback.order, True
    def before_fit(self): fuse(self.learn.opt).capturable = True


def learner(graph, cbs=(), drop_last=True, model=network, path='.', **kwargs):
    set_seed(0)
    dls = get_dls('digits', bs=32, loader='resident', device='cpu', max_images=230, size=8)
    dls.train.drop_last = drop_last
    cb = GraphedStepCallback(capture=TapeCapture()) if graph else FuseCallback()
    learn = Learner(dls, model(), cbs=[cb, *cbs], loss_func=CrossEntropyLossFlat(), metrics=accuracy, path=path,
                    splitter=lambda m: [params(m[0]), params(m[1])], **kwargs)
    learn.remove_cb(learn.progress)
    learn.logger = lambda *args: None
    return learn


def state(learn):
    "All that a training leaves behind: weights, buffers, moments, losses, what was logged"
    moments = [o for p in learn.model.parameters() for k,o in sorted(learn.opt.state[p].items()) if k!='force_train']
    tensors = [*learn.model.parameters(), *learn.model.buffers(), *learn.recorder.losses]
    return ([o.detach().clone() for o in tensors], [o.clone() if isinstance(o, torch.Tensor) else o for o in moments],
            [list(o) for o in learn.recorder.values], list(learn.recorder.lrs))


def assert_same(a, b):
    for x,y in zip(state(a), state(b), strict=True):
        assert len(x)==len(y)
        assert all(torch.equal(o, p) if isinstance(o, torch.Tensor) else o==p for o,p in zip(x, y)), (x, y)


def one_cycle(learn): learn.fit_one_cycle(2, 1e-2)
def twice(learn):
    learn.fit(1, 1e-2)
    learn.fit(2, 1e-3, wd=.1)
def freezing(learn):
    learn.fit_one_cycle(1, 1e-2)
    learn.freeze()
    learn.fit_one_cycle(1, slice(1e-3, 1e-2))
    learn.unfreeze()
    learn.fit_one_cycle(1, slice(1e-4, 1e-2))
def fine_tuned(learn): learn.fine_tune(2, 1e-2)
def found(learn):
    learn.fit(1, 1e-2)
    learn.lr_find(num_it=12, show_plot=False)
    learn.fit(1, 1e-2)
def predicting(learn):
    learn.fit(1, 1e-2)
    learn.get_preds()
    learn.validate()
    learn.predict(np.zeros((8, 8), np.uint8))
    learn.fit(1, 1e-2)


class GoBackCallback(Callback):
    "Goes back to an earlier state, with the optimizer, in the middle of an epoch"
    leaves_the_loss = True
    def before_batch(self):
        if not self.training or self.epoch==0: return
        if self.iter==0: self.learn.save('middle')
        if self.iter==4: self.learn.load('middle')


CASES = dict(
    one_cycle=(one_cycle, {}), two_fits=(twice, {}), short_last_batch=(one_cycle, dict(drop_last=False)), freeze=(freezing, {}),
    fine_tune=(fine_tuned, {}), lr_find=(found, {}), predict=(predicting, {}),
    sgd=(one_cycle, dict(opt_func=partial(SGD, mom=.9))), l2=(one_cycle, dict(opt_func=partial(Adam, decouple_wd=False))),
    decayed_norms=(one_cycle, dict(wd_bn_bias=True)), clip=(one_cycle, dict(cbs=lambda: [GradientClip(.1)])),
    accumulate=(one_cycle, dict(cbs=lambda: [GradientAccumulation(80)])),
    accumulate_and_clip=(twice, dict(cbs=lambda: [GradientAccumulation(64), GradientClip(.1)], drop_last=False)),
    load=(one_cycle, dict(cbs=lambda: [GoBackCallback()])),
    bf16=(one_cycle, dict(cbs=lambda: [MixedPrecision(amp_mode='bf16')])))


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('case', CASES)
def test_a_captured_step_trains_as_the_eager_one_does_bit_by_bit(case, tmp_path):
    act, kwargs = CASES[case]
    learners = [learner(graph, path=tmp_path, **kwargs | dict(cbs=kwargs.get('cbs', list)())) for graph in (False, True)]
    for o in learners:
        set_seed(1)
        o.dls.train.rng.seed(1)
        act(o)
    assert learners[1].graphed_step.why_not=='' and learners[1].graphed_step.n_replays>=4
    assert_same(*learners)
    assert '_do_one_batch' not in vars(learners[1])
    grads = [[p.grad if p.grad is not None else torch.zeros_like(p) for p in o.model.parameters()] for o in learners]
    assert all(torch.equal(a, b) for a,b in zip(*grads))


# each a mistake that is easily made in a captured step, planted: what the graph trains then differs from the eager step
def frozen_numbers(mp):
    advance = optim.StepPlan.advance
    mp.setattr(optim.StepPlan, 'advance', lambda o: advance(o) if not max(o.steps) else setattr(o, 'steps', [n+1 for n in o.steps]))
def frozen_rate(mp): freeze_hyper(mp, 'lr')
def frozen_beta(mp): freeze_hyper(mp, 'mom')
def freeze_hyper(mp, name):
    coefs, first = optim.step_coefs, {}
    mp.setattr(optim, 'step_coefs', lambda recipe, hyper, *args:
               coefs(recipe, hyper | {name: first.setdefault(name, hyper[name])}, *args))
def missed_copy(mp): mp.setattr(fast._Step, 'fill', lambda self, learn: None)
def kept_gradients(mp):
    mp.setattr(FusedOptimizer, 'zero_grad', lambda self: None)
    capture = fast._Step.capture
    def adding(self, *args):
        self.share = 1
        mp.setattr(torch, '_foreach_zero_', lambda o: None)
        return capture(self, *args)
    mp.setattr(fast._Step, 'capture', adding)
def trained_twice(mp): mp.setattr(TapeCapture, 'warm_up', lambda self, step: (step(), step())[1])
def norms_updated_twice(mp):
    backward = fast._Step.backward
    def twice(self):
        with torch.no_grad(): self.forward(self.xb, self.yb)
        return backward(self)
    mp.setattr(fast._Step, 'backward', twice)
def stale_moments(mp):
    mp.setattr(optim.StepPlan, 'is_current', lambda *args: True)
    mp.setattr(GraphedStepCallback, '_is_same', lambda self: True)
def decayed_norms(mp):
    coefs = optim.step_coefs
    mp.setattr(optim, 'step_coefs', lambda recipe, hyper, do_wd, step: coefs(recipe, hyper, True, step))
def repeated_dropout(mp):
    record = TapeCapture.record
    def repeating(self, step):
        replay, out = record(self, step)
        rng = torch.get_rng_state()
        return (lambda: (torch.set_rng_state(rng), replay())), out
    mp.setattr(TapeCapture, 'record', repeating)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('plant', [frozen_numbers, frozen_rate, frozen_beta, missed_copy, kept_gradients, trained_twice,
                                   norms_updated_twice, stale_moments, decayed_norms, repeated_dropout], ids=lambda o: o.__name__)
def test_the_comparison_notices_a_planted_mistake(plant, tmp_path, monkeypatch):
    def train(graph):
        learn = learner(graph, path=tmp_path, cbs=[GoBackCallback()], wd=.1)
        set_seed(1)
        learn.dls.train.rng.seed(1)
        one_cycle(learn)
        return learn
    eager = train(False)
    plant(monkeypatch)
    graphed = train(True)
    with pytest.raises(AssertionError): assert_same(eager, graphed)


def test_autocast_ends_with_the_step(tmp_path):
    seen = []
    class Look(Callback):
        leaves_the_loss = True
        def after_batch(self): seen.append(torch.is_autocast_enabled('cuda'))
    learn = learner(True, cbs=[MixedPrecision(amp_mode='bf16'), Look()])
    learn.fit(1)
    assert learn.graphed_step.n_replays and not any(seen)


class Hooked(Callback):
    "Registers a hook, as fastai's ActivationStats does"
    def before_fit(self): self.handle = self.learn.model[0].register_forward_hook(lambda *args: None)
class OwnLoss(Callback):
    "Computes the loss with a number of its own, as fastai's MixUp does"
    def before_train(self): self.learn.loss_func = self.own_loss
    def own_loss(self, pred, y): return nn.functional.cross_entropy(pred, y)*(1+self.epoch)
class Random(nn.Module):
    def forward(self, x): return x*np.random.rand()
class Item(nn.Module):
    def forward(self, x): return x if x.sum().item()>-1e9 else -x
class Inside(Callback):
    def after_pred(self): pass


@pytest.mark.parametrize('says, kwargs', [
    ('random numbers on the CPU', dict(model=lambda: nn.Sequential(network(), Random()))),
    ('was read on the host', dict(model=lambda: nn.Sequential(network(), Item()))),
    ('inside acts within the step', dict(cbs=[Inside()])),
    ("isn't fastai's Adam or SGD", dict(opt_func=RAdam)),
    ('The network has hooks', dict(cbs=[Hooked()])),
    ('A callback computes the loss', dict(cbs=[OwnLoss()])),
    ('fp16 looks at the gradients', dict(cbs=[MixedPrecision()]))])
def test_what_cannot_be_captured_trains_eagerly_and_one_sentence_says_why(says, kwargs):
    learn = learner(True, **kwargs)
    with pytest.warns(UserWarning, match='run eagerly instead of as a graph') as caught: learn.fit(1, 1e-3)
    assert says in learn.graphed_step.why_not and sum('as a graph' in str(o.message) for o in caught)==1
    assert len(learn.recorder.losses)==5 and all(torch.isfinite(o) for o in learn.recorder.losses)


def test_poison_in_the_static_batch_after_a_replay_changes_nothing():
    class Poison(Callback):
        leaves_the_loss = True
        def after_batch(self):
            for step in self.graphed_step.steps.values():
                for o in step.xb: o.fill_(float('nan'))
    plain, poisoned = (learner(True, cbs=cbs) for cbs in ([], [Poison()]))
    for o in (plain, poisoned):
        set_seed(1)
        o.dls.train.rng.seed(1)
        o.fit(2)
    assert_same(plain, poisoned)


def test_an_error_in_an_epoch_leaves_a_learner_that_trains():
    class Stop(Callback):
        leaves_the_loss = True
        def after_batch(self):
            if self.training and self.iter==4 and self.epoch==0: raise KeyboardInterrupt
    learn = learner(True)
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=Stop())
    learn.remove_cbs([Stop])
    assert len(learn.recorder.losses)==4          # the recorder comes after this callback
    learn.fit(1)
    learn.remove_cb(learn.graphed_step)
    assert '_do_one_batch' not in vars(learn)
    learn.fit(1)


def test_the_timer_reports_the_replay_as_one_phase():
    learn = learner(True, cbs=[StepTimerCallback()])
    learn.fit(2)
    df = learn.step_timer.to_df()
    assert df.graph_ms.notna().sum()==learn.graphed_step.n_replays==7 and df[df.graph_ms.notna()].backward_ms.isna().all()
    assert len(df)==10


def test_a_deferred_recorder_records_the_same(tmp_path):
    plain, late = (learner(False) for _ in range(2))
    swap_recorder(late, DeferredRecorder(every=3))
    for o in (plain, late):
        set_seed(1)
        o.dls.train.rng.seed(1)
        one_cycle(o)
    assert_same(plain, late)
    assert loss_readers(late)==[] and plain.recorder.iters==late.recorder.iters
    late.add_cb(TerminateOnNaNCallback())
    assert loss_readers(late)==['terminate_on_na_n']


def test_a_learner_that_was_sped_up_is_exported_without_gpubench(tmp_path):
    learn = learner(True, path=tmp_path)
    swap_recorder(learn, DeferredRecorder())
    learn.fit(1)
    learn.export('a.pkl')
    data = (tmp_path/'a.pkl').read_bytes()
    assert b'gpubench.fast' not in data and b'gpubench.optim' not in data
    assert load_learner(tmp_path/'a.pkl').model is not None


def test_speed_up_on_a_cpu_and_back():
    learn = learner(False)
    learn.remove_cbs([FuseCallback])
    before = [type(o) for o in learn.cbs]
    with speed_up(learn) as fast:
        learn.fit(1)
        assert type(learn.opt) is FusedOptimizer
    assert [type(o) for o in learn.cbs]==before and type(learn.opt) is not FusedOptimizer
    found = fast.to_df().set_index('part').on.to_dict()
    assert found=={'channels_last': True, 'recorder': False, 'fused step': True, 'CUDA graph': False, 'pages': True}
    assert next(learn.model.parameters()).is_contiguous()
    with pytest.raises(ValueError, match='precision'): speed_up(learn, precision='fp8')


def test_only_glibc_keeps_its_pages(): assert keep_pages('Darwin').startswith('Only glibc') and keep_pages()==''
