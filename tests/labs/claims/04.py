# %% Workers beside a GPU
from pytest import approx, raises
from replay import again, planted
def rates(**kw): return dict(loader_per_s=100., train_per_s=400., free_cores=16, busy_cores=1) | kw
assert predict_per_s(0, rates())==approx(80)                     # 10 ms and 2.5 ms an image, one after the other
assert [predict_per_s(o, rates()) for o in (1, 2, 4, 8)]==[100, 200, 400, 400]
assert enough(rates())==4 and enough(rates(train_per_s=401.))==5
assert enough(rates(loader_per_s=1000.))==1                      # the network is the slower one

# %% Workers on the cores that train: an image takes 10 ms of one core and 2.5 of two, so 15 of two cores' time
cores = rates(free_cores=2, busy_cores=2)
assert [predict_per_s(o, cores) for o in (1, 2, 8)]==approx([100, 2/.015, 2/.015])
assert enough(cores)==2
assert predict_per_s(0, cores)==predict_per_s(0, rates())        # without workers no two of them are busy with different things

# %% Too few cores beside a GPU
few = rates(train_per_s=4000., free_cores=4)
assert predict_per_s(64, few)==approx(4/(1/100+1/4000)) and predict_per_s(64, few)<400
assert enough(few)==4

# %% Half of the time is waiting, on a machine that does nothing else
from types import SimpleNamespace
class SlowLoader: # whose every batch of 8 takes so long to make
    def __init__(self, per_batch_s, n=96): self.per_batch_s, self.n, self.fake_l = per_batch_s, n, SimpleNamespace()
    def __iter__(self):
        for i in range(self.n//8):
            sleep(self.per_batch_s)
            self.made = i+1
            yield ()
def fed(loader, pause_s, **kw):
    with planted(get_dls=lambda **kw: SimpleNamespace(train=loader), bs=8): return feed(0, [pause_s], **kw)
loader = SlowLoader(.02)
found = fed(loader, .02, ahead=5)
assert .25<found['wait_frac']<.75 and found['images_per_s']<8/.04
assert loader.fake_l.prefetch_factor==5
assert fed(loader, 0)['wait_frac']>.9                            # nothing but waiting

# %% `feed` takes the first batch, which is not timed, and as many as it is told; no more than there are
for n_images,made in ((240, 6), (32, 4)):
    fed(loader := SlowLoader(.002, n_images), 0, n=5)
    assert loader.made==made, n_images

# %% Stages are told from the slowest
ms = [67.108864/10, 67.108864/50, .03]                           # 10 and 50 GB/s
copied = dict(copies=dict(way=['pageable', 'pinned', 'within the device'], mib=[64]*3, returns_ms=[4, 1, None], there_ms=ms))
found = stages(dict(loader_per_s=300., train_per_s=30_000., model='x', size=224), copied)
assert found.index[0]=='decoding in one process' and found.images_per_s.is_monotonic_increasing
assert found.images_per_s['copy, pageable, bytes']==round(10e9/150_528)
assert found.images_per_s['copy, pinned, float32']==round(50e9/150_528/4)
assert list(found.index).index('copy, pageable, float32')<list(found.index).index('training x')  # there the copy limits

# %% A system without workers, as macOS: fastai asks nobody and takes none, and the lab tells
import io
from contextlib import redirect_stdout
def told(n_workers, n_batches): # what is printed on a system that gives so many workers
    train = type('Train', (list,), dict(fake_l=SimpleNamespace(num_workers=n_workers)))(range(n_batches))
    dls = SimpleNamespace(train=train, train_ds=[0]*9)
    with planted(size=None, bs=None, max_images=None, get_dls=lambda **kw: dls), redirect_stdout(io.StringIO()) as out:
        again('size, bs = size or')
    return out.getvalue()
assert ['starts no workers' in told(n, 4) for n in (0, 1)]==[True, False]

# %% Too few batches are refused before anything is measured: one would be divided by the time of none
with raises(ValueError, match='bs=4 makes 3 batches of 9 training images, too few to time. Take a smaller bs'): told(1, 3)
