"What a feed gives a Learner, compared with fastai's own loaders"
import copy
import gc
import random
import threading
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from fastai.callback.core import Callback, CancelTrainException
from fastai.callback.schedule import Learner   # with fine_tune and lr_find
from fastai.data.block import CategoryBlock, DataBlock, MultiCategoryBlock, RegressionBlock
from fastai.data.core import DataLoaders
from fastai.data.load import SkipItemException
from fastai.data.transforms import ColReader, IndexSplitter
from fastai.interpret import ClassificationInterpretation
from fastai.learner import load_learner
from fastai.losses import BaseLoss, CrossEntropyLossFlat
from fastai.torch_basics import ItemTransform, Transform
from fastai.torch_core import set_seed
from fastai.vision.augment import CropPad, FlipItem, RandomCrop, RandomResizedCrop, RandTransform, Resize, aug_transforms
from fastai.vision.core import PILImageBW, TensorImage
from fastai.vision.data import BBoxBlock, ImageBlock, MaskBlock, PointBlock, SegmentationDataLoaders
from PIL import Image
import fastai.callback.data        # noqa: F401  weighted_dataloaders, partial_dataloaders
import fastai.callback.progress    # noqa: F401  no_bar

from gpubench.data import get_dls
from gpubench.feed import Budget, FeedCallback, ItemStages

N, SIZE = 12, 16


def pixels(i, w=24, h=20, channels=3):
    return np.random.default_rng(i).integers(0, 256, (h, w, channels)).astype(np.uint8)


def smooth(i, w=24, h=20):
    "An image on which a crop's place shows: its pixels' values grow from left to right and from top to bottom"
    x, y = np.meshgrid(np.linspace(0, 255, w), np.linspace(0, 255, h))
    return np.stack([x, y, np.full_like(x, 20*i)], -1).astype(np.uint8)


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    "N images of two classes, of several sizes"
    folder = tmp_path_factory.mktemp('images')
    out = [folder/f'{"ab"[i%2]}_{i:02d}.png' for i in range(N)]
    for i,f in enumerate(out): Image.fromarray(pixels(i, 20+i, 30-i)).save(f)
    return out


def label(f): return f.name[0]
def number(f): return float(f.stem[2:])
def is_valid(items): return list(range(8)), list(range(8, len(items)))


def make_dls(files, item_tfms=Resize(SIZE, 'squish'), blocks=(ImageBlock, CategoryBlock), get_y=label, bs=4, num_workers=0, kind='dataloaders', block={}, **kwargs):
    db = DataBlock(blocks, get_y=get_y, splitter=is_valid, item_tfms=item_tfms, **block)
    return getattr(db, kind)(files, bs=bs, num_workers=num_workers, device='cpu', **kwargs)


class SumLoss(BaseLoss):
    "Of anything: the prediction's mean plus the targets', so that no kind of label is special"
    def __init__(self): super().__init__(torch.nn.MSELoss)
    def __call__(self, pred, *ys, **kwargs): return (pred.float().mean()-sum(o.float().mean() for o in ys)).square()


class AnyModel(torch.nn.Module):
    "Takes any images; has dropout, so that the order of PyTorch's draws matters"
    def __init__(self):
        super().__init__()
        self.dropout, self.weight = torch.nn.Dropout(.3), torch.nn.Parameter(torch.tensor([.5, .1]))
    def forward(self, *xs):
        x = torch.cat([o.float().flatten(1).mean(1, keepdim=True) for o in xs], 1).mean(1, keepdim=True)/255
        return self.dropout(x*self.weight)


class Seen(Callback):
    "All batches"
    order = -5
    def after_create(self): self.batches = []
    def before_batch(self): self.batches.append((self.training, *[o.clone() for o in (*self.xb, *self.yb)]))


def learner(dls, *cbs, loss=None, **kwargs):
    return Learner(dls, AnyModel(), loss_func=loss or SumLoss(), lr=.01, cbs=[Seen(), *cbs], **kwargs)


def quiet(learn, f):
    with learn.no_bar(), learn.no_logging(): return f(learn)


def fitted(make, *cbs, n=2, seed=3, **kwargs):
    set_seed(seed, reproducible=True)
    learn = learner(make(), *cbs, **kwargs)
    quiet(learn, lambda o: o.fit(n))
    return learn


def check_same(ours, stock, max_off=0):
    assert len(ours.seen.batches)==len(stock.seen.batches)>0
    for a,b in zip(ours.seen.batches, stock.seen.batches):
        assert len(a)==len(b) and a[0]==b[0]
        for x,y in zip(a[1:], b[1:]):
            assert (type(x), x.dtype, x.shape)==(type(y), y.dtype, y.shape)
            assert not x.numel() or (x.double()-y.double()).abs().max()<=max_off


def check_fit(make, n_done=4, why_not='', max_off=0, **kwargs):
    "All batches, and all draws of the training, are those of stock fastai"
    feed = FeedCallback(2)
    ours, stock = fitted(make, feed, **kwargs), fitted(make, **kwargs)
    assert (feed.n_done, feed.why_not)==(n_done, why_not)
    check_same(ours, stock, max_off)
    assert (ours.model.weight-stock.model.weight).abs().max()<=max_off
    feed.release()
    return ours


frame = lambda files: pd.DataFrame(dict(name=[f.stem for f in files], y=[label(f) for f in files], many=['a b' if i%3 else 'b' for i in range(N)],
                                        z=np.arange(N)/2, valid=[i>=8 for i in range(N)]))
def from_frame(blocks, get_y, files, **kwargs):
    get_x = ColReader('name', pref=f'{files[0].parent}/', suff='.png')
    return make_dls(frame(files), blocks=blocks, get_y=get_y, block=dict(get_x=get_x), **kwargs)


KINDS = dict(
    files=make_dls,
    gray=partial(make_dls, blocks=(ImageBlock(PILImageBW), CategoryBlock)),
    frame=partial(from_frame, (ImageBlock, CategoryBlock), ColReader('y')),
    multi=partial(from_frame, (ImageBlock, MultiCategoryBlock), ColReader('many', label_delim=' ')),
    regression=partial(from_frame, (ImageBlock, RegressionBlock), ColReader('z')),
    regressions=partial(make_dls, blocks=(ImageBlock, RegressionBlock(3)), get_y=lambda f: [number(f), 1., .25]),
    to_image=partial(make_dls, blocks=(ImageBlock, ImageBlock), get_y=lambda f: f),
    to_mask=partial(make_dls, blocks=(ImageBlock, MaskBlock(['x', 'y'])), get_y=lambda f: f),
    two_inputs=lambda files: make_dls(files, blocks=(ImageBlock, ImageBlock(PILImageBW), CategoryBlock), get_y=None,
                                      block=dict(n_inp=2, getters=[lambda o: o, lambda o: files[-1-files.index(o)], label])),
    no_label=partial(make_dls, blocks=(ImageBlock,), get_y=None),
    ints=partial(make_dls, blocks=(ImageBlock, None), get_y=lambda f: int(number(f))),
    mixed_numbers=partial(make_dls, blocks=(ImageBlock, None), get_y=lambda f: number(f)/2 if number(f)%2 else int(number(f)/2)),
    weighted=lambda files, **kwargs: make_dls(files, kind='weighted_dataloaders', wgts=np.arange(N), **kwargs),
    partial_set=lambda files, **kwargs: DataBlock((ImageBlock, CategoryBlock), get_y=label, splitter=is_valid).datasets(files).partial_dataloaders(
        5, bs=2, num_workers=0, device='cpu', after_item=[Resize(SIZE, 'squish'), *ImageBlock().item_tfms], drop_last=False),
    augmented=partial(make_dls, batch_tfms=None, block=dict(batch_tfms=aug_transforms(size=12))),
)
@pytest.mark.parametrize('kind', KINDS)
def test_a_fit_has_the_batches_of_stock_fastai(files, kind):
    check_fit(lambda: KINDS[kind](files), max_off=1e-5*(kind=='augmented'))


@pytest.mark.parametrize('kwargs', [dict(shuffle=False), dict(drop_last=False, bs=3), dict(drop_last=True, bs=3), dict(bs=64, drop_last=False), dict(val_bs=3),
                                    dict(n=6), dict(num_workers=2)], ids=str)
def test_the_loader_s_own_options(files, kwargs):
    check_fit(lambda: make_dls(files, **kwargs), n=1 if 'num_workers' in kwargs else 2, n_done=2 if 'num_workers' in kwargs else 4)
