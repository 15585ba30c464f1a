"""Validation with larger batches has fastai's metrics, and only loaders that can have them do."""

import pytest
import torch
from fastai.callback.core import Callback
from fastai.data.core import TfmdDL
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import F1Score, Perplexity, RocAuc, accuracy
from fastai.torch_core import set_seed
from torch import nn

from gpubench.data.loaders import get_dls
from gpubench.step.capture import TapeCapture
from gpubench.step.fast import GraphedStepCallback, SpeedUp


pytestmark = pytest.mark.usefixtures('one_thread')

class Sizes(Callback):
    "Images of each batch of a validation"
    graph_safe = 'counts'
    def before_validate(self): self.seen = []
    def before_batch(self):
        if not self.training: self.seen.append(len(self.x))

def learner(valid=None):
    set_seed(0)
    dls = get_dls('digits', bs=32, loader='resident', device='cpu', max_images=410, size=8)
    dls.loaders[1] = valid(dls.valid) if valid else dls.valid.new(bs=5)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(.2), nn.Flatten(), nn.Linear(144, 10))
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=[accuracy, Perplexity(), F1Score(average='macro'), RocAuc()],
                    cbs=[GraphedStepCallback(capture=TapeCapture()), Sizes()])
    learn.remove_cb(learn.progress)
    learn.logger = lambda *args: None
    return learn

@pytest.mark.filterwarnings('ignore')
def test_a_fit_with_larger_batches_has_the_same_metrics():
    stock, larger = learner(), learner()
    done = SpeedUp(larger)
    done.enlarge_validation()
    for o in stock, larger:
        set_seed(1)
        o.dls.train.rng.seed(1)
        o.fit(3, 1e-2)
    torch.testing.assert_close(*[torch.tensor([list(v) for v in o.recorder.values]) for o in (stock, larger)])
    for a,b in zip(stock.model.parameters(), larger.model.parameters(), strict=True): assert torch.equal(a, b)
    assert (stock.sizes.seen, larger.sizes.seen)==([5]*16+[2], [82]) and 'at once instead of 5' in str(done)
    assert larger.graphed_step.n_replays
    preds = [o.get_preds(with_loss=True) for o in (stock, larger)]
    for a,b in zip(*preds, strict=True): torch.testing.assert_close(a, b)
    done.undo()
    larger.validate()
    assert larger.sizes.seen==stock.sizes.seen==[5]*16+[2]

class OwnDL(TfmdDL): "May rely on its batch size"

@pytest.mark.parametrize('valid', [lambda dl: dl.new(bs=5, drop_last=True), lambda dl: OwnDL(list(range(8)), bs=4), lambda dl: [1, 2]],
                         ids=['drops the rest', 'own', 'no loader'])
def test_a_loader_that_may_rely_on_its_batch_size_keeps_it(valid):
    learn = learner(valid)
    before = getattr(learn.dls.valid, 'bs', None)
    done = SpeedUp(learn)
    done.enlarge_validation()
    assert done.rows==[] and getattr(learn.dls.valid, 'bs', None)==before
