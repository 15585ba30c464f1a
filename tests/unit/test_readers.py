"Processes that decode images: what happens to them, to their memory and to their files"
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.schedule import Learner   # with its schedules
from fastai.data.block import DataBlock
from fastai.data.core import DataLoaders
from fastai.torch_core import set_seed
from fastai.vision.augment import RandomResizedCrop, Resize
from fastai.vision.core import PILImage
from fastai.vision.data import ImageBlock
from PIL import Image, ImageFile, UnidentifiedImageError
import fastai.callback.progress    # noqa: F401  no_bar

from gpubench.data.feed import Decoded, FeedCallback
from gpubench.data.item_tfms import Recipe
from gpubench.data.readers import N_ROOMS, Arena, Processes, SharedMemory, Threads, can_fork, switching_often

only_forked = pytest.mark.skipif(not can_fork(), reason='Processes are forked on Linux only.')
N, N_TRAIN, SIZE = 12, 8, 16


def save(folder, sizes):
    "Images of these sizes (w, h) in a folder"
    out = [folder/f'{i:02d}.png' for i in range(len(sizes))]
    for i,(f,(w, h)) in enumerate(zip(out, sizes)):
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (h, w, 3)).astype(np.uint8)).save(f)
    return out


@pytest.fixture(scope='module')
def files(tmp_path_factory): return save(tmp_path_factory.mktemp('images'), [(20+i, 30-i) for i in range(N)])


def make_dls(files, item_tfms=None, bs=4, n_train=N_TRAIN, shuffle=False):
    block = DataBlock((ImageBlock,), splitter=lambda o: (list(range(n_train)), list(range(n_train, len(o)))),
                      item_tfms=Resize(SIZE, 'squish') if item_tfms is None else item_tfms)
    return block.dataloaders(files, bs=bs, num_workers=0, device='cpu', shuffle=shuffle)


class Mean(torch.nn.Module):
    "Takes images of any size"
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
    def forward(self, x): return x.float().mean()*self.weight


class Seen(Callback):
    "All batches"
    order = -5
    def before_fit(self): self.batches = []
    def before_batch(self): self.batches.append(self.xb[0].clone())


def on(**events):
    "A callback with these functions"
    cb = Callback()
    for k,f in events.items(): setattr(cb, k, f)
    return cb


def learner(dls, *cbs): return Learner(dls, Mean(), loss_func=lambda pred: pred, lr=.01, cbs=[Seen(), *cbs])


def fit(learn, n=2, *cbs):
    set_seed(3, reproducible=True)
    with learn.no_bar(), learn.no_logging(): learn.fit(n, cbs=cbs)
    return learn.seen.batches


def check_same(ours, stock):
    assert len(ours)==len(stock)>0
    assert all(torch.equal(a, b) for a,b in zip(ours, stock))


def n_decoded(feed): return sum(o.n_decoded for o in feed.decoded.values())
def pids(feed): return list(feed.readers.executor._processes)
def in_reader(): return multiprocessing.parent_process() is not None
def is_running(pid): return psutil.pid_exists(pid) and psutil.Process(pid).status()!=psutil.STATUS_ZOMBIE


def wait_until(is_so, seconds=20):
    deadline = time.monotonic()+seconds
    while not is_so() and time.monotonic()<deadline: time.sleep(.05)
    return is_so()


def slow_in_readers(monkeypatch, name, seconds):
    "Let this method of a `Recipe` take longer, unless the parent calls it"
    f = getattr(Recipe, name)
    def slow(*args):
        if in_reader(): time.sleep(seconds)
        return f(*args)
    monkeypatch.setattr(Recipe, name, slow)


# --- readers that end

def kill_one(readers): os.kill(list(readers.executor._processes)[0], signal.SIGKILL)


def kill_and_wait(feed): # until the parent surely knows
    kill_one(feed.readers)
    time.sleep(.5)


ENDED = 'A process that decodes images has ended'

def check_next_fit(learn, feed, old):
    "Has new readers, which know what the old ones decoded"
    before = n_decoded(feed)
    check_same(fit(learn), fit(learner(learn.dls)))
    assert feed.readers is not old and (feed.n_done, feed.why_not)==(4, '')
    assert n_decoded(feed)<=max(before, N) and all(map(is_running, pids(feed)))
    feed.release()


@only_forked
def test_a_reader_that_is_killed_while_it_decodes(files, monkeypatch):
    slow_in_readers(monkeypatch, 'decode', .2)
    start = Processes.__init__
    def start_and_kill(self, *args):
        start(self, *args)
        threading.Timer(.3, kill_one, [self]).start()
    learn = learner(make_dls(files), feed := FeedCallback(2))
    with monkeypatch.context() as patch:
        patch.setattr(Processes, '__init__', start_and_kill)
        with pytest.raises(RuntimeError, match=ENDED): fit(learn)
    check_next_fit(learn, feed, feed.readers)


@only_forked
def test_a_reader_that_is_killed_while_nobody_waits_for_it(files):
    "In the middle of a fit, whose images are all decoded"
    learn = learner(make_dls(files), feed := FeedCallback(2))
    killed = []
    def kill():
        if learn.epoch!=1 or killed: return
        killed.append(feed.readers)
        for o in feed.decoded.values(): wait(o.tasks)   # this epoch's batches
        kill_and_wait(feed)
    fit(learn, 3, on(after_batch=kill))
    assert feed.readers is not killed[0] and all(map(is_running, pids(feed)))
    check_next_fit(learn, feed, killed[0])


@only_forked
def test_a_reader_that_is_killed_between_fits(files):
    learn = learner(make_dls(files), feed := FeedCallback(2))
    fit(learn)
    kill_and_wait(feed)
    check_next_fit(learn, feed, feed.readers)


@only_forked
def test_a_reader_that_is_killed_when_a_fit_is_interrupted(files):
    learn = learner(make_dls(files), feed := FeedCallback(2))
    def interrupt():
        kill_and_wait(feed)
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): fit(learn, 2, on(after_batch=interrupt))
    check_next_fit(learn, feed, feed.readers)


@only_forked
def test_relative_paths_are_those_of_the_folder_in_which_a_fit_begins(tmp_path, monkeypatch):
    for k,name in enumerate(('one', 'two')):
        (tmp_path/name).mkdir()
        names = [o.name for o in save(tmp_path/name, [(20+i+k, 30-i) for i in range(N)])]
    feed = FeedCallback(2)
    for name in 'one', 'two', 'two':
        monkeypatch.chdir(tmp_path/name)
        old, learn = feed.readers, learner(make_dls([Path(o) for o in names]), feed)
        check_same(fit(learn), fit(learner(learn.dls)))
        assert feed.why_not=='' and (feed.readers is old)==(name=='two' and old.forked_with[0]==str(tmp_path/'two'))
        learn.remove_cb(feed)


@only_forked
def test_what_was_decoded_early_is_freed_with_the_rest(files):
    learn = learner(make_dls(files), feed := FeedCallback(2))
    def interrupt(): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): fit(learn, 1, on(after_train=interrupt))
    memory = feed.memory
    assert any(o.early for o in feed.decoded.values()) and memory.used>0
    feed.release()
    assert memory.used==0


def start_and_wait(connection):
    started = Processes(3, 2**20, 2**16)
    connection.send(list(started.executor._processes))
    time.sleep(60)


@only_forked
def test_readers_end_when_their_parent_is_killed():
    context = multiprocessing.get_context('fork')
    ours, theirs = context.Pipe()
    parent = context.Process(target=start_and_wait, args=(theirs,))
    parent.start()
    assert ours.poll(20)
    started = ours.recv()
    assert len(started)==3 and all(map(is_running, started))
    time.sleep(.5)                                   # they begin
    parent.kill()
    parent.join(20)
    is_done = wait_until(lambda: not any(map(is_running, started)))
    for o in filter(is_running, started): os.kill(o, signal.SIGKILL)
    assert is_done


# --- interrupts

def interrupt_all(readers):
    "What Ctrl-C does: the terminal interrupts each process of the group"
    for o in list(readers.executor._processes): os.kill(o, signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)


@only_forked
def test_an_interrupt_leaves_the_readers_as_they_are(files, monkeypatch):
    slow_in_readers(monkeypatch, 'decode', .02)
    learn = learner(make_dls(files), feed := FeedCallback(2))
    with pytest.raises(KeyboardInterrupt): fit(learn, 2, on(after_batch=lambda: interrupt_all(feed.readers)))
    gc.collect()
    time.sleep(.5)
    old = feed.readers
    assert all(map(is_running, pids(feed))) and len(old.rooms.free_rooms)==N_ROOMS
    assert [o.result(20) for o in [old.submit(nap, pickled(), None, 0) for _ in range(4)]]==[0]*4
    check_same(fit(learn), fit(learner(learn.dls)))
    assert feed.readers is old and n_decoded(feed)==N and not any(o.asked for o in feed.decoded.values())
    feed.release()


@only_forked
def test_nobody_writes_into_a_room_that_an_interrupted_fit_has_left(files, monkeypatch):
    "An interrupt comes while a reader makes the only batch, of one image, which takes 2 s"
    slow_in_readers(monkeypatch, 'finish', 2)
    submit, futures = Processes.submit, []
    def noted(*args):
        futures.append(submit(*args))
        return futures[-1]
    monkeypatch.setattr(Processes, 'submit', noted)
    learn = learner(make_dls(files, bs=1, n_train=1), feed := FeedCallback(2))
    timer = threading.Timer(1, lambda: interrupt_all(feed.readers))
    with pytest.raises(KeyboardInterrupt): fit(learn, 2, on(before_train=timer.start))
    gc.collect()
    assert len(feed.readers.rooms.free_rooms)==N_ROOMS and futures and all(o.done() for o in futures)
    feed.release()


# --- memory and files

@only_forked
@pytest.mark.parametrize('name', ['check_space', 'os.posix_fallocate'])
def test_a_full_disk_means_decoding_again(files, monkeypatch, name):
    def full(*args): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(f'gpubench.data.readers.{name}', full)
    monkeypatch.setattr('gpubench.data.feed.memory_bytes', lambda: (0, 0))
    learn = learner(make_dls(files), feed := FeedCallback(2))
    check_same(fit(learn, 3), fit(learner(learn.dls), 3))
    assert (feed.n_done, feed.why_not, feed.memory.used)==(6, '', 0) and n_decoded(feed)>=3*N
    feed.release()


@only_forked
def test_a_file_keeps_what_memory_has_no_room_for(files, monkeypatch):
    "The same as above, with space on the disk"
    slow_in_readers(monkeypatch, 'decode', .02)
    monkeypatch.setattr('gpubench.data.feed.memory_bytes', lambda: (0, 0))
    learn = learner(make_dls(files), feed := FeedCallback(2))
    check_same(fit(learn, 6), fit(learner(learn.dls), 6))
    assert feed.memory.used==0 and N<=n_decoded(feed)<=N+8
    feed.release()


@only_forked
def test_larger_batches_need_larger_rooms(files):
    "In new readers; what the others decoded stays"
    learn = learner(make_dls(files, bs=2), feed := FeedCallback(2))
    fit(learn)
    old = feed.readers
    learn.dls = DataLoaders(*(o.new(bs=8) for o in learn.dls.loaders))
    check_same(fit(learn), fit(learner(learn.dls)))
    assert feed.readers is not old and feed.readers.room(8, [(3, SIZE, SIZE)], False)
    assert (feed.n_done, feed.why_not, n_decoded(feed))==(4, '', N)
    for dl in learn.dls.loaders: dl.after_item.resize.size = (4*SIZE, 4*SIZE)
    check_same(fit(learn), fit(learner(learn.dls)))
    assert (feed.n_done, feed.why_not, n_decoded(feed))==(4, '', N)
    assert feed.memory.used==N*3*(4*SIZE)**2         # nothing of the smaller ones is kept
    feed.release()


@only_forked
def test_a_pass_goes_on_while_another_one_has_started_larger_rooms(files, monkeypatch):
    "Its readers don't know where the others keep their images"
    monkeypatch.setattr('gpubench.data.feed.N_ITEMS_AHEAD', 1)
    dls = make_dls(files, bs=1, n_train=10)
    larger = dls.train.new(bs=8, drop_last=False)
    def run(*cbs):
        learn = learner(dls, *cbs)
        inner = []
        def nested():
            if learn.training and learn.iter==1: inner.extend(cbs[0].nested(larger) if cbs else larger)
        return fit(learn, 1, on(after_batch=nested)), [b[0].clone() for b in inner]
    (outer, inner), (stock_outer, stock_inner) = run(feed := Nested(2)), run()
    check_same(outer, stock_outer)
    check_same(inner, stock_inner)
    feed.release()


class Nested(FeedCallback):
    def nested(self, dl): return self._feed(dl)


@only_forked
@pytest.mark.parametrize('n_rooms', [1, 3])
def test_batches_without_a_room(files, monkeypatch, n_rooms):
    "Are the same, made by the main process"
    item_tfms = RandomResizedCrop(SIZE)
    usual = fit(learner(make_dls(files, item_tfms), feed := FeedCallback(2)))
    feed.release()
    monkeypatch.setattr('gpubench.data.readers.N_ROOMS', n_rooms)
    check_same(fit(learner(make_dls(files, item_tfms), feed)), usual)
    assert len(feed.readers.rooms.free_rooms)==n_rooms
    feed.release()


@only_forked
def test_passes_within_passes(files):
    "Three at once need more rooms than there are"
    dls = make_dls(files, bs=1)
    learn = learner(dls, feed := Nested(2))
    fit(learn, 1)
    feeds = [feed.nested(dls.train) for _ in range(3)]
    for bs in zip(*feeds, dls.train, strict=True): assert all(torch.equal(o[0], bs[-1][0]) for o in bs)
    assert len(feed.readers.rooms.free_rooms)==N_ROOMS
    feed.release()


@pytest.mark.parametrize('forked', [pytest.param(True, marks=only_forked), False])
def test_images_of_several_shapes(files, monkeypatch, forked):
    "One by one as in fastai; together they raise its error, which names the shapes"
    monkeypatch.setattr('gpubench.data.readers.can_fork', lambda: forked)
    learn = learner(make_dls(files, [], bs=1), feed := FeedCallback(2))
    check_same(fit(learn), fit(learner(learn.dls)))
    used = feed.memory.used
    fit(learn)
    assert (feed.n_done, feed.why_not, n_decoded(feed), feed.memory.used)==(4, '', N, used)
    learn.dls = DataLoaders(*(o.new(bs=2) for o in learn.dls.loaders))
    with pytest.raises(RuntimeError, match=r'(?s)Item at index 1 has shape: torch.Size\(\[3, '): fit(learn)
    learn.dls = DataLoaders(*(o.new(bs=1) for o in learn.dls.loaders))
    check_same(fit(learn), fit(learner(learn.dls)))
    feed.release()


@only_forked
def test_a_switch_of_pillows_reaches_the_readers(tmp_path, monkeypatch):
    "As after an error that names it"
    files = save(tmp_path, [(64, 64)]*N)
    files[5].write_bytes(files[5].read_bytes()[:9000])
    learn = learner(make_dls(files), feed := FeedCallback(2))
    with pytest.raises(OSError, match='truncated'): fit(learn)
    monkeypatch.setattr(ImageFile, 'LOAD_TRUNCATED_IMAGES', True)
    check_same(fit(learn), fit(learner(learn.dls)))
    assert feed.why_not==''
    feed.release()


class Plain(ImageFile.ImageFile):
    "Of our own format: SIZE by SIZE pixels"
    format = 'PLAIN'
    def _open(self): self._mode, self._size, self.tile = 'RGB', (SIZE, SIZE), [ImageFile._Tile('raw', (0, 0, SIZE, SIZE), 5, ('RGB', 0, 1))]
@only_forked
def test_an_opener_that_is_registered_after_a_failed_fit(tmp_path, monkeypatch):
    for i in range(N): (tmp_path/f'{i:02d}.plain').write_bytes(b'PLAIN'+bytes(range(i, i+48))*16)
    dls = make_dls(save(tmp_path, [(SIZE, SIZE)]*N))
    for o in dls.loaders: o.dataset.tls[0].items[:] = [f.with_suffix('.plain') for f in o.dataset.items]
    learn = learner(dls, feed := FeedCallback(2))
    with pytest.raises(UnidentifiedImageError): fit(learn)
    Image.init()
    monkeypatch.setattr(Image, 'ID', [*Image.ID])
    monkeypatch.setattr(Image, 'OPEN', {**Image.OPEN})
    Image.register_open('PLAIN', Plain, lambda start: start.startswith(b'PLAIN'))
    check_same(fit(learn), fit(learner(learn.dls)))
    assert (feed.n_done, feed.why_not)==(0, 'It has its own opener of PLAIN files.')
    feed.release()


def test_the_switch_interval_comes_back_whoever_ends_first():
    before = sys.getswitchinterval()
    a, b = (feed_in_use() for _ in range(2))
    next(a), next(b)
    assert sys.getswitchinterval()<before
    a.close()
    assert sys.getswitchinterval()<before
    b.close()
    assert sys.getswitchinterval()==before

def feed_in_use():
    with switching_often: yield


def shm_bytes(pid):
    "What a process has mapped of /dev/shm"
    with open(f'/proc/{pid}/maps') as f: lines = [o.split() for o in f if '/dev/shm/' in o]
    return sum(int(b, 16)-int(a, 16) for a,b in (o[0].split('-') for o in lines))


@only_forked
def test_nothing_is_put_into_dev_shm(files):
    "Which is small in a container"
    learn = learner(make_dls(files), feed := FeedCallback(2))
    before = shm_bytes('self')
    fit(learn)
    assert all(shm_bytes(o)-before<2**20 for o in ['self', *pids(feed)])
    feed.release()


def rss_bytes(): return psutil.Process().memory_info().shared


@only_forked
def test_memory_that_is_freed_goes_back_to_the_system():
    n_bytes = 64*2**20
    memory, before = SharedMemory(1, n_bytes), rss_bytes()
    memory.begin(0)
    places = memory.put([np.full((n_bytes//2,), 7, np.uint8) for _ in range(2)], True)
    assert rss_bytes()-before>.9*n_bytes
    memory.free(places[:1])
    assert rss_bytes()-before<.6*n_bytes
    assert [memory.get([o])[0].max() for o in places]==[0, 7]
    memory.free(places)
    assert rss_bytes()-before<.1*n_bytes


@only_forked
def test_images_that_readers_still_need_are_not_freed(files, monkeypatch):
    "By a release within a pass, while batches are on their way"
    slow_in_readers(monkeypatch, 'finish', .05)
    learn = learner(make_dls(files, bs=2, n_train=10), feed := FeedCallback(2))
    def release():
        if learn.epoch==1 and learn.training and learn.iter==0: feed.release()
    check_same(fit(learn, 2, on(after_batch=release)), fit(learner(learn.dls)))
    feed.release()


@only_forked
def test_an_image_that_is_decoded_by_several_readers_at_once(files, monkeypatch):
    "Another one may already read what the first of them kept"
    slow_in_readers(monkeypatch, 'decode', .05)
    monkeypatch.setattr(Decoded, 'is_full', property(lambda self: True, lambda *args: None), raising=False)   # none is decoded ahead
    learn = learner(make_dls(files[:1]*N, bs=1, n_train=10), feed := FeedCallback(2))
    check_same(fit(learn), fit(learner(learn.dls)))
    feed.release()


@only_forked
def test_an_arena_that_is_full_takes_what_still_fits(tmp_path):
    for folder in None, tmp_path:
        arena, page = Arena(3*4096, folder), np.ones(4096, np.uint8)
        assert [arena.put(o) for o in (page, np.ones(3*4096, np.uint8), page, page, page)]==[0, None, 4096, 8192, None]
        assert [*tmp_path.iterdir()]==[]             # the file has no name, so that it ends with its processes


# --- their tasks

def nap(reader, room, seconds):
    time.sleep(seconds)
    return 0


def pickled(): return pickle.dumps((Recipe([PILImage], [], [], 0), None))


@pytest.mark.parametrize('make', [pytest.param(lambda: Processes(2, 2**20, 2**16), marks=only_forked), lambda: Threads(2, 2**20)],
                         ids=['processes', 'threads'])
def test_urgent_tasks_do_not_wait_for_all_others(make):
    readers = make()
    others = [readers.later(nap, pickled(), None, .05) for _ in range(40)]
    assert readers.submit(nap, pickled(), None, 0).result(20)==0
    assert sum(o.done() for o in others)<20
    assert all(o.cancel() for o in others[20:])
    assert [o.result(20) for o in others[:20]]==[0]*20


@only_forked
def test_all_tasks_end_when_a_reader_is_killed():
    "Those that wait for their turn, too"
    readers = Processes(2, 2**20, 2**16)
    others = [readers.later(nap, pickled(), None, .2) for _ in range(20)]
    kill_one(readers)
    assert {type(o.exception(20)) for o in others[4:]}=={BrokenProcessPool}


@only_forked
def test_readers_leave_the_garbage_of_the_process_that_forked_them(files, tmp_path):
    "Such as a CUDA graph, whose end in a forked process would be a crash"
    class Cycle:
        def __init__(self): self.me = self
        def __del__(self): (tmp_path/f'{os.getpid()}').write_text('')
    gc.disable()
    try:
        Cycle()
        fit(learner(make_dls(files), feed := FeedCallback(2)))
        for _ in range(8): feed.readers.submit(collect, feed.decoded[next(iter(feed.decoded))].pickled, None).result()
    finally: gc.enable()
    gc.collect()
    assert [o.name for o in tmp_path.iterdir()]==[f'{os.getpid()}']

def collect(*args): gc.collect()


@only_forked
@pytest.mark.parametrize('daemon', [False, True])
def test_a_process_of_multiprocessing_that_trains_comes_to_its_end(files, daemon):
    "As in a pool of processes; the Learner is never released"
    if torch.cuda.is_initialized(): pytest.skip("CUDA doesn't survive a fork.")
    process = multiprocessing.get_context('fork').Process(target=train_and_stay, args=(files,), daemon=daemon)
    process.start()
    process.join(60)
    assert process.exitcode==0

def train_and_stay(files):
    torch.set_num_threads(1)
    fit(learner(make_dls(files), stays := FeedCallback(2)))
    kept.append(stays)
    assert stays.n_done and isinstance(stays.readers, Threads if multiprocessing.current_process().daemon else Processes)
kept = []
