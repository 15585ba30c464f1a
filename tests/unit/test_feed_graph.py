"Steps that contain the batch transforms of a feed, compared with those that don't: on a GPU if there is one, else on a tape"
import gc
import weakref
from itertools import combinations

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.mixup import MixUp
from fastai.callback.schedule import Learner   # fastai's, with its schedules
from fastai.data.block import CategoryBlock, DataBlock, RegressionBlock
from fastai.data.transforms import Normalize
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import Dice, accuracy, mse
from fastai.torch_core import set_seed
from fastai.vision.augment import Resize, aug_transforms
from fastai.vision.data import ImageBlock, MaskBlock
from PIL import Image
from torch import nn
import fastai.callback.progress    # noqa: F401  no_bar

from gpubench.step import capture
from gpubench.step.capture import TapeCapture
from gpubench.step.fast import GraphedStepCallback
from gpubench.data.images import FeedCallback
from gpubench.step.layout import ChannelsLastCallback

N_TRAIN, N, SIZE, BS = 15, 18, 16, 3
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'

def graph(**kwargs): return GraphedStepCallback(capture=None if DEVICE=='cuda' else TapeCapture(), **kwargs)


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    "N images of two classes, each with a mask"
    folder, random = tmp_path_factory.mktemp('images'), np.random.default_rng(0)
    (folder/'masks').mkdir()
    out = [folder/f'{"ab"[i%2]}_{i:02d}.png' for i in range(N)]
    for f in out:
        Image.fromarray(random.integers(0, 256, (26, 30, 3)).astype(np.uint8)).save(f)
        Image.fromarray(random.integers(0, 2, (26, 30)).astype(np.uint8)).save(mask(f))
    return out


def label(f): return f.name[0]
def number(f): return float(f.stem[2:])/N
def mask(f): return f.parent/'masks'/f.name
def is_valid(items): return list(range(N_TRAIN)), list(range(N_TRAIN, N))


def make_dls(files, block=CategoryBlock, get_y=label, **kwargs):
    tfms = [*aug_transforms(size=SIZE, p_lighting=1., **kwargs), Normalize.from_stats([.5]*3, [.2]*3)]
    db = DataBlock((ImageBlock, block), get_y=get_y, splitter=is_valid, item_tfms=Resize(SIZE+8), batch_tfms=tfms)
    return db.dataloaders(files, bs=BS, num_workers=0, device=DEVICE)


def classifier(n_out=2):
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, n_out))
def segmenter(): return nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))

KINDS = dict(
    classes=lambda files: dict(dls=make_dls(files), model=classifier(), metrics=accuracy),
    crops=lambda files: dict(dls=make_dls(files, min_scale=.5), model=classifier(), metrics=accuracy), # drawn before the graph
    numbers=lambda files: dict(dls=make_dls(files, RegressionBlock, number), model=classifier(1), metrics=mse),
    masks=lambda files: dict(dls=make_dls(files, MaskBlock(['x', 'y']), mask), model=segmenter(), metrics=Dice(), loss_func=CrossEntropyLossFlat(axis=1)))


def fitted(files, *cbs, kind='classes', n=2, train_metrics=False):
    set_seed(0, reproducible=True)
    learn = Learner(**KINDS[kind](files), lr=.01, cbs=[FeedCallback(2), *cbs])
    learn.recorder.train_metrics = train_metrics
    with learn.no_bar(), learn.no_logging(): learn.fit(n)
    return learn


def graphed(files, *cbs, **kwargs):
    learn = fitted(files, graph(), *cbs, **kwargs)
    assert (learn.graphed_step.why_not, learn.feed.why_not)==('', '') and learn.graphed_step.n_replays>0
    return learn


def numbers(learn): return [o for row in learn.recorder.values for o in row], [o.item() for o in learn.recorder.losses]


@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('train_metrics', [False, True])
def test_losses_and_metrics_are_those_without_a_graph(files, kind, train_metrics):
    ours, without = (f(files, kind=kind, train_metrics=train_metrics) for f in (graphed, fitted))
    for a,b in zip(numbers(ours), numbers(without), strict=True): assert a==pytest.approx(b, rel=1e-3, nan_ok=True)


class Feeds(Callback):
    "Whose batch transforms, of earlier epochs, are still alive"
    graph_safe = 'counts'
    def before_fit(self): self.refs, self.alive = [], []
    def before_batch(self):
        if self.training and not self.iter: self.refs.append(weakref.ref(self.dl.transform))
    def before_validate(self):
        gc.collect()
        self.alive.append([o() is not None for o in self.refs[:-1]])

@pytest.mark.slow
def test_a_graph_keeps_what_its_batch_transforms_read(files):
    "They have tensors on the device, such as the mean that is subtracted"
    assert graphed(files, Feeds(), n=3).feeds.alive==[[], [True], [True, False]]


class Last(Callback):
    "What an epoch's last batch looks like after the training"
    def __init__(self): self.seen = []
    def after_train(self): self.seen += [(o.shape, o.float().mean().item()) for o in (*self.xb, *self.yb)]

def test_mixed_targets_are_those_that_metrics_of_the_training_get(files):
    learn = graphed(files, MixUp(.4), last := Last(), kind='numbers')
    means = [round(sum(o)/BS, 4) for o in combinations(map(number, files[:N_TRAIN]), BS)]
    targets = [mean for shape,mean in last.seen if len(shape)==1]
    assert len(targets)==2 and not {round(o, 4) for o in targets} & {*means}


@pytest.mark.parametrize('kind', ['classes', 'masks'])
def test_channels_last(files, kind):
    cb = ChannelsLastCallback()
    learn = graphed(files, cb, kind=kind)
    assert (cb.why_not, cb.n_done)==('', 2*N_TRAIN//BS)
    assert numbers(learn)[1]==pytest.approx(numbers(fitted(files, kind=kind))[1], rel=1e-3)


@pytest.mark.parametrize('event', ['before_train', 'after_train', 'before_validate', 'after_epoch'])
def test_removed_within_a_fit(files, event):
    class Remove(Callback): pass
    setattr(Remove, event, lambda self: self.learn.remove_cbs([o for o in self.cbs if isinstance(o, (FeedCallback, GraphedStepCallback))]))
    learn = fitted(files, graph(), Remove(), n=2)
    assert len(learn.recorder.values)==2 and not hasattr(learn, 'feed') and not {'all_batches', '_do_one_batch'} & vars(learn).keys()


def test_no_validation_set(files):
    set_seed(0, reproducible=True)
    db = DataBlock((ImageBlock, CategoryBlock), get_y=label, splitter=lambda o: (list(range(len(o))), []), item_tfms=Resize(SIZE))
    learn = Learner(db.dataloaders(files, bs=BS, num_workers=0, device=DEVICE), classifier(), cbs=[FeedCallback(2), graph()])
    with learn.no_bar(), learn.no_logging(): learn.fit(2)
    assert (learn.feed.n_done, learn.feed.why_not)==(2, '') and learn.graphed_step.n_replays
    learn.feed.decode_all()


class SmallerCallback(Callback):
    "Progressive resizing: nothing that the network's step computes with, so it is declared"
    graph_safe = True
    def before_epoch(self): self.dls.train.after_batch.fs[1] = aug_transforms(size=SIZE-4*self.epoch)[0]

def test_a_declared_callback_may_change_the_loader_between_epochs(files):
    class Sizes(Callback):
        graph_safe, seen = 'counts', ()
        def after_train(self): self.seen = (*self.seen, self.xb[0].shape[-1])
    learn = graphed(files, SmallerCallback(), Sizes(), n=3)
    assert learn.sizes.seen==(SIZE, SIZE-4, SIZE-8)


def test_transforms_that_cannot_be_captured_run_before_the_graph(files, monkeypatch):
    own = capture.with_batch_tfms
    def waits(transform, xb, yb):
        if transform: xb[0].sum().item()               # as a transform that reads a value on the host
        return own(transform, xb, yb)
    monkeypatch.setattr(capture, 'with_batch_tfms', waits)
    learn, eager = graphed(files), fitted(files)
    assert [float(o) for o in learn.recorder.losses]==pytest.approx([float(o) for o in eager.recorder.losses], rel=1e-5)


class Asks(nn.Module):
    "What no graph can hold; and the mean of each batch"
    def __init__(self):
        super().__init__()
        self.linear, self.means = nn.Linear(3, 2), []
    def forward(self, x):
        if self.training: self.means.append(x.mean().item())
        return self.linear(x.mean((2, 3)))

def test_after_a_failed_capture_transforms_run_once(files):
    def means(*cbs):
        db = DataBlock((ImageBlock, CategoryBlock), get_y=label, splitter=is_valid, item_tfms=Resize(SIZE),
                       batch_tfms=Normalize.from_stats([.5]*3, [.2]*3))
        dls = db.dataloaders(files, bs=BS, num_workers=0, device=DEVICE)
        learn = Learner(dls, Asks(), loss_func=CrossEntropyLossFlat(), cbs=[FeedCallback(2), *cbs])
        with learn.no_bar(), learn.no_logging(): learn.fit(4)
        return learn.model.means
    with pytest.warns(UserWarning, match='.item'): ours = means(graph())
    assert np.abs(ours).max()<1.5*np.abs(means()).max()
