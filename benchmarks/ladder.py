"""From stock fastai to a compiled, captured step, one change per rung, beside the same step by hand with nothing around
it

    ladder.py --device cuda --out ladder.json [--rounds 5] [--case resnet18_32px_b64 ...] [--peers plain_loop jax]
    ladder.py RECORD                                                  print a record's table
    ladder.py RECORD --figure FILE.png --case resnet18_32px_b64       the README's figure

Each rung is a Learner on data that lies on the device, with its recorder and its progress bar (written to a file). A
run is the training part of one epoch without validation, from the first batch asked for to the last step done, the
shuffle included; its figure is microseconds a step. In each round every rung runs once, in an order of its own. Rungs
without cuDNN's search live in a process of their own: a process keeps the kernel that it used first for a shape,
searched or not. `hand` is the limit: the same network compiled and captured with cuDNN's search, and AdamW at a
constant rate, compiled as well (which takes minutes for a ResNet), replayed once for each step of an epoch. It is the
fastest of four ways, `hand_us`: weights in channels_last or as PyTorch makes them, and batches gathered by the compiled
kernels or before each replay. `--peers` adds other frameworks (see peers.py)."""
import io
from contextlib import redirect_stdout
from functools import lru_cache, partial
from statistics import median
from time import perf_counter

from gpubench.ground.core import free_memory, wait_for
from gpubench.data.loaders import get_dls
from gpubench.step.fast import FusedStepCallback, GraphedStepCallback, defer
from gpubench.run.models import get_model
from gpubench.ground.stats import ratio_ci
from gpubench.show.plot import drawing, series_style
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback  # noqa: F401 (the bar that a fastai user has)
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
import matplotlib.pyplot as plt
import pandas as pd
import torch

from common import (NoValidationCallback, alternate, bf16_callbacks, device_of, draw_bar, finish, name_bars, parser, read_json,
                    search_kernels, spread, write_json)
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

def no_waits(learn): defer(learn.recorder)
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

def measure(case, device, rounds, peers=(), only=()):
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
        median_us={k: median(o) for k,o in times.items()},
        of_hand={k: vars(ratio_ci(o, times['hand'])) for k,o in times.items() if k!='hand'},
        of_stock={k: vars(ratio_ci(times[stock], o))
                  for k,o in times.items() if not k.startswith('stock') and stock in times})

RUNGS = dict(stock='stock fastai', stock_bf16='+ bf16, channels last', no_waits='+ no waiting for losses',
             fused='+ fused optimizer', kernels="+ cuDNN's search", graph='+ CUDA graph',
             compiled_graph='+ compiled kernels')
LIMITS = dict(hand='by hand', plain_loop='plain loop', jax='JAX')

def row(case, found):
    "A line of the table: microseconds a step, and what the compiled graph takes beside the limits"
    us = found['step_us']
    times = {label: f'{median(us[k]):,.0f}' if k in us else '' for k,label in (RUNGS | LIMITS).items()}
    spreads = {'stock, range': spread(us.get('stock_bf16') or us['stock'], ',.0f'),
               'compiled graph, range': spread(us['compiled_graph'], ',.0f')}
    def ratio(k):
        if k not in us: return ''
        o = ratio_ci(us['compiled_graph'], us[k])
        return f'{o.mid:.3f} ({o.lo:.3f} to {o.hi:.3f})'
    return dict(case=case) | times | spreads | {f'compiled graph ÷ {label}': ratio(k) for k,label in LIMITS.items()}

@drawing()
def draw(us, case, machine):
    "Every run a dot, the bar ends at the median; returns the figure"
    labels = RUNGS | dict(graph="+ cuDNN's search, CUDA graph", hand='the same step by hand')
    bars = {k: v for k,v in labels.items() if k in us and k!='kernels'}
    fig, ax = plt.subplots(figsize=(7.6, 3.6))
    for i,name in enumerate(bars):
        ms = [o/1e3 for o in us[name]]
        times = median(us['stock'])/1e3/median(ms)
        faster = f' ({times:.0f} times faster)' if times>2 else ''
        draw_bar(ax, i, ms, series_style(5 if name=='hand' else 1)['color'], f'{median(ms):.3g} ms{faster}')
    name_bars(ax, bars.values())
    ax.set(xlim=(0, 1.2*max(max(us[k]) for k in bars)/1e3), xlabel='time of a step (ms)')
    model, bs, px, *_ = CASES[case]
    finish(ax, f'A training step of {model}, {px} px, batch {bs}', machine)
    return fig

def train_all(args, device):
    "Measure the cases; the record is written after each"
    found = {}
    for name in args.case or CASES:
        try: found[name] = measure(CASES[name], device, args.rounds, args.peers, args.only)
        except Exception as e: found[name] = dict(error=f'{type(e).__name__}: {e}'.splitlines()[0])
        torch._dynamo.reset()                    # it compiles a function for eight cases at most
        free_memory()
        write_json(args.out, device, cases=found)
        print(name, found[name].get('error', 'ok'), flush=True)

def main():
    p = parser(__doc__)
    p.add_argument('record', nargs='?', help='what an earlier call wrote; nothing is trained')
    for o in ('--out', '--figure'): p.add_argument(o, metavar='FILE')
    p.add_argument('--device', default='auto', help='cuda or auto')
    p.add_argument('--rounds', type=int, default=5)
    p.add_argument('--case', nargs='+', choices=list(CASES))
    p.add_argument('--peers', nargs='*', choices=list(PEERS), default=[])
    p.add_argument('--only', nargs='+', default=[], help='just these rungs, beside the step by hand and the peers')
    args = p.parse_args()
    if bool(args.record)==bool(args.out): p.error('give either a record to print, or --out to train and write one')
    if args.out:
        device = device_of(args)
        if device=='cpu': p.error('this ladder needs a GPU')
        train_all(args, device)
    found = read_json(args.record or args.out)
    cases = {k: o for k,o in found['cases'].items() if 'error' not in o and (not args.case or k in args.case)}
    with pd.option_context('display.width', 250, 'display.max_columns', None):
        print(pd.DataFrame([row(*o) for o in cases.items()]).T.to_string())
    if args.figure:
        [(case, o)] = cases.items()
        draw(o['step_us'], case, found['machine']).savefig(args.figure, dpi=130)

if __name__=='__main__': main()
