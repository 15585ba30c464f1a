"Pixels of JPEGs, compared with those that fastai opens"
import itertools
import random

import numpy as np
import pytest
from fastai.vision.augment import Resize
from fastai.vision.core import PILImage, PILImageBW
from PIL import Image

from gpubench.data import item_tfms
from gpubench.data.item_tfms import Recipe


def picture(w=93, h=71):
    noise = np.random.default_rng(0).integers(0, 256, (h//4, w//4, 3)).astype(np.uint8)
    return Image.fromarray(noise).resize((w, h), Image.Resampling.BICUBIC)


def outcome(f):
    "Pixels, or the type of the error"
    try: return np.array(f())
    except Exception as e: return type(e)


def check_same(path, cls=PILImage):
    theirs, ours = outcome(lambda: cls.create(path)), outcome(lambda: Recipe([cls], [], 0).decode([path])[0])
    assert type(theirs) is type(ours) and np.array_equal(theirs, ours)


@pytest.fixture
def n_decoded(monkeypatch):
    "How many images Pillow hasn't decoded"
    decoder, found = item_tfms.decode_jpeg, []
    def decode(data):
        pixels = decoder(data)
        found.append(pixels.shape)
        return pixels
    monkeypatch.setattr(item_tfms, 'decode_jpeg', decode)
    return found


@pytest.mark.parametrize('progressive', [False, True])
@pytest.mark.parametrize('restarts', [0, 3])
def test_kinds_of_jpegs(tmp_path, progressive, restarts, n_decoded):
    for quality,subsampling in itertools.product((20, 75, 100), (0, 1, 2)):
        picture().save(tmp_path/'a.JPG', 'JPEG', quality=quality, subsampling=subsampling, progressive=progressive, restart_marker_blocks=restarts)
        check_same(tmp_path/'a.JPG')
    assert n_decoded==[(3, 71, 93)]*9


@pytest.mark.parametrize('mode', ['L', 'CMYK'])
def test_other_colors_and_other_classes_are_pillow_s(tmp_path, mode, n_decoded):
    picture().convert(mode).save(tmp_path/'a.jpeg')
    check_same(tmp_path/'a.jpeg')
    picture().save(tmp_path/'b.jpeg')
    check_same(tmp_path/'b.jpeg', PILImageBW)
    picture().save(tmp_path/'c.jpg', 'PNG')                      # only its name is a JPEG's
    check_same(tmp_path/'c.jpg')
    assert n_decoded==[]


def test_a_turned_photograph_stays_as_fastai_has_it(tmp_path):
    exif = Image.Exif()
    for turn in 3, 6:                                            # by 180° and by 90°
        exif[0x0112] = turn
        picture().save(tmp_path/'a.jpg', exif=exif)
        check_same(tmp_path/'a.jpg')


def test_broken_jpegs(tmp_path):
    "The same error as in fastai, or the same pixels"
    rng, path = np.random.default_rng(1), tmp_path/'a.jpg'
    picture().save(path, quality=90)
    whole, kinds = path.read_bytes(), set()
    for i in range(60):
        data = bytearray(whole)
        for _ in range(3): data[rng.integers(2, len(data))] ^= 1<<rng.integers(8)
        path.write_bytes(data[:rng.integers(20, len(data))] if i%3==0 else data)
        check_same(path)
        kinds.add(type(outcome(lambda: PILImage.create(path))))
    assert kinds=={np.ndarray, type}


def test_crops_of_a_large_photograph(tmp_path):
    "It is kept at a smaller size, from which its crops are as those of fastai"
    picture(24, 18).resize((1200, 900)).save(tmp_path/'a.jpg', quality=95)
    crop = Resize(60)
    recipe = Recipe([PILImage], [crop], 0)
    kept = recipe.decode([tmp_path/'a.jpg'])
    assert kept[0].shape==(129, 172, 3)
    for seed in range(5):
        random.seed(seed)
        theirs = np.array(crop(PILImage.create(tmp_path/'a.jpg'), split_idx=0)).astype(int)
        off = np.abs(recipe.finish(kept, seed)[0].transpose(1, 2, 0)-theirs)
        assert off.mean()<4        # a crop begins up to half of a pixel off


def test_a_crop_of_nearest_pixels_makes_no_new_colors(tmp_path):
    "Of a large image, which other crops reduce"
    Image.fromarray(np.random.default_rng(0).integers(0, 2, (90, 120, 3), np.uint8)*255).save(path := tmp_path/'a.png')
    crop = Resize(16, resamples=(Image.Resampling.NEAREST,)*2)
    recipe = Recipe([PILImage], [crop], 0)
    random.seed(5)
    theirs = np.array(crop(PILImage.create(path), split_idx=0))
    assert np.array_equal(recipe.finish(recipe.decode([path]), 5)[0].transpose(1, 2, 0), theirs)
