"""Validations by replays against fastai's own, on a CPU: the tape repeats a batch's operations with the tensors of the recording,
so that a batch, a weight or a result that lies where nobody expects it shows here, too."""
import random

import pytest
import torch
from fastai.callback.core import Callback, CancelValidException
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.schedule import ParamScheduler  # noqa: F401 (adds fit_one_cycle to Learner)
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau
from fastai.data.load import DataLoader
from fastai.learner import AvgMetric, Learner, Metric
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import DiceMulti, F1Score, LossMetric, Perplexity, RocAuc, accuracy
from fastai.torch_core import set_seed
from torch import nn

from gpubench.step import validation
from gpubench.step.capture import TapeCapture, ValidStep
from gpubench.data.loaders import get_dls
from gpubench.step.fast import DeferredRecorder, EMACallback, GraphedStepCallback, SpeedUp, swap_recorder
from gpubench.step.validation import LateReader
from on_tape import FuseCallback, autocast  # noqa: F401 (a fixture)


N_VALID = 17                                           # batches of a validation: 16 of five images, one of two


@pytest.fixture(autouse=True)
def pays_early(monkeypatch): monkeypatch.setattr(validation, 'N_TO_PAY', 10)

pytestmark = pytest.mark.usefixtures('one_thread')

def network():
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(.2), nn.AvgPool2d(2),
                         nn.Flatten(), nn.Linear(36, 10))

def without_dropout(): return nn.Sequential(*[o for o in network() if not isinstance(o, nn.Dropout)])

def learner(graph, cbs=(), model=network, loss_func=CrossEntropyLossFlat, metrics=lambda: accuracy, make=Learner, late=True):
    set_seed(0)
    dls = get_dls('digits', bs=32, loader='resident', device='cpu', max_images=410, size=8)
    dls.loaders[1] = dls.valid.new(bs=5)
    cb = GraphedStepCallback(capture=TapeCapture()) if graph else FuseCallback()
    learn = make(dls, model(), cbs=[cb, *cbs], loss_func=loss_func(), metrics=metrics())
    learn.remove_cb(learn.progress)
    if late: swap_recorder(learn, DeferredRecorder())
    learn.logger = lambda *args: None
    return learn

def flat(o):
    if isinstance(o, (tuple, list)): return [p for part in o for p in flat(part)]
    return [o]
def both(act, **kwargs):
    "The results of `act` without graphs and with them are the same, bit by bit; returns the second Learner's `Validation`"
    learners, results = [], []
    for graph in False, True:
        learn = learner(graph, **{k: v() if k=='cbs' else v for k,v in kwargs.items()})
        set_seed(1)
        learn.dls.train.rng.seed(1)
        learners.append(learn)
        results.append(flat(act(learn)))
    def is_equal(a, b): return type(a) is type(b) and (torch.equal(a, b) if isinstance(a, torch.Tensor) else a==b or a!=a and b!=b)
    is_same = [is_equal(a, b) for a,b in zip(*results, strict=True)]
    assert all(is_same), [(i, a, b) for i,(a,b,o) in enumerate(zip(*results, is_same)) if not o]
    return learners[1].graphed_step.valid

def fitted(learn, n=3):
    learn.fit_one_cycle(n, 1e-2)
    weights = [o.detach().clone() for o in (*learn.model.parameters(), *learn.model.buffers())]
    return [list(o) for o in learn.recorder.values], torch.stack(list(learn.recorder.losses)).tolist(), weights
def after_a_fit(act):
    def both(learn):
        learn.fit(1, 1e-2)
        return act(learn)
    return both


class Random(nn.Module):
    "Draws on the device in each forward pass"
    def forward(self, x): return x+torch.rand_like(x)
def segmenting(): return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 10, 3, padding=1))
class PixelLoss(nn.Module):
    "The same class for all pixels of an image"
    def forward(self, pred, y): return nn.functional.cross_entropy(pred, y[:, None, None].expand(-1, *pred.shape[2:]))
def of_pixels(pred, y): return (pred.argmax(1)==y[:, None, None]).float().mean()
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = network()
    def forward(self, x): return dict(scores=self.body(x), label=self.body(x).argmax(1))
def of_scores(pred, y): return nn.functional.cross_entropy(pred['scores'], y)
def of_labels(pred, y): return (pred['label']==y).float().mean()
def many(): return [accuracy, Perplexity(), F1Score(average='macro'), RocAuc(), DiceMulti(), AvgMetric(lambda p, y: p.std())]
def by_last_batch(pred, y): return pred.shape[0]

FITS = dict(
    metrics=dict(metrics=many), stock_recorder=dict(metrics=many, late=False), no_metrics=dict(metrics=list), average=dict(cbs=lambda: [EMACallback(.9)]),
    known_callbacks=dict(cbs=lambda: [EarlyStoppingCallback(patience=9), ReduceLROnPlateau(patience=1)]),
    random=dict(model=lambda: nn.Sequential(Random(), network())), a_number=dict(metrics=lambda: by_last_batch),
    segmentation=dict(model=segmenting, loss_func=PixelLoss, metrics=lambda: of_pixels),
    two_outputs=dict(model=Two, loss_func=lambda: of_scores, metrics=lambda: of_labels))

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('case', FITS)
def test_a_fit_validates_as_fastai_does_bit_by_bit(case):
    valid = both(fitted, **FITS[case])
    assert (valid.why_not, valid.n_replays) == ('', 14+15+15)      # a shape's first batch, the one that is compared, and the short one aren't

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_a_validation_rounds_as_mixed_precision_does(mode, autocast):
    valid = both(lambda learn: list(learn.validate()), cbs=lambda: [MixedPrecision(amp_mode=mode)])
    assert (valid.why_not, valid.n_replays) == ('', 14)
    assert not torch.is_autocast_enabled('cpu')
    assert list(valid.learn.validate())!=list(learner(True).validate())                # it did round


def without_targets(learn):
    xs = [(o[0],) for o in (learn.dls.valid.dataset[torch.tensor([i])] for i in range(30))]
    dl = DataLoader([(x[0].float().squeeze(0),) for x in xs], bs=2)
    return learn.get_preds(dl=dl)[0]
def shuffled(learn): return learn.get_preds(dl=learn.dls.valid.new(shuffle=True), reorder=True, with_loss=True)
PREDS = dict(
    plain=lambda o: o.get_preds(), everything=lambda o: o.get_preds(with_input=True, with_loss=True, with_decoded=True), shuffled=shuffled,
    validate=lambda o: list(o.validate()), training_set=lambda o: o.get_preds(ds_idx=0, with_loss=True), no_targets=without_targets,
    dropped=lambda o: o.get_preds(dl=o.dls.valid.new(drop_last=True), with_loss=True), reduced_after=lambda o: (o.get_preds(with_loss=True), list(o.validate())),
    twice=lambda o: [o.get_preds(inner=i, with_loss=not i) for i in (True, False, True)])

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('case, fit', [(o, fit) for o in PREDS for fit in (False, True) if fit or o!='twice'])   # recorder needs a log
def test_predictions_are_fastais_bit_by_bit(case, fit):
    valid = both(after_a_fit(PREDS[case]) if fit else PREDS[case])
    assert valid.why_not=='' and valid.n_replays>=8

def test_predictions_are_saved_batch_by_batch(tmp_path):
    def saved(learn):
        (folder := tmp_path/str(len(list(tmp_path.iterdir())))).mkdir()
        learn.get_preds(save_preds=folder, save_targs=folder)
        return [torch.load(folder/str(i)) for i in range(N_VALID)]
    assert both(saved).n_replays==14


class At(Callback):
    "Calls a function at an event of validation"
    def __init__(self, event, do): setattr(self, event, lambda: None if self.training else do(self))
class Declared(At): graph_safe = True
class InTraining(Callback):
    run_valid = False
    def after_batch(self): self.seen = self.iter
class Own(Learner):
    def one_batch(self, i, b): super().one_batch(i, b)
class Seen(Metric):
    name, value = 'seen', 1.
    def accumulate(self, learn): assert len(learn.xb)
class Keeps(CrossEntropyLossFlat):
    def __call__(self, pred, y):
        self.kept = pred.std()
        return super().__call__(pred, y)
class Reads(nn.Module):
    def forward(self, x): return x if x.mean().item()>-9 else -x
class Draws(nn.Module):
    def forward(self, x): return x*random.random()
class Counts(nn.Module):
    n = 0
    def forward(self, x):
        self.n += 1
        return x+self.n
class Labels(nn.Module):
    def forward(self, x): return x, 'text'
def hooked():
    model = network()
    model[0].register_forward_hook(lambda m, i, out: out*2)
    return model
def of_first(pred, y): return nn.functional.cross_entropy(pred[0], y)
REFUSED = dict(
    stranger=(dict(cbs=lambda: [At('after_pred', lambda cb: setattr(cb.learn, 'pred', cb.learn.pred*2))]), 'At may change'),
    own_method=(dict(make=Own), 'its own one_batch'), metric=(dict(metrics=lambda: Seen()), 'seen may look'),
    kept_by_the_loss=(dict(loss_func=Keeps, metrics=lambda: LossMetric('kept')), 'kept may look'), hook=(dict(model=hooked), 'hooks'),
    reads=(dict(model=lambda: nn.Sequential(Reads(), network())), "can't wait for a value"), draws=(dict(model=lambda: nn.Sequential(Draws(), network())), 'A replay gave other'),
    counts=(dict(model=lambda: nn.Sequential(Counts(), network())), 'A replay gave other'),
    text=(dict(model=lambda: nn.Sequential(network(), Labels()), loss_func=lambda: of_first, metrics=list), 'more than tensors'))

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('case', REFUSED)
def test_what_a_replay_would_leave_out_stays_fastais(case):
    kwargs, why = REFUSED[case]
    def act(learn):
        random.seed(0)
        return list(learn.validate())
    valid = both(act, **kwargs)
    assert why in valid.why_not and valid.n_replays==0
    learn = valid.learn
    assert 'after_batch' not in vars(learn.recorder)

@pytest.mark.parametrize('cbs', [lambda: [Declared('after_batch', lambda cb: None)], lambda: [InTraining()]])
def test_who_leaves_batches_of_a_validation_alone_is_no_stranger_there(cbs):
    assert both(lambda o: list(o.validate()), cbs=cbs).n_replays==14

def test_a_declared_callback_sees_each_batch_that_was_replayed():
    seen = []
    def look(cb): seen.append((cb.learn.pred, cb.learn.loss))
    valid = both(lambda o: list(o.validate()), cbs=lambda: [Declared('after_batch', look)])
    for a,b in zip(seen[:N_VALID], seen[N_VALID:]): assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    assert valid.n_replays==14 and len(seen)==2*N_VALID


def scaled(cb):
    with torch.no_grad(): cb.learn.model[-1].weight.mul_(.5)
def moved(cb): cb.learn.model[-1].weight.data = cb.learn.model[-1].weight.data.clone()*.5
def dropping(cb): cb.learn.model[3].train()
def other_layer(cb): cb.learn.model[2] = nn.Tanh()
def other_number(cb): cb.learn.model[1].eps *= 2
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('change', [scaled, moved, dropping, other_layer, other_number], ids=lambda o: o.__name__)
def test_what_a_callback_changes_before_a_validation_is_followed(change):
    valid = both(fitted, cbs=lambda: [At('before_validate', change)])
    assert (valid.why_not, valid.n_replays)==('', 42)             # a new graph in each epoch

class Changing(Callback):
    run_valid = False
    def after_batch(self): self.learn.model[1].eps *= 1.5
def test_what_a_callback_changes_in_training_batches_is_followed():
    valid = both(lambda o: o.fit(3, 0.) or [list(v) for v in o.recorder.values], cbs=lambda: [Changing()], model=without_dropout)
    assert (valid.why_not, valid.n_replays)==('', 42)

@pytest.mark.parametrize('change', [scaled, moved, other_layer], ids=lambda o: o.__name__)
def test_graphs_do_not_outlive_what_anybody_may_do_after_a_validation(change):
    def act(learn):
        def valid():
            learn.validate()
            return learn.get_preds(inner=True)
        first = valid()
        change(learn.recorder)
        return first, valid()
    both(act)

@pytest.mark.parametrize('change, n_new', [(scaled, 0), (moved, 1), (other_layer, 1)], ids=lambda o: getattr(o, '__name__', o))
def test_a_graph_that_outlives_a_validation_is_made_anew_where_something_lies_elsewhere(change, n_new, monkeypatch):
    n_made, capture = [], ValidStep.capture
    monkeypatch.setattr(ValidStep, 'capture', lambda self, *args: (n_made.append(1), capture(self, *args)))
    def act(learn):
        if hasattr(learn, 'graphed_step'): learn.graphed_step.alone = True
        learn.validate()
        change(learn.recorder)
        return list(learn.validate())
    assert both(act).why_not=='' and len(n_made)==1+n_new

@pytest.mark.parametrize('n_to_pay, n_replays', [(17*3, 14+15+15), (17*3+1, 0)])
def test_a_graph_is_made_where_the_fit_has_batches_that_pay_for_it(n_to_pay, n_replays, monkeypatch):
    monkeypatch.setattr(validation, 'N_TO_PAY', n_to_pay)
    valid = both(fitted)
    assert (valid.n_replays, valid.why_not)==(n_replays, '')
    valid.learn.validate()
    assert valid.n_replays==0

def test_shapes_that_come_once_get_no_graph(monkeypatch):
    valid = both(lambda o: list(o.validate(dl=[(torch.randn(i, 1, 8, 8), torch.zeros(i, dtype=torch.long)) for i in range(2, 30)])))
    assert not valid.steps and not valid.why_not
    def shapes(learn):
        set_seed(2)
        return list(learn.validate(dl=[(torch.randn(2+i%7, 1, 8, 8), torch.zeros(2+i%7, dtype=torch.long)) for i in range(28)]))
    assert len(both(shapes).steps)==validation.MAX_SHAPES


class OneMemory(list):
    "Brings each batch in the memory of the last one"
    def __iter__(self):
        x, y = (o.clone() for o in self[0])
        for b in super().__iter__():
            x.copy_(b[0])
            y.copy_(b[1])
            yield x, y
def test_a_loader_may_use_its_memory_again():
    dl = OneMemory((torch.full((2, 1, 8, 8), float(i)), torch.full((2,), i%10)) for i in range(20))
    assert both(lambda o: list(o.validate(dl=dl))).n_replays==18

def test_a_validation_without_batches_and_a_first_one_without_targets():
    both(lambda o: [len(o.validate(dl=[])), o.get_preds(dl=DataLoader([(torch.zeros(1, 8, 8),)]*20, bs=1))[0]])

def stop(cb):
    if cb.iter==9: raise CancelValidException()
def interrupted(cb):
    if cb.iter==9: raise KeyboardInterrupt
@pytest.mark.parametrize('do', [stop, interrupted], ids=lambda o: o.__name__)
def test_an_interrupted_validation_has_read_its_batches_and_leaves_nothing(do):
    def act(learn):
        cb = Declared('before_batch', do)
        try: learn.validate(cbs=cb)
        except KeyboardInterrupt: learn._end_cleanup()
        learn.remove_cbs([o for o in learn.cbs if isinstance(o, Declared)])
        metric = learn.recorder.loss
        found = metric.total, metric.count
        return found, list(learn.validate())
    valid = both(act)
    assert not {'after_batch'} & vars(valid.learn.recorder).keys() and valid.n_replays==14


@pytest.mark.parametrize('mib, n_late', [(1e-9, 1), (.001, 5), (32, N_VALID)])
def test_what_waits_on_the_device_is_bounded(mib, n_late, monkeypatch):
    monkeypatch.setattr(validation, 'MAX_LATE_MIB', mib)
    n_waiting, keep = [], LateReader.keep
    def watched(self):
        n_waiting.append(len(self.kept)+1)
        keep(self)
    monkeypatch.setattr(LateReader, 'keep', watched)
    both(lambda o: o.get_preds(with_loss=True))
    assert max(n_waiting)==n_late                          # a batch of five has 240 bytes of predictions and targets


def same_batch(mp): mp.setattr(ValidStep, 'fill', lambda self, xb, yb: None)
def same_memory(mp): mp.setattr(torch, 'clone', lambda o: o)
def wrong_order(mp):
    read = LateReader.read
    def reversed_read(self):
        self.kept.reverse()
        read(self)
    mp.setattr(LateReader, 'read', reversed_read)

@pytest.mark.parametrize('plant', [same_batch, same_memory, wrong_order], ids=lambda o: o.__name__)
def test_the_comparison_notices_a_planted_mistake(plant, monkeypatch):
    plant(monkeypatch)
    try: valid = both(lambda o: o.get_preds(with_loss=True))
    except AssertionError: return
    assert valid.why_not                                    # the trial of the graph has noticed it


def test_the_table_has_the_batches_that_were_replayed():
    learn = learner(True)
    done = SpeedUp(learn)
    done.has('CUDA graph', GraphedStepCallback)
    learn.fit(3, 1e-2)
    assert '44 batches of validation' in done.to_df().why[0]
    learn.add_cb(At('after_pred', lambda cb: None))
    learn.validate()
    assert "Validation is fastai's own: A graph doesn't see what At may change" in done.to_df().why[0]
