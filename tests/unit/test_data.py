"Data: what a notebook cannot test of itself, such as faults, processes and people's folders"
import os, shutil, threading, time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gpubench.data import loaders as data
from gpubench.data.loaders import LOADERS, get_dls, get_images
from gpubench.data import sets
from gpubench.data.folders import IMAGE_SUFFIXES
from gpubench.data.birds import draw_wood
from gpubench.data.made import fastai_folder, make_once
import numpy as np
import pytest
import torch
import fastai.callback.progress, fastai.callback.schedule  # noqa: F401  `no_bar` and `fit_one_cycle`
from fastai.data.external import fastai_cfg, fastai_path
from fastai.learner import Learner, load_learner
from fastai.metrics import accuracy
from fastai.vision.core import PILImageBW
from PIL import Image
from torch import nn

has_cuda = torch.cuda.is_available()
pytestmark = pytest.mark.xdist_group('data')         # one worker draws the birds


@contextmanager
def fastai_home(path):
    "fastai keeps its data below `path` meanwhile"
    before = os.environ.get('FASTAI_HOME')
    os.environ['FASTAI_HOME'] = str(path)
    fastai_cfg.cache_clear()
    try: yield Path(path)
    finally:
        os.environ.pop('FASTAI_HOME')
        if before is not None: os.environ['FASTAI_HOME'] = before
        fastai_cfg.cache_clear()

@pytest.fixture(scope='module', autouse=True)
def shared_home(tmp_path_factory):
    "One cache for the tests of this file, so that the birds are drawn once; not the reader's own"
    with fastai_home(tmp_path_factory.mktemp('home')) as o: yield o

@pytest.fixture
def home(tmp_path):
    "An empty cache"
    with fastai_home(tmp_path/'home') as o: yield o

@pytest.fixture
def animals(tmp_path):
    "A folder of two classes with six pictures each"
    for i in range(12):
        (folder := tmp_path/'animals'/('cat','dog')[i%2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (20+i,30,3), dtype=np.uint8)).save(folder/f'{i}.jpg')
    return tmp_path/'animals'

def cache(): return fastai_folder('data')/'gpubench2'

def two_epochs(dls): return [[(xb.cpu(),yb.cpu()) for xb,yb in dl] for dl in (dls.train, dls.train, dls.valid)]

def assert_same(a, b):
    for ea,eb in zip(a, b, strict=True):
        assert [len(x) for x,_ in ea]==[len(x) for x,_ in eb]
        for (xa,ya),(xb,yb) in zip(ea, eb, strict=True):
            assert type(xa) is type(xb) and type(ya) is type(yb)
            assert torch.equal(xa, xb) and torch.equal(ya, yb)

def tiny_net(dls): return nn.Sequential(nn.Flatten(), nn.Linear(dls.n_in*dls.size**2, dls.c))

def quiet_fit(learn, n=1, lr=1e-3):
    with learn.no_bar(), learn.no_logging(): learn.fit(n, lr)
    return learn


# ---- the three loaders

@pytest.mark.skipif(not has_cuda, reason='no GPU')
def test_loaders_agree_on_a_gpu():
    "Batch by batch: the same images, split, order, types and normalization"
    kwargs = dict(dataset='synthetic', size=17, n_channels=3, max_images=150, device='cuda', seed=3)
    expected = two_epochs(get_dls(**kwargs, loader='files'))
    for o in LOADERS[1:]: assert_same(expected, two_epochs(get_dls(**kwargs, loader=o)))

@pytest.mark.parametrize('loader', [o if o=='memory' else pytest.param(o, marks=pytest.mark.slow) for o in LOADERS])
def test_learner_export_predict(loader, tmp_path):
    "A Learner trains, is exported without its images, comes back and predicts a picture from a file or an array"
    dls = get_dls(loader=loader, bs=128, device='cpu')
    learn = quiet_fit(Learner(dls, tiny_net(dls), metrics=accuracy, path=tmp_path), 3, 1e-2)
    assert learn.final_record[-1]>.8
    learn.export('learn.pkl')
    assert (tmp_path/'learn.pkl').stat().st_size<400_000               # 1,797 pictures of 784 bytes would be 1.4 MB
    again, images = load_learner(tmp_path/'learn.pkl'), get_images()
    picture = images.make([0])[0,0]
    Image.fromarray(picture).save(tmp_path/'0.png')
    with again.no_bar(), learn.no_bar():
        want = learn.get_preds(dl=learn.dls.test_dl([tmp_path/'0.png']))[0][0]
        items = [tmp_path/'0.png', PILImageBW.create(picture)] + ([picture] if loader!='files' else [])
        for item in items:
            label, number, probs = again.predict(item)
            assert (label, int(number))==('0', 0) and torch.allclose(probs, want)

@pytest.mark.parametrize('loader', ['files', 'memory'])
def test_more_workers_than_batches(loader):
    kwargs = dict(loader=loader, device='cpu', max_images=300)     # 60 held out: one batch for two workers
    assert_same(two_epochs(get_dls(**kwargs)), two_epochs(get_dls(**kwargs, n_workers=2)))

@pytest.mark.skipif(not has_cuda, reason='no GPU')
@pytest.mark.parametrize('loader', ['files', 'memory'])
def test_pinned(loader):
    kwargs = dict(loader=loader, device='cuda', max_images=300)
    assert_same(two_epochs(get_dls(**kwargs)), two_epochs(get_dls(**kwargs, pin_memory=True, n_workers=2)))


# ---- shapes, split, seed

def test_global_seeds_decide_nothing():
    def order(seed):
        import random
        random.seed(seed); np.random.seed(seed); torch.manual_seed(seed)
        return torch.cat([y for _,y in get_dls(device='cpu').train])
    assert torch.equal(order(1), order(2))

# ---- the cache

def test_of_two_at_once_one_writes_and_the_other_waits(home):
    start, written = threading.Barrier(2), []
    def write(folder):
        written.append(folder)
        time.sleep(.2)
    def make():
        start.wait(20)
        made.append(make_once('both', write))
    made, threads = [], [threading.Thread(target=make) for _ in range(2)]
    for o in threads: o.start()
    for o in threads: o.join()
    assert made==[cache()/'both']*2 and len(written)==1 and made[0].is_dir()

def test_settings_of_your_own(home, tmp_path):
    home.mkdir()
    (home/'config.ini').write_text(f'[DEFAULT]\ndata = {tmp_path}/elsewhere\n')
    assert cache()==tmp_path/'elsewhere'/'gpubench2' and fastai_folder('archive')==home/'archive'

def test_unwritable_cache(tmp_path):
    (tmp_path/'file').touch()
    with fastai_home(tmp_path/'file'/'home'):
        with pytest.raises(RuntimeError, match="'digits' cannot be written to the cache.*FASTAI_HOME"):
            get_dls(loader='files', device='cpu')
        with pytest.raises(RuntimeError, match="'birds' cannot be written to the cache"): get_dls('birds', device='cpu')
        for o in LOADERS[1:]: assert len(get_dls(loader=o, device='cpu').train_ds)==1437   # these need no cache

def test_full_disk(home, monkeypatch):
    def no_room(*args, **kwargs): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(Image.Image, 'save', no_room)
    with pytest.raises(RuntimeError, match="No space left on device"): get_dls(loader='files', device='cpu')
    assert not [o for o in cache().iterdir() if o.is_dir()]


# ---- sets that fastai downloads

def test_an_official_split(home, monkeypatch):
    "The same through all loaders; a set that isn't whole is refused"
    for part,n in ('training', 6), ('testing', 4):
        for k in range(2*n):
            (folder := fastai_path('data')/'mnist_png'/part/f'{k%2}').mkdir(parents=True, exist_ok=True)
            Image.new('L', (28, 28), 9*k).save(folder/f'{k}.png')
    url, folders, _, *rest = sets.OFFICIAL['mnist']
    monkeypatch.setitem(sets.OFFICIAL, 'mnist', (url, folders, (12, 8), *rest))
    first, *others = (get_dls('mnist', bs=3, loader=o, device='cpu') for o in LOADERS)
    assert (len(first.train_ds), len(first.valid_ds), first.n_in, first.size)==(12, 8, 1, 28)
    expected = two_epochs(first)
    for dls in others: assert_same(expected, two_epochs(dls))
    some = get_images('mnist', max_images=10)
    assert list(some.is_valid)==[False]*6+[True]*4 and list(some.labels)==[0,0,0,1,1,1,0,0,1,1]
    with pytest.raises(ValueError, match="max_images=7 is too few for 'mnist'"): get_images('mnist', max_images=7)
    next((fastai_path('data')/'mnist_png'/'training').rglob('*.png')).unlink()
    with pytest.raises(RuntimeError, match="not complete.*11 training and 8 held-out images instead of 12 and 8"):
        get_dls('mnist', bs=3, device='cpu')


# ---- folders

def test_folder_forms(animals, tmp_path, monkeypatch):
    for o in (animals, str(animals), animals/'..'/'animals'): assert len(get_images(o))==12
    monkeypatch.chdir(tmp_path)
    assert get_dls('animals', bs=2, device='cpu').name=='animals'
    monkeypatch.setenv('HOME', str(tmp_path))
    assert get_images('~/animals').vocab==['cat','dog']
    (animals/'notes.txt').write_text('no image')
    Image.new('RGB', (9,9)).save(animals/'above.png')                 # in no class folder
    (animals/'.ipynb_checkpoints').mkdir()
    Image.new('RGB', (9,9)).save(animals/'.ipynb_checkpoints'/'1.png')
    assert len(get_images(animals))==12

def test_bad_folders(animals, tmp_path):
    def make(name, *files):
        for o in files:
            (tmp_path/name/o).parent.mkdir(parents=True, exist_ok=True)
            Image.new('L', (9,9)).save(tmp_path/name/o)
        return tmp_path/name
    (tmp_path/'empty').mkdir()
    for path,match in ((tmp_path/'nowhere', "no folder .*nowhere"), (tmp_path/'empty', r'has only \[\]'),
                       (make('flat', '1.png', '2.png'), r'has only \[\]'),
                       (make('one', 'cat/1.png', 'cat/2.png'), r"has only \['cat'\]"), (make('split', 'train/1.png', 'test/2.png'), r'has only \[\]'),
                       (make('lonely', 'cat/1.png', 'cat/2.png', 'dog/1.png'), "a single image of dog"),):
        with pytest.raises(ValueError, match=match): get_dls(path, bs=1, device='cpu')
    with pytest.raises(ValueError, match='no folder'): get_dls(animals/'cat'/'0.jpg', bs=1, device='cpu')

@pytest.mark.parametrize('loader', LOADERS)
@pytest.mark.parametrize('content,why', [(b'', 'empty'), (b'GIF, I swear', 'UnidentifiedImageError')])
def test_bad_file_is_named_at_once(loader, content, why, animals):
    (animals/'dog'/'bad.jpg').write_bytes(content)
    with pytest.raises(ValueError, match=rf"1 of 13 image files cannot be read: .*bad.jpg \({why}\)"):
        get_dls(animals, bs=2, loader=loader, device='cpu')

@pytest.mark.parametrize('loader', ['memory', 'resident'])
def test_truncated_file_is_named(loader, animals):
    "Its header is in order, so that it shows only when decoded"
    draw_wood(0, True).save(animals/'dog'/'cut.jpg')
    (animals/'dog'/'cut.jpg').write_bytes((animals/'dog'/'cut.jpg').read_bytes()[:6000])
    with pytest.raises(ValueError, match="cut.jpg cannot be decoded .*truncated"):
        dls = get_dls(animals, bs=2, loader=loader, device='cpu')
        for dl in dls: list(dl)


# ---- arguments

@pytest.mark.parametrize('kwargs,match', [
    (dict(dataset='cifar'), "no data set or folder named 'cifar'. Did you mean 'cifar10'"),
    (dict(dataset=None), 'no data set or folder named None'),
    (dict(loader='ram'), "no loader named 'ram'.*files, memory, resident"),
    (dict(bs=0), 'bs must be a whole number of at least 1, not 0'), (dict(bs=-8), 'not -8'), (dict(bs=32.), 'not 32.0'),
    (dict(bs='64'), "not '64'"), (dict(bs=True), 'not True'),
    (dict(bs=1438), 'Batch size 1438 is larger than the 1437 training images'),
    (dict(bs=81, max_images=100), 'Batch size 81 is larger than the 80 training images'),
    (dict(n_workers=-1), 'n_workers must be .*not -1'), (dict(loader='resident', n_workers=1), 'n_workers=1'),
    (dict(loader='resident', pin_memory=True), 'nothing is copied to one'), (dict(pin_memory=True), 'nothing is copied to one'),
    (dict(size=7), 'size must be .*from 8 to 4096, not 7'), (dict(size=28.5), 'not 28.5'),
    (dict(size=10**5), 'not 100000'), (dict(n_channels=4), 'n_channels must be 1 .gray. or 3 .color., not 4'),
    (dict(seed=-1), 'seed must be'), (dict(seed=.5), 'not 0.5'),
    (dict(max_images=0), 'max_images must be'), (dict(max_images=19), 'max_images=19 is too few'),
    (dict(dataset='synthetic', max_images=19), "'synthetic' has a single image of 9"),
    (dict(dataset=''), "There is no data set or folder named ''"), (dict(device='gpu'), "no device 'gpu'")], ids=str)
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match): get_dls(**dict(device='cpu') | kwargs)

def test_images_that_do_not_fit_on_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device: (1000, 10**9))
    with pytest.raises(RuntimeError, match=r"0\.0 GiB of the GPU's memory and 0\.0 GiB are free. Use loader='memory'"):
        data._tensor_dls(get_images(max_images=100), torch.device('cuda'), 'cuda')


# ---- fastai's own ways to look at a loader, and what is refused at the door

@pytest.mark.parametrize('loader', ['memory', 'resident'])
def test_show_batch_unique_ends(loader):
    dls = get_dls('synthetic', bs=4, loader=loader, device='cpu', max_images=50, size=8)
    dls.show_batch(unique=True, max_n=2)

def test_a_disk_is_no_data_set():
    with pytest.raises(ValueError, match="'/' is a whole disk. Give "): get_images('/')


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path/'cats').mkdir()
    def refuse(path, onerror, **kwargs): onerror(PermissionError(13, 'Permission denied', str(path)))
    monkeypatch.setattr(os, 'walk', refuse)
    with pytest.raises(ValueError, match='Permission denied.* Make it readable, or take it out of'): get_images(str(tmp_path))


@pytest.mark.parametrize('loader', ['memory', 'resident'])
def test_an_epoch_of_fewer_images_takes_them_from_all(loader):
    dl = get_dls('digits', bs=16, loader=loader, max_images=500, device='cpu').train
    dl.n = 64
    order = [int(o) for o in dl.get_idxs()]
    assert len({*order})==64 and max(order)>300

@pytest.mark.parametrize('sizes', [(1000, 2), (100, 3, 3), (8, 2)])
def test_each_class_has_images_in_both_parts(sizes):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    images = replace(get_images('digits'), labels=labels, vocab=[*map(str, range(len(sizes)))])
    train, valid = images.split()
    assert {*labels[train]}=={*labels[valid]}=={*range(len(sizes))} and sorted([*train, *valid])==[*range(len(labels))]


# ---- what people's folders look like

def put(root, **counts):
    "'a__b' is a folder b in a; each image has its own color"
    for k,n in counts.items():
        (folder := root/k.replace('__', '/')).mkdir(parents=True, exist_ok=True)
        for i in range(n): Image.new('RGB', (9, 9), (9*i, len(k), 0)).save(folder/f'{folder.name}_{i}.png')
    return root

def found(root, **kwargs):
    "Images of each class to train on and held out, and what was left out"
    images = get_images(root, 9, **kwargs)
    parts = [{k: int((images.labels[rows]==i).sum()) for i,k in enumerate(images.vocab)} for rows in images.split()]
    return images.is_valid is not None, *parts, images.split_text().partition('; ')[2]

BOTH = dict(cat=4, dog=4), dict(cat=1, dog=1)

@pytest.mark.parametrize('counts, remarks', [
    (dict(train__cat=4, train__dog=4, valid__cat=1, valid__dog=1), ''),
    (dict(TRAIN__cat=4, TRAIN__dog=4, Val__cat=1, Val__dog=1), ''),
    (dict(train__more__cat=4, train__more__dog=4, test__cat=1, test__dog=1), ''),
    (dict(train__cat=4, train__dog=4, val__cat=1, val__dog=1, test=3, figures=2), "left out: 5 images without a class in train, val"),
    (dict(train__cat=4, train__dog=4, val__cat=1, val__dog=1, test__cat=2), "left out: 2 images without a class in train, val")], ids=str)
def test_a_split_of_the_sets_own_is_kept(tmp_path, counts, remarks):
    put(tmp_path, **counts)
    shutil.copytree(tmp_path, tmp_path/'__MACOSX')
    assert found(tmp_path)==(True, *BOTH, remarks)

@pytest.mark.parametrize('counts, remarks', [
    (dict(cat=5, dog=5), ''), (dict(a__cat=5, a__dog=5), ''),
    (dict(train__cat=5, train__dog=5, val=2), "left out: 2 images without a class in train")], ids=str)
def test_without_a_split_a_fifth_is_held_out(tmp_path, counts, remarks): assert found(put(tmp_path, **counts))==(False, *BOTH, remarks)

def test_what_a_folder_was_taken_for_is_printed_once(tmp_path, capsys):
    put(tmp_path/'pets', train__cat=4, train__dog=4, valid__cat=1, valid__dog=1, test=2)
    for _ in range(2): dls = get_dls(tmp_path/'pets', bs=2, size=16, device='cpu')
    get_dls('digits', max_images=100, bs=2, device='cpu')
    assert capsys.readouterr().out=="pets: 10 images of 2 classes (cat 5, dog 5); the set's own split: 8 to train, 2 held out (valid); left out: 2 images without a class in train, valid\n"
    assert (dls.classes_text, dls.split_text)==("10 images of 2 classes (cat 5, dog 5)", "the set's own split: 8 to train, 2 held out (valid); left out: 2 images without a class in train, valid")

def test_suffixes_do_not_depend_on_the_system(animals, monkeypatch):
    "fastai's list comes from /etc/mime.types, where there is one"
    import mimetypes
    monkeypatch.setattr(mimetypes, 'types_map', {})
    image = Image.open(animals/'cat'/'0.jpg')
    for o in 'webp jfif tga jp2 AVIF ppm'.split(): image.save(animals/'cat'/f'x.{o}')
    assert len(get_images(animals))==12+6 and '.svg' not in IMAGE_SUFFIXES

# ---- labels of your own

def labelled(root, kwargs): return {o.relative_to(root).as_posix(): k for o,k in zip(*(lambda i: (i.files, [i.vocab[j] for j in i.labels]))(get_images(root, 9, **kwargs)))}

@pytest.mark.parametrize('loader', LOADERS)
def test_labels_reach_every_loader(tmp_path, loader):
    put(tmp_path, train=6, test1=2)
    (tmp_path/'labels.csv').write_text('id,label\n' + ''.join(f'train_{i},{"cat" if i%2 else "dog"}\n' for i in range(6)))
    dls = get_dls(tmp_path, bs=4, size=16, loader=loader, device='cpu', labels='labels.csv')
    assert [*dls.vocab]==['cat', 'dog'] and (len(dls.train_ds), len(dls.valid_ds))==(4, 2)
    if loader=='files':
        assert [str(dls.vocab[y]) for _,y in dls.train_ds]==['cat' if int(o.stem[-1])%2 else 'dog' for o in dls.train_ds.items]
        assert sum(len(yb) for _,yb in get_dls(tmp_path, bs=2, size=16, loader=loader, n_workers=1, device='cpu', labels='labels.csv').train)==4

def test_a_table_with_more_columns(tmp_path):
    (put(tmp_path, a=4)/'train.csv').write_text('id,file,label\na_1,a_0.png,cat\na_0,a/a_1.png,dog dog\na_3,a_2,cat\na_2,a/a_3,dog dog\n')
    for labels in ('train.csv', Path('train.csv'), tmp_path/'train.csv'):
        assert labelled(tmp_path, dict(labels=labels))=={f'a/a_{i}.png': ('cat', 'dog dog')[i%2] for i in range(4)}

def test_labels_by_name_and_path(tmp_path):
    put(tmp_path, train=3, test1=2)
    for i in range(3): Image.new('RGB', (9, 9)).save(tmp_path/'train'/f'great_pyrenees_{i}.png')
    got = {f'train/{k}_{i}.png': k for k in ('great_pyrenees', 'train') for i in range(3)}
    assert labelled(tmp_path, dict(labels=r'^(great_pyrenees|train)_\d+'))==got                # test1 has no labels
    assert labelled(tmp_path, dict(labels=r'^train/(great_pyrenees|train)_'))==got             # a pattern of the path
    with pytest.raises(ValueError, match="2 of 6 images have no label by .*great_pyrenees_1.png"):
        get_images(tmp_path, 9, labels=r'^(great_pyrenees_0|train)')

def test_an_image_without_a_label(tmp_path):
    put(tmp_path, a=2, b=2)
    (tmp_path/'labels.csv').write_text('file,label\na_0,cat\na_1,dog\nb_0.png,cat\n')
    with pytest.raises(ValueError, match='1 of 4 images have no label by .*: b/b_1.png. Label them'):
        get_images(tmp_path, 9, labels='labels.csv')

@pytest.mark.parametrize('labels, says', [('none.csv', 'none.csv cannot be read'), ('(', 'is no pattern'), (3, 'the path of a CSV file'), ('', 'the path of a CSV file'),
                                          ('^(x)', '4 of 4 images have no label'), (str.upper, 'the path of a CSV file')])
def test_what_labels_refuses(tmp_path, labels, says):
    with pytest.raises(ValueError, match=says): get_images(put(tmp_path, a=2, b=2), 9, labels=labels)
