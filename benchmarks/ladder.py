"""From stock fastai to a compiled, captured step, one change per rung, beside the same step by hand with nothing around it

    ladder.py --device cuda --out ladder.json [--rounds 5] [--case resnet18_32px_b64 ...] [--peers jax ...]

Each rung is a Learner on data that lies on the device, with its recorder and its progress bar (written to a file). A run is the training part of one
epoch without validation, from the first batch asked for to the last step done, the shuffle included; its figure is microseconds a step. In each round
every rung runs once, in an order of its own. `hand` is the limit: the same network compiled and captured with torch's fused AdamW at a
constant rate, the gathering of its batches included, replayed once for each step of an epoch. `--peers` adds other frameworks (see peers.py)."""
import io, sys
from contextlib import redirect_stdout
from statistics import median
from time import perf_counter

from gpubench.core import free_memory, wait_for
from gpubench.data import get_dls
from gpubench.fast import DeferredRecorder, FusedStepCallback, GraphedStepCallback, swap_recorder
from gpubench.models import get_model
from gpubench.stats import ratio_ci
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.progress import ProgressCallback  # noqa: F401 (the bar that a fastai user has)
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
import torch

from common import NoValidationCallback, alternate, device_of, device_parser, write_json
from peers import PEERS

# name -> model, batch size, px, channels, bf16 or not, images (a fifth is held out), steps of a run
CASES = dict(
    resnet18_32px_b16=('resnet18', 16, 32, 3, True, 62_500, 3125), resnet18_32px_b64=('resnet18', 64, 32, 3, True, 62_500, 781),
    resnet18_32px_b256=('resnet18', 256, 32, 3, True, 62_500, 195), resnet18_32px_b1024=('resnet18', 1024, 32, 3, True, 62_500, 48),
    resnet18_32px_b4096=('resnet18', 4096, 32, 3, True, 62_500, 12),
    mnist_cnn_b64=('lenet', 64, 28, 1, False, 75_000, 937), mnist_cnn_b1000=('lenet', 1000, 28, 1, False, 75_000, 60),
    resnet18_224px_b256=('resnet18', 256, 224, 3, True, 6_000, 18), resnet50_224px_b128=('resnet50', 128, 224, 3, True, 6_000, 36))

class StartCallback(Callback):
    order, sees_replays = -1e9, True
    def before_train(self):
        wait_for(self.learn.dls.device)
        self.start_s = perf_counter()

class EndCallback(Callback):
    order, sees_replays = 1e9, True
    def after_train(self):
        wait_for(self.learn.dls.device)
        self.took_s = perf_counter()-self.learn.start.start_s

def no_waits(learn): swap_recorder(learn, DeferredRecorder())
def fused(learn):
    no_waits(learn)
    learn.add_cb(FusedStepCallback())
def graph(learn, compile=False):
    no_waits(learn)
    learn.add_cb(GraphedStepCallback(compile))
def bf16(learn): learn.add_cbs([MixedPrecision(amp_mode='bf16'), ChannelsLast()])

def rungs(is_bf16):
    "name -> changes to a Learner; from `stock_bf16` on, all rungs of a bf16 case have bf16 and channels_last"
    first, last = (dict(stock=[], stock_bf16=[bf16]), [bf16]) if is_bf16 else (dict(stock=[]), [])
    return first | dict(no_waits=[*last, no_waits], fused=[*last, fused], graph=[*last, graph],
                        compiled_graph=[*last, lambda learn: graph(learn, True)])

SLOW = 'stock', 'stock_bf16', 'no_waits', 'fused'  # rungs that take a twentieth of the steps, at least 12 of them

def make_learner(case, changes, device):
    "A Learner that has trained for a few steps"
    model, bs, size, n_in, _, n, _ = case
    set_seed(0)
    dls = get_dls('synthetic', bs=bs, loader='resident', device=device, max_images=n, size=size, n_channels=n_in)
    learn = Learner(dls, get_model(model, n_in=n_in), loss_func=CrossEntropyLossFlat())
    for o in changes: o(learn)
    learn.add_cbs([StartCallback(), EndCallback(), NoValidationCallback()])
    step_us(learn, 6)
    return learn

def step_us(learn, n_steps):
    learn.dls.train.n = n_steps*learn.dls.train.bs
    with redirect_stdout(io.StringIO()): learn.fit(1, 1e-3)
    return 1e6*learn.end.took_s/n_steps

def by_hand(case, device):
    "(over an epoch, replay alone): functions that return microseconds a step"
    model, bs, size, n_in, is_bf16, n, n_steps = case
    set_seed(0)
    dls = get_dls('synthetic', bs=bs, loader='resident', device=device, max_images=n, size=size, n_channels=n_in)
    net = get_model(model, n_in=n_in).to(device)
    if is_bf16: net = net.to(memory_format=torch.channels_last)
    opt = torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-3, device=device), betas=(.9, .99), eps=1e-5, fused=True, capturable=True)
    x, y = dls.train_ds.x[dls.train_ds.rows], dls.train_ds.y[dls.train_ds.rows]
    mean, std = x[:5000].float().mean()/255, x[:5000].float().std()/255
    order, at = torch.zeros((n_steps, bs), dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    make = torch.compile(lambda i: ((x[i].float()/255-mean)/std, y[i]), fullgraph=True, dynamic=False)
    forward = torch.compile(lambda x, y: torch.nn.functional.cross_entropy(net(x).float(), y), fullgraph=True, dynamic=False)
    def step():
        opt.zero_grad(set_to_none=True)
        xb, yb = make(order.index_select(0, at)[0])
        with torch.autocast('cuda', torch.bfloat16, enabled=is_bf16): loss = forward(xb, yb)
        loss.backward()
        opt.step()
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
    def epoch(kept=(step, loss)):          # what the graph reads must not be freed
        wait_for(device)
        start_s = perf_counter()
        order.copy_(torch.randperm(len(x), device=device)[:n_steps*bs].view_as(order))
        at.zero_()
        for _ in range(n_steps): recorded.replay()
        wait_for(device)
        return 1e6*(perf_counter()-start_s)/n_steps
    return epoch

def measure(case, device, rounds, peers=()):
    learners = {k: make_learner(case, o, device) for k,o in rungs(case[4]).items()}
    runs = {k: lambda k=k, learn=learn: step_us(learn, min(case[6], max(12, case[6]//20)) if k in SLOW else case[6]) for k,learn in learners.items()}
    runs['hand'] = by_hand(case, device)
    runs |= {o: PEERS[o](case, device) for o in peers}
    times = alternate(runs, rounds, lambda run: run())
    graphs = {k: o.graphed_step for k,o in learners.items() if 'graph' in k}
    if any(o.why_not or not o.n_replays for o in graphs.values()): raise RuntimeError(f'not captured: {[o.why_not for o in graphs.values()]}')
    return dict(
        images=case[1], step_us=times, median_us={k: median(o) for k,o in times.items()},
        of_hand={k: vars(ratio_ci(o, times['hand'])) for k,o in times.items() if k!='hand'},
        of_stock={k: vars(ratio_ci(times['stock_bf16' if case[4] else 'stock'], o))
                  for k,o in times.items() if not k.startswith('stock')},
        graph_bytes={k: o.held_bytes for k,o in graphs.items()})

def main():
    p = device_parser(__doc__)
    p.add_argument('--rounds', type=int, default=5)
    p.add_argument('--case', nargs='+', choices=list(CASES), default=list(CASES))
    p.add_argument('--peers', nargs='*', choices=list(PEERS), default=[])
    args = p.parse_args()
    device, found = device_of(args), {}
    for name in args.case:
        try: found[name] = measure(CASES[name], device, args.rounds, args.peers)
        except Exception as e: found[name] = dict(error=f'{type(e).__name__}: {e}'.splitlines()[0])
        free_memory()
        write_json(args.out, device, cases=found)
        o = found[name]
        print(name, o.get('error') or ' '.join(f'{k} {v:.0f}' for k,v in o['median_us'].items()),
              *(f"{k} {o['of_hand'][k]['mid']:.3f}..{o['of_hand'][k]['hi']:.3f} of hand" for k in ('graph', 'compiled_graph') if 'of_hand' in o),
              flush=True)

if __name__=='__main__': main()
