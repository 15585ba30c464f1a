"Batch transforms on the device: pipelines as users have them"
from functools import partial

import torch
from fastai.data.core import Pipeline
from fastai.data.transforms import IntToFloatTensor, Normalize
from fastai.torch_core import TensorCategory, TensorImage, TensorImageBW
from fastai.vision.augment import Saturation, aug_transforms

from gpubench.data.batch_tfms import batch_transforms
from gpubench.data.loaders import BatchAugment

# float32 samples within 1e-4 of a pixel of the right place: some 50 roundings of 6e-8, times half of 64 pixels
MAX_OFF = 1e-3

def apply(known, batch):
    for f in known: batch = f(batch)
    return batch

def device(fs, batch, split_idx=0, n_rest=0): # What runs them as a graph would
    known, rest = batch_transforms(fs, split_idx, tuple(map(type, batch)))
    assert len(rest)==n_rest
    return partial(apply, known)

def stock(fs, split_idx=0): return Pipeline(fs, split_idx=split_idx)

def test_gray_images_and_half_known_pipelines():
    batch = TensorImageBW((torch.rand(4, 1, 28, 28)*255).byte()), TensorCategory(torch.arange(4))
    norm = Normalize.from_stats([.13], [.31], cuda=False)
    fs = [IntToFloatTensor(), *aug_transforms(xtra_tfms=[Saturation(.5)]), norm, BatchAugment()]
    f, rest = device(fs, batch), stock(fs)
    torch.manual_seed(1); a = f(batch)
    torch.manual_seed(1); b = rest(batch)
    assert [type(o) for o in a]==[type(o) for o in b]==[TensorImageBW, TensorCategory]
    assert torch.allclose(a[0], b[0], rtol=0, atol=MAX_OFF) and a[1] is batch[1]
    class Own(BatchAugment): pass
    device([*fs[:2], Own(), norm], batch, n_rest=2)

def test_the_users_objects_stay_as_they_are():
    fs = [IntToFloatTensor(), *aug_transforms(size=8, min_scale=.5)]
    batch = TensorImage((torch.rand(4, 3, 20, 20)*255).byte()),
    parts = [p for o in fs for p in (o, *getattr(o, 'coord_fs', []), *getattr(o, 'fs', []))]
    before, pixels = [dict(vars(o)) for o in parts], batch[0].clone()
    device(fs, batch)(batch)
    assert torch.equal(batch[0], pixels) and [vars(o) for o in parts]==before
    assert len(parts)==7
