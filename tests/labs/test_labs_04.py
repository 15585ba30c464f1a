"""Lab 04: the prediction of the workers, the clocks of its loops, and the systems on which fastai starts no workers"""
from time import sleep
from types import SimpleNamespace

import pandas as pd
import pytest
from math import ceil
from test_labs import cell_of, functions

lab = '04_data_loading'

def machine(**kw): return dict(loader_per_s=100., train_per_s=400., free_cores=16, busy_cores=1) | kw

def prediction():
    found = functions(lab, 'def predict_per_s', ceil=ceil)
    return found['predict_per_s'], found['enough']

def test_workers_beside_a_gpu():
    predict, enough = prediction()
    assert predict(0, machine())==pytest.approx(80)                      # 10 ms and 2.5 ms an image, one after the other
    assert [predict(o, machine()) for o in (1, 2, 4, 8)]==[100, 200, 400, 400]
    assert enough(machine())==4 and enough(machine(train_per_s=401.))==5
    assert enough(machine(loader_per_s=1000.))==1                        # the network is the slower one

def test_workers_on_the_cores_that_train():
    predict, enough = prediction()
    cores = machine(free_cores=2, busy_cores=2)                          # an image takes 10 ms of one core and 2.5 of two: 15 of two cores' time
    assert [predict(o, cores) for o in (1, 2, 8)]==pytest.approx([100, 2/.015, 2/.015])
    assert enough(cores)==2
    assert predict(0, cores)==predict(0, machine())                      # without workers no two of them are busy with different things

def test_too_few_cores_beside_a_gpu():
    predict, enough = prediction()
    few = machine(train_per_s=4000., free_cores=4)
    assert predict(64, few)==pytest.approx(4/(1/100+1/4000)) and predict(64, few)<400
    assert enough(few)==4

def feeding(per_batch_s, n_images=96):
    "`feed` with a loader whose every batch of 8 takes so long to make"
    def batches(n):
        for i in range(n):
            sleep(per_batch_s)
            loader.made = i+1
            yield ()
    class Loader:
        fake_l, n = SimpleNamespace(), n_images
        def __iter__(self): return batches(self.n//8)
    loader = Loader()
    from time import perf_counter
    known = dict(get_dls=lambda **kw: SimpleNamespace(train=loader), images={}, bs=8, sleep=sleep, perf_counter=perf_counter)
    return functions(lab, 'def feed', **known)['feed'], loader

def test_feed():
    feed, loader = feeding(.02)
    found = feed(0, [.02], ahead=5)
    assert .25<found['wait_frac']<.75 and found['images_per_s']<8/.04     # half of the time, on a machine that does nothing else
    assert loader.fake_l.prefetch_factor==5
    assert feed(0, [0])['wait_frac']>.9                                  # nothing but waiting

@pytest.mark.parametrize('n_images,made', [(240, 6), (32, 4)])
def test_feed_takes_as_many_batches_as_it_is_told(n_images, made):
    "The first one, which is not timed, and five; no more than there are"
    feed, loader = feeding(.002, n_images)
    feed(0, [0], n=5)
    assert loader.made==made

def test_stages_are_told_from_the_slowest():
    found = functions(lab, 'def stages', 'def copies', pd=pd)
    copied = dict(copies=dict(way=['pageable', 'pinned', 'within the device'], mib=[64]*3, returns_ms=[4, 1, None],
                              there_ms=[67.108864/10, 67.108864/50, .03]))                 # 10 and 50 GB/s
    table = found['stages'](dict(loader_per_s=300., train_per_s=30_000., model='x', size=224), copied)
    assert table.index[0]=='decoding in one process' and table.images_per_s.is_monotonic_increasing
    assert table.images_per_s['copy, pageable, bytes']==round(10e9/150_528)
    assert table.images_per_s['copy, pinned, float32']==round(50e9/150_528/4)
    assert list(table.index).index('copy, pageable, float32')<list(table.index).index('training x')  # there the copy limits

def run_sizes(n_workers, n_batches):
    "The cell that makes the pictures, on a system that gives so many workers"
    class Train(list): fake_l = SimpleNamespace(num_workers=n_workers)
    dls = SimpleNamespace(train=Train(range(n_batches)), train_ds=[0]*9)
    exec(cell_of(lab, 'size, bs = size or'), dict(size=None, on_gpu=False, dataset='birds', bs=None, max_images=None, seed=0, here='cpu',
                                                  model='cnn_small', get_dls=lambda **kw: dls, plan=lambda o: o))

@pytest.mark.parametrize('n', [0, 1])
def test_a_system_without_workers_is_told(n, capsys):
    "macOS and notebooks on Windows: fastai asks nobody and takes none"
    run_sizes(n, 4)
    assert ('starts no workers' in capsys.readouterr().out)==(n==0)

def test_too_few_batches():
    "Refused before anything is measured; one batch would be divided by the time of none"
    with pytest.raises(ValueError, match='bs=4 makes 3 batches of 9 training images, too few to time. Take a smaller bs'): run_sizes(1, 3)
