"""From stock fastai to `speed_up` on a CPU, beside Keras: the MNIST CNN of 54,528 parameters, batch 1000, fp32

    ladder_cpu.py --out ladder_cpu.json [--rounds 5] [--keras PYTHON] [--rungs stock pages jemalloc tcmalloc]

Each run is a process of its own, since kept pages are kept until a process ends; in each round every rung runs once,
in an order of its own. A run trains an epoch of 15 steps as warm-up, then four; its figure is the median of their
milliseconds a step, from the first batch asked for to the last step done. PYTHON is that of an environment with
Keras and TensorFlow, which trains the same network on the same number of images, normalized beforehand, by `fit`;
`keras_pages` has glibc keep its pages, too, by environment variables. `jemalloc` and `tcmalloc` are stock fastai
with another allocator in place of glibc's, which the system must have."""
import json, os, resource, sys
from statistics import median
from time import perf_counter

from common import alternate, out_parser, run_apart, spread, write_json

N, BS = 15_000, 1000
RUNGS = ['stock', 'pages', 'channels_last', 'onednn', 'speed_up', 'keras', 'keras_pages']
ALLOCATORS = dict(jemalloc='libjemalloc.so.2', tcmalloc='libtcmalloc_minimal.so.4')
PAGES = dict(MALLOC_MMAP_THRESHOLD_=str(1<<30), MALLOC_TRIM_THRESHOLD_=str(1<<40))

def found(times, n_steps, faults):
    return dict(step_ms=median(times), faults_per_step=faults/n_steps,
                peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/2**10)

def n_faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def by_fastai(rung):
    import io
    from contextlib import redirect_stdout
    from gpubench.data.loaders import get_dls
    from gpubench.step.fast import speed_up
    from gpubench.step.layout import OneDNNCallback, keep_pages
    from gpubench.run.models import get_model
    from fits import NoValidationCallback
    from fastai.callback.channelslast import ChannelsLast
    from fastai.callback.core import Callback
    from fastai.callback.progress import ProgressCallback  # noqa: F401 (the bar that a fastai user has)
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat
    class ClockCallback(Callback):
        order = 1e9
        def __init__(self): self.times = []
        def before_train(self): self.start_s = perf_counter()
        def after_train(self): self.times.append(1e3*(perf_counter()-self.start_s)/self.n_iter)
    dls = get_dls('synthetic', bs=BS, loader='resident', device='cpu', max_images=N*5//4, size=28, n_channels=1)
    clock = ClockCallback()
    learn = Learner(dls, get_model('lenet', n_in=1), loss_func=CrossEntropyLossFlat(),
                    cbs=[clock, NoValidationCallback()])
    if rung not in ('stock', *ALLOCATORS): keep_pages()
    if rung=='channels_last': learn.add_cb(ChannelsLast())
    if rung=='onednn': learn.add_cb(OneDNNCallback())
    if rung=='speed_up': speed_up(learn)
    with redirect_stdout(io.StringIO()):
        learn.fit(1, 1e-3)
        before = n_faults()
        learn.fit(4, 1e-3)
    return found(clock.times[1:], 4*len(dls.train), n_faults()-before)

def by_keras():
    import keras, numpy as np
    from keras import layers as l
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((N, 28, 28, 1), dtype=np.float32), rng.integers(0, 10, N)
    def conv(n, **kwargs): return l.Conv2D(n, 3, activation='relu', use_bias=False, **kwargs)
    model = keras.Sequential([keras.Input((28, 28, 1)), conv(16), l.MaxPool2D(), conv(32), l.MaxPool2D(),
                              conv(32, padding='same'), l.Flatten(),
                              l.Dense(50, activation='relu'), l.Dense(10)])
    assert model.count_params()==54_528
    model.compile('adam', keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    class Clock(keras.callbacks.Callback):
        times = []
        def on_epoch_begin(self, *args): self.start_s = perf_counter()
        def on_epoch_end(self, *args): self.times.append(1e3*(perf_counter()-self.start_s)/(N//BS))
    model.fit(x, y, batch_size=BS, epochs=1, verbose=0)
    before = n_faults()
    model.fit(x, y, batch_size=BS, epochs=4, verbose=0, callbacks=[Clock()])
    return found(Clock.times, 4*N//BS, n_faults()-before) | dict(keras=keras.__version__)

def main():
    from gpubench.ground.stats import ratio_ci
    p = out_parser(__doc__)
    p.add_argument('--rounds', type=int, default=5)
    p.add_argument('--keras', metavar='PYTHON')
    p.add_argument('--rungs', nargs='+', default=RUNGS, choices=[*RUNGS, *ALLOCATORS])
    args = p.parse_args()
    def run(rung):
        env = PAGES if rung=='keras_pages' else dict(LD_PRELOAD=ALLOCATORS[rung]) if rung in ALLOCATORS else {}
        python = args.keras if 'keras' in rung else sys.executable
        return run_apart(python, __file__, 'one', rung, env=os.environ | env)
    names = [o for o in args.rungs if args.keras or 'keras' not in o]
    runs = alternate({o: o for o in names}, args.rounds, run)
    times = {k: [o['step_ms'] for o in v] for k,v in runs.items()}
    ratios = {k: {other: vars(ratio_ci(times[k], times[other])) for other in times if other!=k} for k in times}
    write_json(args.out, 'cpu', runs=runs, ratios=ratios)
    for k,v in times.items():
        faults, mib = (median(o[c] for o in runs[k]) for c in ('faults_per_step', 'peak_mib'))
        print(f"{k:14} {spread(v, '.1f', ' ms')}, {faults:,.0f} faults, {mib:,.0f} MiB")

if __name__=='__main__':
    if sys.argv[1:2]==['one']: print(json.dumps(by_keras() if 'keras' in sys.argv[2] else by_fastai(sys.argv[2])))
    else: main()
