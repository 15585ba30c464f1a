"What a feed gives a Learner, compared with fastai's own loaders"
import copy
import gc
import multiprocessing
import os
import random
import signal
import time
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from fastai.callback.core import Callback, CancelTrainException
from fastai.callback.schedule import Learner   # with fine_tune and lr_find
from fastai.data.block import CategoryBlock, DataBlock, MultiCategoryBlock, RegressionBlock
from fastai.data.core import DataLoaders, Datasets, TfmdDL
from fastai.data.load import SkipItemException
from fastai.data.transforms import Categorize, ColReader, Normalize, parent_label
from fastai.learner import load_learner
from fastai.losses import BaseLoss, CrossEntropyLossFlat
from fastai.tabular.data import TabularDataLoaders
from fastai.tabular.learner import tabular_learner
from fastai.torch_basics import ItemTransform, Transform
from fastai.torch_core import TensorCategory, set_seed
from fastai.vision import core as vision
from fastai.vision.augment import CropPad, FlipItem, RandomCrop, RandomResizedCrop, Resize
from fastai.vision.core import PILImage, PILImageBW, ToTensor
from fastai.vision.data import BBoxBlock, BBoxLblBlock, ImageBlock, MaskBlock, PointBlock
from PIL import Image, ImageFile
import fastai.callback.data        # noqa: F401  weighted_dataloaders, partial_dataloaders
import fastai.callback.progress    # noqa: F401  no_bar

from gpubench.data.loaders import get_dls
from gpubench.data import images
from gpubench.data.images import FeedCallback, ItemStages
from gpubench.data.item_tfms import Recipe

N, SIZE = 12, 16

def pixels(i, w=24, h=20, channels=3):
    return np.random.default_rng(i).integers(0, 256, (h, w, channels)).astype(np.uint8)

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

def make_dls(files, item_tfms=None, blocks=(ImageBlock, CategoryBlock), get_y=label, bs=4, num_workers=0, kind='dataloaders', block={}, **kwargs):
    db = DataBlock(blocks, get_y=get_y, splitter=is_valid, item_tfms=item_tfms or Resize(SIZE, 'squish'), **block)
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

def on(**events):
    "A callback with these functions"
    cb = Callback()
    for k,f in events.items(): setattr(cb, k, f)
    return cb

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
    mixed_numbers=partial(make_dls, blocks=(ImageBlock, None), get_y=lambda f: number(f)/2 if number(f)%2 else int(number(f)/2)),
    arrays=partial(make_dls, blocks=(ImageBlock(PILImageBW), CategoryBlock), block=dict(get_x=lambda f: 200*np.array(Image.open(f).convert('L')).astype(np.uint16))),
    some_arrays=partial(make_dls, block=dict(get_x=lambda f: np.array(Image.open(f)) if number(f)==5 else f)),
    weighted=lambda files, **kwargs: make_dls(files, kind='weighted_dataloaders', wgts=np.arange(N), **kwargs),
)
@pytest.mark.parametrize('kind', KINDS)
def test_a_fit_has_the_batches_of_stock_fastai(files, kind):
    n_done = dict(arrays=0, some_arrays=2).get(kind, 4)     # passes; of some, the validation's
    check_fit(lambda: KINDS[kind](files), n_done, "Its images don't all come from files." if n_done<4 else '')


@pytest.mark.parametrize('kwargs', [dict(shuffle=False), dict(drop_last=False, bs=3), dict(drop_last=True, bs=3),
                                    dict(bs=64, drop_last=False), dict(val_bs=3), dict(n=6), dict(num_workers=2)], ids=str)
def test_the_loader_s_own_options(files, kwargs):
    check_fit(lambda: make_dls(files, **kwargs))


def test_get_dls_from_files():
    make = lambda: get_dls('digits', bs=8, loader='files', device='cpu', max_images=40, size=8)
    check_fit(make, max_off=1e-6)                    # Normalize multiplies instead of dividing


# --- transforms

FIXED = {'squish': Resize(SIZE, 'squish'), 'oblong': Resize((12, 30), 'squish'), 'larger': Resize(70, 'squish'),
         'bicubic': Resize(SIZE, 'squish', resamples=(3, 0)), 'crop_pad': CropPad(18), 'crop_pad_border': CropPad((40, 12), 'border'), 'two': [CropPad(18), Resize(10, 'squish')]}
@pytest.mark.parametrize('name', FIXED)
def test_fixed_transforms_bit_by_bit(files, name):
    "Of images and masks, whose pixels aren't interpolated"
    check_fit(lambda: make_dls(files, FIXED[name], (ImageBlock, MaskBlock), get_y=lambda f: f), n=1, n_done=2)


METHODS = [('crop', 'reflection', 16), ('crop', 'reflection', (12, 30)), ('crop', 'reflection', 70), ('pad', 'zeros', (24, 16)),
           ('pad', 'border', (12, 30)), ('pad', 'reflection', 40)]
DRAWING = {f'{method}_{mode}_{size}': Resize(size, method, pad_mode=mode) for method,mode,size in METHODS} | dict(
    bicubic=Resize(SIZE, resamples=(Image.Resampling.BICUBIC, Image.Resampling.NEAREST)), rrc=RandomResizedCrop(SIZE),
    rrc_small=RandomResizedCrop((20, 9), min_scale=.01, ratio=(.2, 5)), random_crop=RandomCrop(15), random_crop_pads=RandomCrop(33),
    flip=[Resize(SIZE), FlipItem()], crop_flip=[CropPad(22), RandomCrop(20), FlipItem(.7)],
    presize=[Resize(40, 'squish'), RandomResizedCrop(SIZE, min_scale=.3)])
@pytest.mark.parametrize('name', DRAWING)
def test_drawing_transforms(files, name):
    "Given the same draws one level off in a few values, seldom two; a validation set, where they don't draw, bit by bit"
    blocks = (ImageBlock, MaskBlock)
    make = lambda: make_dls(files, DRAWING[name], blocks, get_y=lambda f: f, bs=1)
    ours, stock = fitted(make, feed := FeedCallback(2), n=1), fitted(make, n=1)
    assert (feed.n_done, feed.why_not)==(2, '')
    shapes = [[[o.shape for o in b[1:]] for b in learn.seen.batches] for learn in (ours, stock)]
    assert shapes[0]==shapes[1]
    for o in ours, stock: o.seen.batches = o.seen.batches[8:]
    check_same(ours, stock)
    dl = make().train
    dl.before_iter()
    stages, differs = ItemStages(dl), []
    for i,own,_ in stages.items(range(8)):
        random.seed(i)
        theirs, images = dl.do_item(i), stages.recipe.finish(stages.recipe.decode(stages.files(i, own)), i)
        for x,image in zip(theirs, images):
            off = (x.as_subclass(torch.Tensor).int()-torch.from_numpy(image).int()).abs()
            assert off.max()<=(2 if x.ndim==3 else 0) and (off>1).float().mean()<.001
            differs.append((off>0).float().mean())
    assert np.mean(differs)<.04


def test_draws_depend_on_the_seed_but_not_on_the_workers(files):
    make = lambda: make_dls(files, [RandomResizedCrop(SIZE), FlipItem()])
    one, three, other = (fitted(make, FeedCallback(n), seed=seed) for n,seed in ((1, 3), (3, 3), (3, 4)))
    check_same(three, one)
    assert not torch.equal(one.seen.batches[0][1], other.seen.batches[0][1])


class Whole(ItemTransform):
    order = 4
    def encodes(self, o): return [PILImage.create(np.array(o[0])[:5*len(o)]), *o[1:]]
class OwnResize(Resize):
    def encodes(self, x:Image.Image): return x.resize((SIZE, SIZE-2))
def squared(x:Image.Image): return x.resize((SIZE, SIZE))
def replaced():
    out = Resize(SIZE)
    out.before_call = lambda b, split_idx: setattr(out, 'pcts', (0., 1.))
    return out
@pytest.mark.parametrize('make_tfms', [lambda: squared, lambda: OwnResize(SIZE), lambda: [Resize(SIZE, 'squish'), Whole()], replaced])
def test_a_loader_with_an_own_item_transform_is_left_to_fastai(files, make_tfms):
    feed, make = FeedCallback(2), lambda: make_dls(files, make_tfms(), num_workers=2, bs=3)
    ours, stock = fitted(make, feed, n=1), fitted(make, n=1)
    assert feed.n_done==0 and "isn't known as fastai's own." in feed.why_not
    check_same(ours, stock)


class Twice(Transform):
    order = 20
    def __call__(self, b, split_idx=None, **kwargs): return b[0], b[1], b[1].float()
def test_a_batch_transform_may_make_another_batch(files):
    tfms = [Twice(), Normalize.from_stats([.5]*3, [.2]*3)]
    check_fit(lambda: make_dls(files, block=dict(batch_tfms=tfms)), n=1, n_done=2)


# --- only fastai's own functions are replaced, or what they make is kept

def turned(fn, mode=None):
    "As people set their photographs upright"
    image = Image.open(fn)
    image.load()
    return image.transpose(Image.Transpose.ROTATE_90).convert(mode or 'RGB')
def create_turned(cls, fn, **kwargs): return cls(turned(fn))
def at_the_left(self, b, split_idx): self.pcts = 0., 0.
REPLACED = dict( # what a user sets, where, and why images are off
    load_image=(vision, 'load_image', turned, 'It has its own fastai.vision.core.load_image.'),
    create=(PILImage, 'create', classmethod(create_turned), 'It has its own PILImage.create, '),
    open_args=(PILImage, '_open_args', dict(mode='HSV'), ''),
    crop_pad=(Image.Image, 'crop_pad', lambda self, *args, resize_to, **kwargs: self.resize(resize_to), 'It has its own PILImage.crop_pad, '),
    draws=(Resize, 'before_call', at_the_left, "Its item transform Resize isn't known as fastai's own."))
@pytest.mark.parametrize('within', [False, True])
@pytest.mark.parametrize('name', REPLACED)
def test_what_a_user_puts_in_the_place_of_a_function(files, monkeypatch, name, within):
    "Before a fit, or within it, when pixels are kept; it counts from the next pass on"
    owner, k, value, why_not = REPLACED[name]
    tfm = Resize(SIZE, **{} if name=='draws' else dict(method='squish'))
    def run(*cbs):
        with monkeypatch.context() as patch:
            set_seed(1, reproducible=True)
            learn = learner(make_dls(files, tfm, batch_tfms=[]), *cbs)
            def replace(): patch.setattr(owner, k, value)
            if not within: replace()
            quiet(learn, lambda o: o.fit(3, cbs=on(after_epoch=lambda: learn.epoch==0 and replace())))
        if within and name=='draws': learn.seen.batches = learn.seen.batches[3:]    # the epoch before has crops of its own
        return learn
    ours, stock = run(feed := FeedCallback(2)), run()
    check_same(ours, stock)
    assert feed.why_not.startswith(why_not) and feed.n_done==(2 if why_not and within else 0 if why_not else 6)


def any_of(choices, seed=1):
    "A function with a random generator of its own"
    generator = random.Random(seed)
    return lambda o: generator.choice(choices)
class Half(Transform):
    order = 2
    def __init__(self): self.generator = random.Random(1)
    def encodes(self, o:TensorCategory): return o if self.generator.random()<.5 else TensorCategory(0)
OWN = dict(
    labels=lambda files: make_dls(files, get_y=any_of('ab')),
    everybody_s_generator=lambda files: make_dls(files, get_y=lambda o: random.choice('ab')),
    images=lambda files: make_dls(files, block=dict(get_x=any_of(files))),
    a_transform=lambda files: Datasets(files, [[PILImage.create], [label, Categorize(), Half()]], splits=is_valid(files)).dataloaders(
        bs=4, num_workers=0, device='cpu', after_item=[Resize(SIZE, 'squish'), ToTensor()]),
)
@pytest.mark.parametrize('name', OWN)
def test_a_user_s_functions_run_for_each_item_in_each_pass(files, name): check_fit(lambda: OWN[name](files), n=3, n_done=6)


def labels_in_a_dict(files, folder, **kwargs):
    labels = {f: label(f) for f in files}
    return make_dls(files, get_y=labels.get, **kwargs), lambda learn: labels.update(dict.fromkeys(files[:5], 'b'))
def items(k, *ids):
    "Those of a column"
    def make(files, folder):
        def change(learn): learn.dls.train_ds.tls[k].items[:len(ids)] = [files[i] for i in ids]
        return make_dls(files), change
    return make
def cells(files, folder):
    def change(learn): learn.dls.train_ds.tls[1].items.iloc[:4, 1] = 'b'
    return from_frame((ImageBlock, CategoryBlock), ColReader('y'), files), change
def a_vocabulary(files, folder, **kwargs):
    def change(learn):
        numbers = learn.dls.train_ds.tls[1].tfms.fs[-1].vocab.o2i
        numbers['a'], numbers['b'] = numbers['b'], numbers['a']
    return make_dls(files, **kwargs), change
CHANGED = dict(labels=labels_in_a_dict, items=items(1, 1, 3, 5), images=items(0, 2, 0, 1), cells=cells, a_vocabulary=a_vocabulary,
               fastais_parent_label=lambda files, folder: (make_dls(files, get_y=parent_label, blocks=(ImageBlock, CategoryBlock(vocab=[files[0].parent.name, 'z']))),
                   lambda learn: learn.dls.train_ds.tls[1].items.__setitem__(0, files[0].parent/'z'/'z.png')))
@pytest.mark.parametrize('between', ['epochs', 'fits'])
@pytest.mark.parametrize('name', CHANGED)
def test_what_a_callback_changes_is_seen_by_the_next_pass(files, tmp_path, name, between):
    def run(*cbs):
        set_seed(1, reproducible=True)
        dls, change = CHANGED[name](files, tmp_path)
        learn = learner(dls, *cbs)
        changes = on(**{'after_epoch' if between=='epochs' else 'after_fit': lambda: change(learn)})
        for _ in range(2): quiet(learn, lambda o: o.fit(2, cbs=changes))
        return learn
    ours, stock = run(feed := FeedCallback(2)), run()
    assert (feed.n_done, feed.why_not)==(4, '')
    check_same(ours, stock)


# --- what a Learner does

def do_fits(learn):
    learn.fit_one_cycle(1)
    learn.freeze()
    learn.fit(1)
    learn.unfreeze()
    learn.fine_tune(1, freeze_epochs=1)


def do_preds(learn):
    learn.fit(1)
    options = (dict(), dict(with_input=True, with_loss=True, with_decoded=True), dict(ds_idx=0), dict(ds_idx=0, reorder=False),
               dict(dl=learn.dls.train), dict(dl=learn.dls.valid.new(bs=3)), dict(dl=[learn.dls.valid.one_batch()]))
    return [learn.get_preds(**o) for o in options], learn.validate(), learn.validate(ds_idx=0)


def do_tta(learn):
    learn.fit(1)
    return learn.tta(n=2), learn.tta(n=1, item_tfms=[Resize(8, 'squish'), ToTensor]), learn.validate()


def do_predict(learn):
    learn.fit(1)
    item = learn.dls.valid_ds.items[1]
    dl = learn.dls.test_dl(learn.dls.valid_ds.items[:3], with_labels=True)
    return [*learn.predict(item)[1:], learn.get_preds(dl=dl), learn.validate(dl=dl)]


def do_lr_find(learn):
    learn.lr_find(num_it=5, show_plot=False)
    learn.fit(1)


def do_new_dls(learn):
    learn.fit(1)
    old, learn.dls = learn.dls, make_dls(learn.files, Resize(8, 'squish'))
    learn.fit(1)
    learn.dls = old
    learn.fit(1)


def do_grow(learn):
    learn.fit(1)
    for o in learn.dls.train_ds.tls: o.items.extend(learn.files[8:11])
    learn.dls = DataLoaders(*(o.new() for o in learn.dls.loaders))
    learn.fit(1)


def do_change_tfms(learn):
    learn.fit(1)
    for dl in learn.dls.loaders: dl.after_item.resize.size = (10, 6)
    learn.fit(1)
    for dl in learn.dls.loaders: dl.after_item.add(CropPad(5))
    learn.fit(1)
    learn.dls.valid_ds.tls[1].items[0] = learn.dls.valid_ds.items[1]                    # somebody mends a label
    learn.fit(1)


def do_interrupted(learn):
    def stop(e):
        if learn.iter==1: raise e
    for event,e in ('after_pred', KeyboardInterrupt), ('before_batch', ValueError('a user')), ('after_pred', KeyboardInterrupt):
        with pytest.raises(type(e) if isinstance(e, Exception) else e): learn.fit(1, cbs=on(**{event: partial(stop, e)}))
    learn.fit(1, cbs=on(after_pred=partial(stop, CancelTrainException)))
    learn.fit(1)


def do_predict_in_a_callback(learn):
    out = []
    learn.fit(2, cbs=on(after_epoch=lambda: out.append(learn.get_preds(inner=True)),
                        before_validate=lambda: out.append(learn.dl.dataset.split_idx)))
    return out


OPERATIONS = [do_fits, do_preds, do_tta, do_predict, do_lr_find, do_new_dls, do_grow, do_change_tfms, do_interrupted, do_predict_in_a_callback]
@pytest.mark.parametrize('f', OPERATIONS, ids=lambda o: o.__name__)
def test_operations(files, tmp_path, f):
    "What a Learner does and returns, and the draws after it, are those of stock fastai"
    results = []
    for cbs in [FeedCallback(2)], []:
        set_seed(5, reproducible=True)
        learn = learner(make_dls(files), *cbs, loss=ByClass(), path=tmp_path)
        learn.files = files
        result = quiet(learn, f)
        quiet(learn, lambda o: o.fit(1))
        results.append((learn, result, torch.rand(1), random.random(), np.random.rand()))
        if cbs: assert (cbs[0].n_done, cbs[0].why_not)==(2, '')
    (ours, a, *draws), (stock, b, *stock_draws) = results
    check_same(ours, stock)
    assert flat(a)==flat(b) and torch.equal(ours.model.weight, stock.model.weight) and draws==stock_draws
    assert ours.dl is None and type(ours.dls.train) is TfmdDL
    ours.feed.release()


class ByClass(CrossEntropyLossFlat):
    "Of `AnyModel`, which returns two activations"


def flat(o):
    "The numbers in any nest"
    if o is None or isinstance(o, (str, int, float, bool)): return [o]
    if isinstance(o, (torch.Tensor, np.ndarray, np.generic)): return [tuple(o.shape), np.array(o).tolist()]
    return [p for q in o for p in flat(q)]


def test_copied_and_exported_after_an_interrupted_fit(files, tmp_path):
    learn = learner(make_dls(files), feed := FeedCallback(2), path=tmp_path)
    def stop(): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): quiet(learn, lambda o: o.fit(1, cbs=on(before_batch=stop)))
    copied = copy.deepcopy(learn)                       # with its `dl`, which is that of the interrupted pass
    learn.export()
    loaded = load_learner(tmp_path/'export.pkl')
    quiet(loaded, lambda o: o.predict(files[0]))
    quiet(copied, lambda o: o.fit(1))
    assert feed.n_done==1 and not any('gpubench' in type(o).__module__ for o in (*loaded.cbs, *copied.cbs))
    quiet(learn, lambda o: o.fit(1))
    assert (feed.n_done, feed.why_not)==(2, '')


# --- what goes wrong

def test_a_skipped_label(files):
    def get_y(f):
        if f in (files[2], files[9]): raise SkipItemException
        return number(f)
    check_fit(lambda: make_dls(files, blocks=(ImageBlock, RegressionBlock), get_y=get_y, bs=3))


def broken(f): f.write_bytes(f.read_bytes()[:200])
def not_an_image(f): f.write_text('no image')
def gone(f): f.unlink()
@pytest.mark.parametrize('when', ['before', 'between', 'within'])
@pytest.mark.parametrize('harm', [broken, not_an_image, gone])
def test_a_broken_file_raises_as_in_fastai_and_is_named(files, tmp_path, harm, when):
    faults = []
    for cbs in [FeedCallback(2)], []:
        mine = [tmp_path/f'{len(cbs)}{f.name[1:]}' for f in files]
        for a,b in zip(files, mine): b.write_bytes(a.read_bytes())
        learn = learner(make_dls(mine, blocks=(ImageBlock,), get_y=None), *cbs, loss=SumLoss())
        if when=='between': quiet(learn, lambda o: o.fit(1))
        if when!='within': harm(mine[5])
        harmed = on(after_train=lambda: learn.epoch==0 and when=='within' and harm(mine[5]))
        with pytest.raises(Exception) as fault: quiet(learn, lambda o: o.fit(3, cbs=harmed))
        faults.append(fault.value)
        if cbs: assert mine[5].name in ''.join([str(fault.value), *getattr(fault.value, '__notes__', [])])
    assert type(faults[0]) is type(faults[1])


def test_a_file_that_is_replaced_within_a_fit(tmp_path):
    "By one of the same size, even with the same time of change"
    files = [tmp_path/f'a_{i}.bmp' for i in range(12)]
    for i,f in enumerate(files): Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(f)
    def replace():
        before = files[3].stat()
        Image.fromarray(np.full((8, 8, 3), 200+learn.epoch, np.uint8)).save(files[3])
        os.utime(files[3], ns=(before.st_atime_ns, before.st_mtime_ns))
    learn = learner(make_dls(files, Resize(8, 'squish'), (ImageBlock,), None), feed := FeedCallback(2))
    quiet(learn, lambda o: o.fit(3, cbs=on(after_epoch=replace)))
    seen = torch.cat([b[1][:, 0, 0, 0] for b in learn.seen.batches if b[0]]).mul(255).round().view(3, 8)
    assert (feed.n_done, [sorted(o.tolist()) for o in seen])==(6, [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 5, 6, 7, 200], [0, 1, 2, 4, 5, 6, 7, 201]])


def point(f): return torch.tensor([[1., 2.]])
class Other(TfmdDL):
    def create_item(self, s): return super().create_item(s)
GIVEN_WAY = dict(
    points=(lambda files: make_dls(files, blocks=(ImageBlock, PointBlock), get_y=point), 'It is not known what the transforms do to TensorPoint.'),
    boxes=(lambda files: make_dls(files, blocks=(ImageBlock, BBoxBlock, BBoxLblBlock), block=dict(n_inp=1),
                                  get_y=[lambda f: [[1, 2, 8, 9]], lambda f: ['a']]), 'Its before_batch is not empty.'),
    arrays=(lambda files: make_dls([np.array(Image.open(f).resize((9, 9))) for f in files], get_y=lambda o: 'ab'[int(o.mean())%2]),
            'Its images are no files.'),
    own_class=(lambda files: make_dls(files, blocks=(ImageBlock(OwnImage), CategoryBlock)), 'It has no images that fastai opens from files as bytes.'),
    own_loader=(lambda files: make_dls(files, dl_type=Other), 'It has its own create_item.'),
    before_batch=(lambda files: make_dls(files, before_batch=lambda o: o), 'Its before_batch is not empty.'),
)
class OwnImage(PILImage): create = classmethod(create_turned)
@pytest.mark.parametrize('kind', GIVEN_WAY)
def test_what_is_not_known_is_left_to_fastai(files, kind):
    make, why = GIVEN_WAY[kind]
    ours, stock = fitted(lambda: make(files), feed := FeedCallback(2)), fitted(lambda: make(files))
    assert feed.n_done==0 and feed.why_not.startswith(why)
    check_same(ours, stock)


def test_tabular_data_is_left_to_fastai():
    frame = pd.DataFrame(dict(a=np.arange(20.), y=np.arange(20.)))
    dls = TabularDataLoaders.from_df(frame, y_names='y', cont_names=['a'], bs=4, device='cpu', valid_idx=range(16, 20))
    learn = tabular_learner(dls, cbs=(feed := FeedCallback(2)))
    quiet(learn, lambda o: o.fit(1))
    assert (feed.n_done, feed.why_not)==(0, "Its data set is a TabularPandas, not fastai's `Datasets`.")


# --- processes

def wait_for(started, seconds=20):
    "Have they ended?"
    deadline = time.monotonic()+seconds
    while any(o.is_alive() for o in started) and time.monotonic()<deadline: time.sleep(.05)
    return not any(o.is_alive() for o in started)


def started(make):
    "What `make` returns, and the workers that are new since"
    def running(): return {*multiprocessing.active_children()}
    before = running()
    return make(), [*running()-before]


def test_workers_start_late_and_end_with_the_learner(files):
    make = lambda: make_dls(files)
    learn, new = started(lambda: learner(make(), FeedCallback(3)))
    assert new==[]
    _, new = started(lambda: quiet(learn, lambda o: o.fit(2)))
    assert len(new)==3                              # for training and validation
    learn.feed.release()
    gc.collect()
    assert wait_for(new)
    _, again = started(lambda: quiet(learn, lambda o: o.fit(1)))
    assert len(again)==3 and (learn.feed.n_done, learn.feed.why_not)==(2, '')
    del learn, _
    gc.collect()
    assert wait_for(again)


def workers(feed): return [*feed.pool.workers._workers]
def n_decoded(feed): return sum(o.n_decoded for o in feed.pool.sets.values())
def same_again(learn, feed, n_done=4):
    "Another fit has the batches of stock fastai"
    learn.seen.batches = []
    set_seed(3, reproducible=True)
    quiet(learn, lambda o: o.fit(2))
    stock = learner(learn.dls)
    set_seed(3, reproducible=True)
    quiet(stock, lambda o: o.fit(2))
    check_same(learn, stock)
    assert (feed.n_done, feed.why_not)==(n_done, '')


def slow_in_workers(monkeypatch, name, seconds):
    f = getattr(Recipe, name)
    def slow(*args):
        if multiprocessing.parent_process() is not None: time.sleep(seconds)
        return f(*args)
    monkeypatch.setattr(Recipe, name, slow)


def test_a_worker_that_is_killed(files, monkeypatch):
    "Within a fit or between fits: a sentence, and the next fit has new ones"
    slow_in_workers(monkeypatch, 'finish', .02)
    learn = learner(make_dls(files, bs=1, shuffle=False), feed := FeedCallback(2))
    def kill(): os.kill(workers(feed)[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match='A process that decodes images has ended'):
        quiet(learn, lambda o: o.fit(9, cbs=on(after_batch=lambda: learn.iter==2 and kill())))
    monkeypatch.undo()
    same_again(learn, feed)
    kill()
    time.sleep(2)
    same_again(learn, feed)
    feed.release()


def test_an_interrupt_leaves_the_workers_as_they_are(files, monkeypatch):
    "A terminal interrupts each process of the group"
    slow_in_workers(monkeypatch, 'decode', .02)
    learn = learner(make_dls(files, shuffle=False), feed := FeedCallback(2))
    def interrupt():
        for o in workers(feed): os.kill(o.pid, signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt): quiet(learn, lambda o: o.fit(2, cbs=on(after_batch=interrupt)))
    before = workers(feed)
    same_again(learn, feed)
    assert set(before)<=set(workers(feed)) and all(o.is_alive() for o in workers(feed)) and n_decoded(feed)==N
    feed.release()


def test_relative_paths_are_those_of_the_folder_in_which_a_fit_begins(files, tmp_path, monkeypatch):
    for k,name in enumerate(('one', 'two')):
        (tmp_path/name).mkdir()
        for i,f in enumerate(files): Image.fromarray(pixels(i+k)).save(tmp_path/name/f.name)
    feed = FeedCallback(2)
    for name in 'one', 'two', 'two':
        monkeypatch.chdir(tmp_path/name)
        learn = learner(make_dls([type(f)(f.name) for f in files], shuffle=False), feed)
        same_again(learn, feed)
        learn.remove_cb(feed)


def test_other_batches_and_images_need_other_rooms(files):
    learn = learner(make_dls(files, bs=2, shuffle=False), feed := FeedCallback(1))
    for bs in 2, 32, 1:
        learn.dls = DataLoaders(*(o.new(bs=bs) for o in learn.dls.loaders))
        same_again(learn, feed)
    for dl in learn.dls.loaders: dl.after_item.resize.size = (4*SIZE, 4*SIZE)
    same_again(learn, feed)
    feed.release()


def test_sizes_that_change_within_an_epoch(files, monkeypatch):
    "Workers know those for which their memory was made"
    monkeypatch.setattr(images, 'memory_bytes', lambda: (0, 0))
    def trained(*cbs):
        learn = learner(make_dls(files, shuffle=False, block=dict(get_x=lambda f: f)), *cbs)
        def resize(n):
            for dl in learn.dls.loaders: dl.after_item.resize.size = (n, n)
        learn.add_cb(on(before_epoch=lambda: resize(SIZE*(learn.epoch+1)), after_train=lambda: resize(SIZE)))
        quiet(learn, lambda o: o.fit(3))
        return learn
    check_same(trained(feed := FeedCallback(2)), trained())
    assert feed.n_done==6


def test_images_of_several_sizes(files):
    "One by one as in fastai; together they raise an error, which names the sizes"
    def without(dls):
        for dl in dls.loaders: dl.after_item.fs = [o for o in dl.after_item.fs if type(o) is not CropPad]
        return dls
    check_fit(lambda: without(make_dls(files, CropPad(20), bs=1)), n_done=0, why_not='Its images may have several sizes.')
    learn = learner(without(make_dls(files, CropPad(20), shuffle=False)), feed := FeedCallback(2))
    with pytest.raises(ValueError, match=r'sizes \(30, 20\) and \(29, 21\)'): quiet(learn, lambda o: o.fit(1))
    feed.release()


def test_a_switch_of_pillows_reaches_the_workers(files, tmp_path, monkeypatch):
    "As after an error that names it"
    mine = [tmp_path/f.name for f in files]
    for i,f in enumerate(mine): Image.fromarray(pixels(i, 64, 64)).save(f)
    mine[5].write_bytes(mine[5].read_bytes()[:9000])
    learn = learner(make_dls(mine, shuffle=False), feed := FeedCallback(2))
    with pytest.raises(OSError, match='truncated'): quiet(learn, lambda o: o.fit(1))
    monkeypatch.setattr(ImageFile, 'LOAD_TRUNCATED_IMAGES', True)
    same_again(learn, feed)
    feed.release()


@pytest.mark.parametrize('n_kept', [0, 5, 99])
def test_images_beyond_the_memory_are_decoded_again(files, monkeypatch, n_kept):
    "Half of what is free is for both sets together"
    n_bytes = 64*64*3
    monkeypatch.setattr(images, 'memory_bytes', lambda: (0, 2*n_kept*n_bytes))
    learn = learner(make_dls(files, Resize(64, 'squish'), shuffle=False), feed := FeedCallback(2))
    for _ in range(2): same_again(learn, feed)
    used = sum(o.kept.counts[0] for o in feed.pool.sets.values())//n_bytes
    assert used==N and n_decoded(feed)==N if n_kept==99 else used<=n_kept and n_decoded(feed)>=4*(N-n_kept)
    feed.release()


def test_workers_leave_the_garbage_of_the_process_that_forked_them(files, tmp_path):
    "Such as a CUDA graph, whose end in a forked process would be a crash"
    class Cycle:
        def __init__(self): self.me = self
        def __del__(self): (tmp_path/f'{os.getpid()}').write_text('')
    gc.disable()
    try:
        Cycle()
        fitted(lambda: make_dls(files), feed := FeedCallback(2), n=4)
        feed.release()
    finally: gc.enable()
    gc.collect()
    assert [o.name for o in tmp_path.iterdir()]==[f'{os.getpid()}']


def test_what_is_frozen_stays_so(files):
    "As while `gain` or a visit of a sweep measures"
    gc.freeze()
    try:
        fitted(lambda: make_dls(files), feed := FeedCallback(2))
        feed.release()
        assert gc.get_freeze_count() and gc.isenabled()
    finally: gc.unfreeze()


def test_where_nothing_can_be_forked_the_loader_stays_fastai_s(files, monkeypatch):
    monkeypatch.setattr(images.sys, 'platform', 'darwin')
    fitted(lambda: make_dls(files), feed := FeedCallback(2))
    assert (feed.n_done, feed.why_not, feed.pool.sets)==(0, 'Images are decoded once on Linux only, by a process that may start others.', {})


def test_a_pass_within_a_pass_over_the_same_images_is_fastai_s(files):
    def run(*cbs):
        set_seed(3, reproducible=True)
        learn = learner(make_dls(files), *cbs)
        inner = []
        quiet(learn, lambda o: o.fit(1, cbs=on(after_batch=lambda: learn.training and inner.append(learn.validate(ds_idx=0)))))
        return learn, inner
    (ours, a), (stock, b) = run(FeedCallback(2)), run()
    check_same(ours, stock)
    assert a==b


@pytest.mark.parametrize('bs', [4, 8])
def test_one_set_trains_and_validates(files, bs):
    def make():
        train = make_dls(files*4, bs=4).train
        return DataLoaders(train, train.new(shuffle=False, drop_last=False, bs=bs))
    check_fit(make)


def test_the_validation_begins_while_the_training_ends(files):
    "Its images are decoded; a user's own function makes labels in their turn"
    asked, early = [], []
    def get_y(f):
        asked.append(f)
        return label(f)
    learn = learner(make_dls(files, get_y=get_y), feed := FeedCallback(2))
    def wait():
        until = time.monotonic()+20
        while n_decoded(feed)<N and time.monotonic()<until: time.sleep(.01)
        early.append((n_decoded(feed), sum(f in files[8:] for f in asked)))
        asked.clear()
    asked.clear()
    quiet(learn, lambda o: o.fit(2, cbs=on(after_train=wait)))
    assert early==[(N, 0), (N, N-8)] and n_decoded(feed)==N
