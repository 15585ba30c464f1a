"""From stock fastai to a compiled, captured step, one change per rung, beside the same step by hand with nothing around
it

    ladder.py --device cuda --out ladder.json [--rounds 5] [--case resnet18_32px_b64 ...] [--peers jax ...] [--joules-s 2]

Each rung is a Learner on data that lies on the device, with its recorder and its progress bar (written to a file). A
run is the training part of one epoch without validation, from the first batch asked for to the last step done, the
shuffle included; its figure is microseconds a step. In each round every rung runs once, in an order of its own. Rungs
without cuDNN's search live in a process of their own: a process keeps the kernel that it used first for a shape,
searched or not. `hand` is the limit: the same network compiled and captured with cuDNN's search, and AdamW at a
constant rate, compiled as well (which takes minutes for a ResNet), replayed once for each step of an epoch. It is the
fastest of four ways, `hand_us`: weights in channels_last or as PyTorch makes them, and batches gathered by the compiled
kernels or before each replay. `--peers` adds other frameworks (see peers.py).

Afterwards a profiler looks at a few steps of each rung: what was launched, how often the host waited, how long
kernels of which kind ran, and which ran longest. `valid_us` is the time of a batch of validation, `bound_us` the
least time that the card's own rates of products and copies allow (see `gpubench.run.models.bound_ms`). Joules per image
come from the card's energy counter, which ticks every 0.1 s, over runs of `--joules-s` seconds; 0 leaves them out."""
import io, re
from collections import Counter
from contextlib import redirect_stdout
from functools import lru_cache, partial
from statistics import median
from time import perf_counter

from gpubench.ground.core import free_memory, wait_for
from gpubench.data.loaders import get_dls
from gpubench.step.fast import DeferredRecorder, FusedStepCallback, GraphedStepCallback, swap_recorder
from gpubench.run.models import bound_ms, device_rates, get_model
from gpubench.watch.nvml import open_gpu
from gpubench.ground.stats import ratio_ci
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback  # noqa: F401 (the bar that a fastai user has)
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
import torch

from common import alternate, device_of, device_parser, write_json
from fits import NoValidationCallback, bf16_callbacks, search_kernels
from peers import PEERS, in_own_process

# name -> model, batch size, px, channels, bf16 or not, images (a fifth is held out), steps of a run
CASES = dict(
    resnet18_32px_b16=('resnet18', 16, 32, 3, True, 62_500, 3125),
    resnet18_32px_b64=('resnet18', 64, 32, 3, True, 62_500, 781),
    resnet18_32px_b256=('resnet18', 256, 32, 3, True, 62_500, 195),
    resnet18_32px_b1024=('resnet18', 1024, 32, 3, True, 62_500, 48),
    resnet18_32px_b4096=('resnet18', 4096, 32, 3, True, 62_500, 12),
    mnist_cnn_b64=('lenet', 64, 28, 1, False, 75_000, 937), mnist_cnn_b1000=('lenet', 1000, 28, 1, False, 75_000, 60),
    resnet18_224px_b256=('resnet18', 256, 224, 3, True, 6_000, 18),
    resnet50_224px_b128=('resnet50', 128, 224, 3, True, 6_000, 36))

class StartCallback(Callback):
    order, graph_safe = 1e9, 'counts'
    def before_train(self):
        wait_for(self.learn.dls.device)
        self.start_s = perf_counter()

class EndCallback(Callback):
    order, graph_safe = -1e9, 'counts'
    def after_train(self):
        wait_for(self.learn.dls.device)
        self.took_s = perf_counter()-self.learn.start.start_s

def no_waits(learn): swap_recorder(learn, DeferredRecorder())
def fused(learn):
    no_waits(learn)
    learn.add_cb(FusedStepCallback())
def kernels(learn):
    "cuDNN searches, and a network in fp32 gets channels_last, which those of bf16 have already"
    fused(learn)
    learn.searches = True
    if not any(isinstance(o, ChannelsLast) for o in learn.cbs): learn.add_cb(ChannelsLast())
def graph(learn, compile=False):
    kernels(learn)
    learn.remove_cb(learn.fused_step)
    learn.add_cb(GraphedStepCallback(compile))
def bf16(learn): learn.add_cbs(bf16_callbacks())

def rungs(is_bf16):
    "name -> changes to a Learner; from `stock_bf16` on, all rungs of a bf16 case have bf16 and channels_last"
    first, last = (dict(stock=[], stock_bf16=[bf16]), [bf16]) if is_bf16 else (dict(stock=[]), [])
    return first | dict(no_waits=[*last, no_waits], fused=[*last, fused], kernels=[*last, kernels],
                        graph=[*last, graph], compiled_graph=[*last, partial(graph, compile=True)])

APART = 'stock', 'stock_bf16', 'no_waits', 'fused'            # without cuDNN's search
SLOW = *APART, 'kernels'                                      # rungs that take a fortieth of the steps, at least 12 of them

@lru_cache(1)                                                # 6,000 images of 224 px take many seconds to draw
def images(size, n_in, n, device):
    return get_dls('synthetic', bs=64, loader='resident', device=device, max_images=n, size=size, n_channels=n_in)

def loaders(case, device):
    "Loaders of their own over the case's images"
    _, bs, size, n_in, _, n, _ = case
    return DataLoaders(*(o.new(bs=bs) for o in images(size, n_in, n, device)), device=device)

def make_learner(case, changes, device):
    "A Learner that has trained for a few steps, with loaders of its own"
    dls = loaders(case, device)
    set_seed(0)
    learn = Learner(dls, get_model(case[0], n_in=case[3]), loss_func=CrossEntropyLossFlat())
    learn.searches = False
    for o in changes: o(learn)
    learn.add_cbs([StartCallback(), EndCallback(), NoValidationCallback()])
    step_us(learn, 6)
    return learn

def step_us(learn, n_steps):
    learn.dls.train.n = n_steps*learn.dls.train.bs
    search_kernels(learn.searches)
    with redirect_stdout(io.StringIO()): learn.fit(1, 1e-3)
    return 1e6*learn.end.took_s/n_steps

def make_learners(names, case, device): return {k: make_learner(case, rungs(case[4])[k], device) for k in names}
def on_rung(learners, name, look, *args): return look(partial(step_us, learners[name]), *args)
def call(run, *args): return run(*args)

def valid_us(run):
    "Of a batch, validation as `fit` does it, by the Learner of a rung"
    [learn] = run.args
    dl = learn.dls.valid
    dl.n = min(dl.n//dl.bs, 50)*dl.bs
    with learn.removed_cbs(learn.no_validation), redirect_stdout(io.StringIO()):
        wait_for(dl.device)
        start_s = perf_counter()
        learn.validate()
        wait_for(dl.device)
    return 1e6*(perf_counter()-start_s)/len(dl)

HAND = {f'{layout}, gathered {where}': (memory_format, where=='within') for where in ('within', 'before')
        for layout,memory_format in (('channels_last', torch.channels_last), ('plain', torch.contiguous_format))}

def by_hand(case, device, layout, gathers):
    "A function that returns microseconds a step; `gathers`: the compiled kernels take their batch out of all images themselves"
    model, bs, _, n_in, is_bf16, _, n_steps = case
    dls = loaders(case, device)
    set_seed(0)
    net = get_model(model, n_in=n_in).to(device, memory_format=layout)
    search_kernels()
    opt = torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-3, device=device), betas=(.9, .99),
                            eps=1e-5, foreach=True, capturable=True)
    # one kernel; torch's fused AdamW gives a small network to few multiprocessors
    update = torch.compile(opt.step)
    x, y = dls.train_ds.x[dls.train_ds.rows], dls.train_ds.y[dls.train_ds.rows]
    mean, std = x[:5000].float().mean()/255, x[:5000].float().std()/255
    order = torch.zeros((n_steps, bs), dtype=torch.int64, device=device)
    at = torch.zeros(1, dtype=torch.int64, device=device)
    def gathered():
        i = order.index_select(0, at)[0]
        return x[i], y[i]
    own_x, own_y = gathered()
    @torch.compile(fullgraph=True, dynamic=False)
    def forward():
        x, y = gathered() if gathers else (own_x, own_y)
        return torch.nn.functional.cross_entropy(net((x.float()/255-mean)/std).float(), y)
    def step():
        opt.zero_grad(set_to_none=True)
        with torch.autocast('cuda', torch.bfloat16, enabled=is_bf16): loss = forward()
        loss.backward()
        update()
        at.add_(1)
        return loss
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3): step()
    torch.cuda.current_stream().wait_stream(stream)
    recorded = torch.cuda.CUDAGraph()
    opt.zero_grad(set_to_none=True)
    with torch.cuda.graph(recorded): loss = step()
    def epoch(n_steps=n_steps, kept=(step, loss)):          # what the graph reads must not be freed
        wait_for(device)
        start_s = perf_counter()
        order[:n_steps] = torch.randperm(len(x), device=device)[:n_steps*bs].view(n_steps, bs)
        at.zero_()
        for i in range(n_steps):
            if not gathers:
                torch.index_select(x, 0, order[i], out=own_x)
                torch.index_select(y, 0, order[i], out=own_y)
            recorded.replay()
        wait_for(device)
        return 1e6*(perf_counter()-start_s)/n_steps
    return epoch

def fastest_by_hand(case, device):
    "The fastest way, and microseconds a step of each: the median of three runs, alternating"
    ways = {k: by_hand(case, device, *o) for k,o in HAND.items()}
    us = {k: median(o) for k,o in alternate(ways, 3, lambda run: run()).items()}
    return ways[min(us, key=us.get)], us

KINDS = { # the first whose expression a kernel's name has; Inductor names its kernels after what they fuse
    'optimizer': '_update_kernel|multi_tensor_apply|^triton_for_',
    'norms': 'batch_norm|bn_|batchnorm',
    'element-wise': '^triton_',
    'layouts': 'nchwToNhwc|nhwcToNchw|convertTensor|AddPadding',
    'products': 'gemm|conv|grad|fprop|cutlass|nvjet|xmma|winograd|splitK',
    'copies': '^Mem|memset'}

def kind_of(name): return next((k for k,o in KINDS.items() if re.search(o, name)), 'element-wise')

def look_inside(run, n_steps):
    "What the profiler sees of a step; it slows Python down, so no time of the host is taken from it"
    with torch.profiler.profile() as seen: run(n_steps)
    calls = seen.key_averages()
    kinds = Counter()
    on_gpu = [o for o in calls if o.device_type==torch.autograd.DeviceType.CUDA
              and not o.is_user_annotation]                  # such as a loader's range
    for o in on_gpu: kinds[kind_of(o.key)] += o.self_device_time_total/n_steps
    def count(*names): return sum(o.count for o in calls if o.key.startswith(names))/n_steps
    return dict(launches=count('cudaLaunch', 'cuLaunch', 'cudaGraphLaunch'),
                waits=count('cudaStreamSync', 'cudaEventSync', 'cudaDeviceSync'),
                kernels=sum(o.count for o in on_gpu)/n_steps, device_us=sum(kinds.values()), kinds_us=dict(kinds),
                longest_us={o.key[:120]: o.self_device_time_total/n_steps
                            for o in sorted(on_gpu, key=lambda o: -o.self_device_time_total)[:12]})

def joules_per_image(run, n_steps, bs, seconds):
    gpu, n = open_gpu('cuda:0'), 0
    def now_j(): return gpu('energy_counter_j')
    run(n_steps)
    start_j, end = now_j(), perf_counter()+seconds
    while perf_counter()<end:
        run(n_steps)
        n += n_steps
    return (now_j()-start_j)/(n*bs)

def bound_us(case, device):
    model, _, size, n_in, is_bf16, *_ = case
    precision = 'bf16' if is_bf16 else 'fp32'
    return 1e3*bound_ms(get_model(model, n_in=n_in), (n_in, size, size), case[1],
                        **device_rates(device, precision), precision=precision)

def measure(case, device, rounds, peers=(), joules_s=0, only=()):
    names = [o for o in rungs(case[4]) if not only or o in only]
    learners = make_learners([o for o in names if o not in APART], case, device)
    others = in_own_process(partial(make_learners, [o for o in names if o in APART]), case, device)
    hand, hand_us = fastest_by_hand(case, device)
    # name -> what calls a function, wherever the rung is, with the one that trains it and further arguments
    at = {k: partial(on_rung, learners, k) if k in learners else partial(others, on_rung, k) for k in names}
    at |= dict(hand=lambda look, *args: look(hand, *args)) | {o: in_own_process(PEERS[o], case, device) for o in peers}
    n_steps = {k: min(case[6], max(12, case[6]//40)) if k in SLOW else case[6] for k in at}
    times = alternate({k: partial(do, call, n_steps[k]) for k,do in at.items()}, rounds, call)
    stock = 'stock_bf16' if case[4] else 'stock'
    graphs = {k: o.graphed_step for k,o in learners.items() if 'graph' in k}
    if any(o.why_not or not o.n_replays for o in graphs.values()):
        raise RuntimeError(f'not captured: {[o.why_not for o in graphs.values()]}')
    return dict(
        images=case[1], step_us=times, hand_us=hand_us,
        valid_us=alternate({k: partial(at[k], valid_us) for k in names}, 3, call),
        median_us={k: median(o) for k,o in times.items()},
        of_hand={k: vars(ratio_ci(o, times['hand'])) for k,o in times.items() if k!='hand'},
        of_stock={k: vars(ratio_ci(times[stock], o))
                  for k,o in times.items() if not k.startswith('stock') and stock in times},
        graph_bytes={k: o.held_bytes for k,o in graphs.items()},
        inside={k: do(look_inside, min(n_steps[k], 24)) for k,do in at.items() if k not in peers} if not only else {},
        bound_us=bound_us(case, device),
        joules_per_image={k: do(joules_per_image, n_steps[k], case[1], joules_s)
                          for k,do in at.items()} if joules_s else {})

def main():
    p = device_parser(__doc__)
    p.add_argument('--rounds', type=int, default=5)
    p.add_argument('--case', nargs='+', choices=list(CASES), default=list(CASES))
    p.add_argument('--peers', nargs='*', choices=list(PEERS), default=[])
    p.add_argument('--joules-s', type=float, default=0)
    p.add_argument('--only', nargs='+', default=[],
                   help='just these rungs, beside the step by hand and the peers, and no look inside')
    args = p.parse_args()
    device, found = device_of(args), {}
    if device=='cpu': p.error('this ladder needs a GPU; for a CPU there is ladder_cpu.py')
    for name in args.case:
        try: found[name] = measure(CASES[name], device, args.rounds, args.peers, args.joules_s, args.only)
        except Exception as e: found[name] = dict(error=f'{type(e).__name__}: {e}'.splitlines()[0])
        torch._dynamo.reset()                    # it compiles a function for eight cases at most
        free_memory()
        write_json(args.out, device, cases=found)
        o = found[name]
        print(name, o.get('error') or ' '.join(f'{k} {v:.0f}' for k,v in o['median_us'].items()),
              *(f"{k} {o['of_hand'][k]['mid']:.3f}..{o['of_hand'][k]['hi']:.3f} of hand"
                for k in ('graph', 'compiled_graph') if k in o.get('of_hand', {})),
              flush=True)

if __name__=='__main__': main()
