"""The trainings of whole_fit.py as a fastai user writes them: the files, made once in fastai's cache, a function for the
loaders, one for the Learner, and a row that puts them together"""
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd
from fastai.callback.mixup import MixUp
from fastai.callback.schedule import ParamScheduler  # noqa: F401 (adds fit_one_cycle and others to Learner)
from fastai.collab import CollabDataLoaders, collab_learner
from fastai.data.block import CategoryBlock, DataBlock, RegressionBlock
from fastai.data.transforms import RandomSplitter, get_image_files, parent_label
from fastai.layers import ConvLayer
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import DiceMulti, accuracy, accuracy_multi, error_rate, mse, rmse
from fastai.tabular.core import Categorify, FillMissing, Normalize
from fastai.tabular.data import TabularDataLoaders
from fastai.tabular.learner import tabular_learner
from fastai.text.core import BaseTokenizer
from fastai.text.data import TextDataLoaders
from fastai.text.learner import text_classifier_learner
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.vision.augment import RandomResizedCrop, Resize, aug_transforms
from fastai.vision.data import ImageBlock, ImageDataLoaders, SegmentationDataLoaders
from fastai.vision.learner import unet_learner, vision_learner
from gpubench.data.loaders import get_dls
from gpubench.data.made import draw_birds, make_once
from gpubench.ground.core import n_cores
from PIL import Image, ImageDraw
from torch import nn
from torchvision.models import resnet18, resnet34, resnet50

# files: photographs in folders, scenes with masks, tables, ratings and texts
N_CLASSES = 10

def noise(rng, n_across, n_down, size, how):
    "Random colors on a grid of so many cells, enlarged to `size`"
    cells = rng.integers(0, 255, (n_down, n_across, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize(size, how)

def draw_photo(i, size=(500, 375), jitter=0):
    "Patches of color under fine grain; the class, `i%10`, decides how many, give or take `jitter` (a standard deviation)"
    rng = np.random.default_rng(i)
    n = 12+i%N_CLASSES+round(rng.normal(0, jitter))
    patches = noise(rng, n+4, n, size, Image.Resampling.BICUBIC)
    grain = noise(rng, size[0]//3, size[1]//3, size, Image.Resampling.BILINEAR)
    return Image.blend(patches, grain, .25)

def save_photo(folder, i, kind='jpg', **kwargs):
    draw_photo(i, **kwargs).save(folder/f'c{i%N_CLASSES}'/f'{i}.{kind}', quality=90)

def tags(i):
    "One to three words that fit the class, for labels of several"
    c = i%N_CLASSES
    return ' '.join(['few' if c<5 else 'many', *['odd']*(c%2), *['third']*(c%3==0)])

def write_photos(folder, n, kind='jpg', **kwargs):
    for c in range(N_CLASSES): (folder/f'c{c}').mkdir()
    in_parallel(partial(save_photo, folder, kind=kind, **kwargs), n)
    rows = [dict(file=f'c{i%N_CLASSES}/{i}.{kind}', tags=tags(i), patches=12.+i%N_CLASSES) for i in range(n)]
    write_csv(folder, rows)
    return n+1

SCENE_CODES = ['ground', 'sky', 'tree', 'car', 'person']
def save_scene(folder, i):
    "Ellipses of the codes on a photograph, and a mask that has each pixel's code"
    rng, picture = np.random.default_rng(i), draw_photo(i)
    mask = Image.new('L', picture.size)
    for code in rng.permutation(range(1, len(SCENE_CODES))):
        x, y, r = rng.uniform(0, picture.width), rng.uniform(0, picture.height), rng.uniform(40, 120)
        shape = Image.new('L', picture.size)
        ImageDraw.Draw(shape).ellipse((x-r, y-.7*r, x+r, y+.7*r), fill=255)
        texture = noise(rng, 8*code, 6*code, picture.size, Image.Resampling.NEAREST)
        picture.paste(Image.blend(picture, texture, .5), mask=shape)
        mask.paste(int(code), mask=shape)
    picture.save(folder/'images'/f'{i}.jpg', quality=90)
    mask.save(folder/'masks'/f'{i}.png')

def write_scenes(folder, n):
    for o in ('images', 'masks'): (folder/o).mkdir()
    in_parallel(partial(save_scene, folder), n)
    return 2*n

def write_table(folder, n):
    "As many columns as the Adult data set: eight of categories, six of numbers"
    rng = np.random.default_rng(0)
    df = pd.DataFrame({f'cat{i}': rng.integers(0, 3+5*i, n)
                       for i in range(8)} | {f'num{i}': rng.normal(size=n) for i in range(6)})
    score = df.num0*df.num1+(df.cat1%3)-(df.cat5%4)/2+rng.normal(size=n)
    return write_csv(folder, df.assign(rich=np.where(score>.5, 'yes', 'no')))

def write_ratings(folder, n):
    "As many users and films for each rating as MovieLens 100k"
    rng = np.random.default_rng(0)
    user, film = rng.integers(0, max(1, n//106), n), rng.integers(0, max(1, n//60), n)
    tastes, kinds = rng.normal(size=(user.max()+1, 3)), rng.normal(size=(film.max()+1, 3))
    rating = np.clip(np.round(3+(tastes[user]*kinds[film]).sum(1)+rng.normal(0, .5, n)), 1, 5)
    return write_csv(folder, dict(user=user, film=film, rating=rating))

def write_texts(folder, n):
    "Reviews of 50 to 400 words from 8,000, frequent ones first (Zipf); one word in 25 depends on the label"
    rng, rows = np.random.default_rng(0), []
    for i in range(n):
        words = rng.zipf(1.3, rng.integers(50, 400))%8000
        is_label = rng.random(len(words))<.04
        words[is_label] = 8000+2*rng.integers(0, 100, is_label.sum())+i%2
        rows.append(dict(text=' '.join(f'w{o}' for o in words), label=['neg', 'pos'][i%2]))
    return write_csv(folder, rows)

def write_csv(folder, rows):
    (folder/'csv').mkdir()
    pd.DataFrame(rows).to_csv(folder/'csv'/'all.csv', index=False)
    return 1

def in_parallel(f, n):
    with ProcessPoolExecutor(n_cores()) as pool: list(pool.map(f, range(n), chunksize=max(1, n//(8*n_cores()))))

WRITERS = dict(photos=write_photos, small_photos=partial(write_photos, size=(128, 128)),
               hard_photos=partial(write_photos, jitter=.5),
               large_photos=partial(write_photos, size=(4000, 3000)), pngs=partial(write_photos, size=(32, 32), kind='png'),
               scenes=write_scenes, table=write_table, ratings=write_ratings, texts=write_texts)

def make_files(kind, n):
    "The folder with `n` files, or rows of a table"
    return make_once(f'whole_fit_{kind}_{n}', lambda folder: WRITERS[kind](folder, n),
                     f'Making {n:,} {kind}, once.')

SPLIT = dict(valid_pct=.2, seed=42)

# loaders: (folder, **options of the loaders) -> DataLoaders
def photos(path, size=224, bs=64, **kwargs):
    return ImageDataLoaders.from_folder(path, **SPLIT, bs=bs, item_tfms=Resize(size),
                                        batch_tfms=aug_transforms(), **kwargs)

def thumbnails(path, **kwargs): return photos(path, size=128, **kwargs)
def tiny(path, **kwargs): return photos(path, size=64, **kwargs)

def presized(path, **kwargs):
    return ImageDataLoaders.from_folder(path, **SPLIT, bs=64, item_tfms=Resize(460),
                                        batch_tfms=aug_transforms(size=224, min_scale=.75), **kwargs)

def cropped(path, **kwargs):
    return ImageDataLoaders.from_folder(path, **SPLIT, bs=64,
                                        item_tfms=RandomResizedCrop(224, min_scale=.5),
                                        batch_tfms=aug_transforms(), **kwargs)

def cropped_to_128(path, **kwargs):
    return ImageDataLoaders.from_folder(path, **SPLIT, bs=64, item_tfms=RandomResizedCrop(192),
                                        batch_tfms=aug_transforms(size=128), **kwargs)

def small_pngs(path, **kwargs): return ImageDataLoaders.from_folder(path, **SPLIT, bs=64, **kwargs)

def lesson_1(path, **kwargs):
    block = DataBlock(blocks=(ImageBlock, CategoryBlock), get_items=get_image_files,
                      splitter=RandomSplitter(valid_pct=.2, seed=42),
                      get_y=parent_label, item_tfms=[Resize(192, method='squish')])
    return block.dataloaders(path, bs=32, **kwargs)

def by_number(path, size=224, **kwargs):
    df = pd.read_csv(path/'csv'/'all.csv')
    return ImageDataLoaders.from_df(df, path, **SPLIT, bs=64, fn_col='file', label_col='patches',
                                    y_block=RegressionBlock(),
                                    item_tfms=Resize(size), batch_tfms=aug_transforms(), **kwargs)

def by_tags(path, size=224, **kwargs):
    df = pd.read_csv(path/'csv'/'all.csv')
    return ImageDataLoaders.from_df(df, path, **SPLIT, bs=64, fn_col='file', label_col='tags', label_delim=' ',
                                    item_tfms=Resize(size), batch_tfms=aug_transforms(), **kwargs)

def scenes(path, **kwargs):
    def mask_of(file): return path/'masks'/f'{file.stem}.png'
    return SegmentationDataLoaders.from_label_func(path, get_image_files(path/'images'), mask_of, **SPLIT,
                                                   bs=16, codes=SCENE_CODES,
                                                   item_tfms=Resize(224), batch_tfms=aug_transforms(), **kwargs)

def table(path, **kwargs):
    cats, nums = [f'cat{i}' for i in range(8)], [f'num{i}' for i in range(6)]
    return TabularDataLoaders.from_csv(path/'csv'/'all.csv', procs=[Categorify, FillMissing, Normalize],
                                       cat_names=cats, cont_names=nums,
                                       y_names='rich', y_block=CategoryBlock(), bs=64, **kwargs)

def ratings(path, **kwargs): return CollabDataLoaders.from_csv(path/'csv'/'all.csv', seed=42, bs=64, **kwargs)

def texts(path, **kwargs):
    return TextDataLoaders.from_csv(path, 'csv/all.csv', **SPLIT, text_col='text', label_col='label',
                                    tok_tfm=BaseTokenizer(), bs=64, **kwargs)

def resident(path, size=224, **kwargs): return get_dls(str(path), bs=64, loader='resident', size=size)

# learners: DataLoaders -> Learner
def resnet_18(dls, **kwargs): return vision_learner(dls, resnet18, pretrained=False, metrics=accuracy, **kwargs)
def resnet_18_mixup(dls): return resnet_18(dls, cbs=MixUp())
def resnet_18_error(dls): return vision_learner(dls, resnet18, pretrained=False, metrics=error_rate)
def resnet_18_number(dls): return vision_learner(dls, resnet18, pretrained=False, metrics=rmse, y_range=(10, 24))
def resnet_18_tags(dls): return vision_learner(dls, resnet18, pretrained=False, metrics=accuracy_multi)
def resnet_50(dls): return vision_learner(dls, resnet50, pretrained=False, metrics=accuracy)
def resnet_34(dls): return vision_learner(dls, resnet34, pretrained=False, metrics=accuracy)
def resnet_50_fp16(dls): return vision_learner(dls, resnet50, pretrained=False, metrics=accuracy, cbs=MixUp()).to_fp16()
def convnext(dls): return vision_learner(dls, 'convnext_tiny', pretrained=False, metrics=accuracy)    # timm's
def u_net(dls, arch=resnet34): return unet_learner(dls, arch, pretrained=False, metrics=DiceMulti())
def u_net_18(dls): return u_net(dls, resnet18)
def tabular(dls): return tabular_learner(dls, metrics=accuracy)
def collab(dls): return collab_learner(dls, n_factors=50, y_range=(0, 5.5), metrics=mse)
def awd_lstm(dls): return text_classifier_learner(dls, AWD_LSTM, pretrained=False, metrics=accuracy)

def small_cnn(dls):
    widths = [3, 16, 32, 64, 128]
    convs = [ConvLayer(a, b, stride=2) for a,b in zip(widths, widths[1:])]
    model = nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], dls.c))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy)

@dataclass
class Row:
    "A whole training"
    what: str           # In words, for tables and figures
    kind: str           # Of files that `make_files` makes, or 'birds'
    n: int              # Files, or rows of a table
    dls: Callable
    learner: Callable
    epochs: int
    fit: str = 'fit_one_cycle'
    loaders: dict = field(default_factory=dict)                                 # options of the loaders
    speed_up: dict = field(default_factory=lambda: dict(precision='bf16'))      # options of `speed_up`
    def folder(self, quick=False): # `quick`: a few
        n = min(self.n, QUICK_N.get(self.kind, 100)) if quick else self.n
        return draw_birds(n) if self.kind=='birds' else make_files(self.kind, n)
    def about(self): return {k: getattr(v, '__name__', v) for k,v in vars(self).items()}

QUICK_N = dict(table=2000, ratings=2000, scenes=30, large_photos=40)     # at least a batch is left for training
FP32, PHOTOS, FEWER = dict(speed_up={}), ('photos', 6000), ('photos', 3000)
ROWS = dict(
    photos_1=Row('ResNet-18, 224 px, 1 epoch', *PHOTOS, photos, resnet_18, 1),
    photos_4=Row('ResNet-18, 224 px, 4 epochs', *PHOTOS, photos, resnet_18, 4),
    photos_20=Row('ResNet-18, 224 px, 20 epochs', *PHOTOS, photos, resnet_18, 20),
    presizing=Row('ResNet-50, 460 → 224 px, 4 epochs', *PHOTOS, presized, resnet_50, 4),
    crops=Row('ResNet-18, RandomResizedCrop, 4 epochs', *PHOTOS, cropped, resnet_18, 4),
    px_128=Row('ResNet-18, 128 px, 4 epochs', *PHOTOS, thumbnails, resnet_18, 4),
    small_cnn=Row('small CNN, 64 px, 4 epochs', *PHOTOS, tiny, small_cnn, 4),
    photos_200=Row('200 photographs, 4 epochs', 'photos', 200, photos, resnet_18, 4),
    photos_2000=Row('2,000 photographs, 4 epochs', 'photos', 2000, photos, resnet_18, 4),
    photos_50000=Row('50,000 small photographs, 128 px, 2 epochs', 'small_photos', 50_000, thumbnails, resnet_18, 2),
    fine_tune=Row('lesson 1: fine_tune(3), squished to 192 px', 'photos', 2000, lesson_1, resnet_18_error,
                  3, 'fine_tune'),
    mixup=Row('MixUp, 4 epochs', *PHOTOS, photos, resnet_18_mixup, 4),
    regression=Row('regression, 4 epochs', *PHOTOS, by_number, resnet_18_number, 4),
    tags=Row('several labels, 4 epochs', *PHOTOS, by_tags, resnet_18_tags, 4),
    no_workers=Row('0 workers, 1,000 photographs, 2 epochs', 'photos', 1000, photos, resnet_18, 2,
                   loaders=dict(num_workers=0)),
    u_net=Row('U-Net, 224 px, 4 epochs', 'scenes', 700, scenes, u_net, 4),
    u_net_18=Row('U-Net (ResNet-18), 224 px, 4 epochs', 'scenes', 600, scenes, u_net_18, 4),
    presized_34=Row('ResNet-34, 460 → 224 px, fine_tune(3)', *FEWER, presized, resnet_34, 3, 'fine_tune'),
    fp16=Row('ResNet-50, crops of 192 → 128 px, MixUp, to_fp16(), 4 epochs', *FEWER, cropped_to_128,
             resnet_50_fp16, 4, **FP32),
    convnext=Row('ConvNeXt-tiny, 192 px, fine_tune(3)', *FEWER, photos, convnext, 3, 'fine_tune', dict(size=192)),
    tags_192=Row('several labels, 192 px, fine_tune(3)', *FEWER, by_tags, resnet_18_tags, 3, 'fine_tune', dict(size=192)),
    regression_160=Row('regression, 160 px, 4 epochs', *FEWER, by_number, resnet_18_number, 4, loaders=dict(size=160)),
    large=Row('200 photographs of 12 megapixels, fine_tune(4)', 'large_photos', 200, photos, resnet_18, 4, 'fine_tune', dict(bs=16)),
    pngs=Row('20,000 PNGs of 32 px, 5 epochs', 'pngs', 20_000, small_pngs, resnet_18, 5),
    tabular=Row('tabular, 2 epochs', 'table', 32_000, table, tabular, 2, **FP32),
    collab=Row('collaborative filtering, 2 epochs', 'ratings', 100_000, ratings, collab, 2, **FP32),
    text=Row('AWD-LSTM, 3 epochs', 'texts', 2000, texts, awd_lstm, 3, **FP32),
    birds=Row('birds, 10 epochs', 'birds', 600, photos, resnet_18, 10),
    hard=Row('ten classes that overlap, 8 epochs', 'hard_photos', 2000, photos, resnet_18, 8),
    cpu_resnet18=Row('ResNet-18, 128 px, 1,000 photographs, 4 epochs, CPU', 'photos', 1000, thumbnails,
                     resnet_18, 4, **FP32),
    cpu_small_cnn=Row('small CNN, 64 px, 2,000 photographs, 4 epochs, CPU', 'photos', 2000, tiny, small_cnn, 4, **FP32))

ACCURACY, CPU = ['birds', 'hard'], ['cpu_resnet18', 'cpu_small_cnn']
GROUPS = dict(all=list(ROWS), accuracy=ACCURACY, cpu=CPU, gpu=[o for o in ROWS if o not in (*ACCURACY, *CPU)])

# what `speed_up` gets beside the row's options
OURS = dict(speed_up={}, fp32=dict(precision=None), compiled=dict(compile=True))
VARIANTS = ['stock', 'stock_bf16', *OURS]
