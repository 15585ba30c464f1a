# %% Workers beside a GPU
from pytest import approx, raises
from replay import again, planted
def line(**kw): return dict(bs=8, decode_ms=20., worker_ms=24., ready_ms=2., train_ms=4., busy_cores=1., cores=16) | kw
assert predict_ms(0, line())==24                                 # one after the other
assert [predict_ms(o, line()) for o in (1, 2, 4, 8)]==approx([24, 12, 6, 6])
assert enough(line())==4 and enough(line(worker_ms=24.1))==5
assert enough(line(worker_ms=5.))==1                             # the main process is the slower one

# %% Workers on the cores that train: a batch takes one core for 24 + 2 ms and two of them for 20 ms
few = line(train_ms=20., busy_cores=2., cores=2)
assert [predict_ms(o, few) for o in (1, 2, 8)]==approx([33]*3) and enough(few)==1
assert at_least_ms(few)==dict(main=22, cores=33)
assert predict_ms(0, few)==40                                    # without workers nothing happens at the same time

# %% A worker decodes whole batches: two workers need two rounds for three batches, and one of them none for one
assert [epoch_ms(n, 240//n, 2, 2., 0) for n in (8, 4, 3, 2, 1)]==[240, 240, 320, 240, 480]
assert epoch_ms(4, 60, 0, 2., 0)==480                              # without workers, one batch after the other

# %% Half of the time is waiting, on a machine that does nothing else
from types import SimpleNamespace
class SlowLoader: # whose every batch of 8 takes so long to make
    def __init__(self, per_batch_s, n=96): self.per_batch_s, self.n = per_batch_s, n
    def __iter__(self):
        for i in range(self.n//8):
            sleep(self.per_batch_s)
            self.made = i+1
            yield ()
def fed(loader, pause_ms, **kw):
    with planted(get_dls=lambda **kw: SimpleNamespace(train=loader), bs=8): return feed(0, pause_ms, **kw)
loader = SlowLoader(.02)
found = fed(loader, 20)
assert .25<found['wait_frac']<.75 and found['images_per_s']<8/.04 and found['wait_ms']>=20
assert fed(loader, 0)['wait_frac']>.9                            # nothing but waiting

# %% `feed` takes the first batch, which is not timed, and as many as it is told; no more than there are
for n_images,made in ((240, 6), (32, 4)):
    fed(loader := SlowLoader(.002, n_images), 0, n=5)
    assert loader.made==made, n_images

# %% The loader alone is timed from the second batch on
now = iter([5., 7., 8., 9., 10.])
with planted(perf_counter=lambda: next(now)): assert loader_ms(range(5))==1e3

# %% By hand, a step ends when the next one begins, and the last epoch counts
clock, ticks = ClockCallback(), iter(range(100))
clock.learn = SimpleNamespace(training=True)
with planted(perf_counter=lambda: next(ticks), process_time=lambda: 0):
    for _ in range(2):
        clock.before_train()
        for _ in range(3): clock.after_batch()
assert [o[0] for o in clock.ends]==[3, 4, 5]

# %% Measured against predicted
made = pd.DataFrame([dict(loader='files', n_workers=n, steady_images_per_s=v, wait_frac=.1) for n,v in ((0, 300.), (0, 320.), (4, 1000.))]
                    + [dict(loader='memory', n_workers=0, steady_images_per_s=9e9, wait_frac=.1)])
table = compared(made, line())
assert table.predicted.tolist()==approx([8/.024, 8/.006]) and table.measured_over_predicted.tolist()==approx([310*.024/8, .75])

# %% Every number of workers is compared with the best of the others, and other loaders aren't
made = pd.DataFrame([dict(device='cpu', loader=o, n_workers=n, visit=i, steady_images_per_s=v*f)
                     for o,n,v in (('files', 0, 50), ('files', 2, 100), ('files', 4, 80), ('memory', 0, 999)) for i,f in enumerate((1., 1.01, .99))])
table = against_best(made)
assert list(table.index)==[0, 2, 4] and list(table.base)==[2, 4, 2] and str(choose(table))=='2 is enough.'
assert abs(table.ratio[0].mid/.5-1)<.05 and list(table.verdict)==['slower', 'faster', 'slower']
assert choose(against_best(made[made.n_workers<4])).missing=='larger'              # at the edge of what was tried

# %% Files with the best number of workers beside the ways that need none
import io
from contextlib import redirect_stdout
made = pd.DataFrame([dict(loader=o, n_workers=n, pin_memory=p, steady_images_per_s=v)
                     for o,n,p,v in (('files', 0, False, 50), ('files', 2, False, 100), ('cached', 0, False, 400), ('memory', 0, True, 300))])
assert dict(each_way(made)[['way', 'steady_images_per_s']].values)=={'files, 2 workers': 100, 'cached': 400, 'memory, pinned': 300}
def end_of(cached):
    rows = [dict(loader=o, n_workers=0, pin_memory=False, steady_images_per_s=v*f, setup_s=1., wait_ms=1., copy_ms=1., step_ms=1.)
            for o,v in (('files', 100.), ('cached', cached)) for f in (1., 1.01, .99)]
    with planted(runs={here: pd.DataFrame(rows)}), redirect_stdout(io.StringIO()) as out:
        again('def each_way')
        return out.getvalue()
assert 'cached over the best from files: 4 ' in end_of(400.) and ': faster\n' in end_of(400.)
assert ': not distinguishable\n' in end_of(100.)

# %% The sweep visited it, and its batches needed no worker
mine = visits[visits.loader=='cached']
assert len(mine)==repeats and set(mine.n_workers)=={0} and 'cached' not in set(recorded.loader)

# %% A system without workers, as macOS: the lab says so, and goes on with none
def told(n_workers):
    dls = lambda **kw: SimpleNamespace(train=SimpleNamespace(fake_l=SimpleNamespace(num_workers=n_workers)))
    with planted(get_dls=dls, feed=lambda workers, pauses: dict(workers=workers, images_per_s=1., wait_frac=.5, wait_ms=2.)):
        with redirect_stdout(io.StringIO()) as out: again('can_have =')
    return out.getvalue()
kept = list(lab.mine)
assert ['gives fastai no workers' in told(n) for n in (0, 1)]==[True, False]
lab.mine = kept

# %% Too few batches are refused before anything is measured
with planted(max_images=8*bs), raises(ValueError, match='batches, too few to time. Take a smaller bs'): again('here, on_gpu =')
