"""What it costs that a graph is captured anew in each fit and tried in each epoch, and how far a right replay is from
the eager step

    graph_cost.py --device cuda --out graph_cost.json [--images 62500] [--fits 20] [--rounds 3] [--model resnet18]

Fits: a ResNet-18 at 32 px, batch 64, bf16, on pixels that lie on the GPU; a fifth of the images is held out, and no fit
validates. `fits`: so many fits of one epoch; `search`: `lr_find`, then `fine_tune(2)`; `guest`: five epochs beside a
callback that acts at each. `anew` is a `GraphedStepCallback`, `alone` one that keeps its graphs (a promise that only a
sweep of gpubench's own can make). The two alternate; what counts is the ratio of each round.

Trials: a replay and an eager step from the same state, of several networks; relative distances of loss, weights,
buffers and moments, which decide the tolerances of a trial where kernels aren't deterministic."""
from functools import partial
from statistics import median
from time import perf_counter

import torch
from fastai.callback.core import Callback
from fastai.callback.schedule import ParamScheduler  # noqa: F401 (adds fit_one_cycle and others to Learner)
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
from gpubench.step import capture, kept
from gpubench.ground.core import free_memory, wait_for
from gpubench.data.loaders import get_dls
from gpubench.step.fast import DeferredRecorder, GraphedStepCallback, swap_recorder
from gpubench.run.models import get_model
from torch import nn

from common import alternate, device_of, device_parser, write_json
from fits import NoValidationCallback, bf16_callbacks, ratios_to_none, search_kernels

class GuestCallback(Callback):
    "A user's own, which acts once in each epoch"
    def before_epoch(self): self.seen = self.epoch

def learner(dls, net, alone=False, bf16=True, compile=False, cbs=()):
    set_seed(0)
    net, graph = net(), GraphedStepCallback(compile, capture=capture.TapeCapture() if dls.device.type=='cpu' else None, alone=alone)
    half = bf16_callbacks() if bf16 else []
    learn = Learner(dls, net, loss_func=CrossEntropyLossFlat(), cbs=[NoValidationCallback(), graph, *half, *cbs])
    swap_recorder(learn, DeferredRecorder())
    learn.remove_cb(learn.progress)
    learn.logger = lambda *args: None
    return learn

def fits(learn, n):
    for _ in range(n): learn.fit(1, 1e-3)
def search(learn, n):
    learn.lr_find(show_plot=False, suggest_funcs=None)     # random pixels have no valley
    learn.fine_tune(2, 1e-3)
def guest(learn, n): learn.fit(5, 1e-3, cbs=GuestCallback())

def cost(dls, args, write):
    "Seconds of each way and their ratios, by what was trained; `write` gets what there is after each"
    found = {}
    for what in fits, search, guest:
        learners = {k: learner(dls, partial(get_model, args.model), alone=k=='alone') for k in ('alone', 'anew')}
        def run(learn):
            wait_for(dls.device)
            start_s = perf_counter()
            what(learn, args.fits)
            wait_for(dls.device)
            if learn.graphed_step.why_not: raise RuntimeError(learn.graphed_step.why_not)
            return perf_counter()-start_s
        times = alternate(learners, args.rounds, run)
        ratio = ratios_to_none(dict(none=times['alone'], anew=times['anew']))['anew']
        found[what.__name__] = dict(seconds=times, ratio=ratio)
        write(cost=found)
        print(f"{what.__name__:8} alone {median(times['alone']):.3f} s, anew {median(times['anew']):.3f} s: "
              f"{100*(ratio['mid']-1):+.1f} % ({100*(ratio['lo']-1):+.1f} to {100*(ratio['hi']-1):+.1f})", flush=True)
        del learners
        free_memory()

class Attention(nn.Module):
    "A small vision transformer"
    def __init__(self, n_classes, width=192):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        layer = nn.TransformerEncoderLayer(width, 3, 4*width, .1, batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(width, n_classes)
    def forward(self, x): return self.head(self.body(self.patches(x).flatten(2).transpose(1, 2)).mean(1))

# name -> (network, px, batch)
NETWORKS = dict(mnist_cnn=(partial(get_model, 'lenet', n_in=3), 32, 256),
                resnet18=(partial(get_model, 'resnet18'), 32, 64),
                resnet50=(partial(get_model, 'resnet50'), 128, 32), attention=(lambda: Attention(10), 32, 64))

def distances(device, net, size, bs, n_fits=6, **kwargs):
    "For each trial its relative distances by name, with the reason if the graph was refused"
    dls = get_dls('synthetic', bs=bs, loader='resident', device=device, size=size, n_channels=3, max_images=25*bs)
    learn, found = learner(dls, net, **kwargs), []
    @torch.no_grad()
    def agree(self, a, b, is_exact):
        def norm(tensors): return torch.stack([o.float().norm() for o in tensors]).norm().item()
        found.append({k: norm([x.float()-y.float() for x,y in zip(a[k], b[k])])/max(norm(
            [y.float()-z.float() for y,z in zip(b[k], self.before[k])] if k in self.before else b[k]), 1e-30) for k in a if a[k]})
        return True
    real, kept.Kept.agree = kept.Kept.agree, agree
    try:
        for _ in range(n_fits): learn.fit(1, 1e-3)
    finally: kept.Kept.agree = real
    return found, learn.graphed_step.why_not

def main():
    p = device_parser(__doc__)
    for name,n in dict(images=62_500, fits=20, rounds=3).items(): p.add_argument(f'--{name}', type=int, default=n)
    p.add_argument('--model', default='resnet18')
    args = p.parse_args()
    device = device_of(args)
    search_kernels()
    trials, tolerances = {}, dict(loss=kept.LOSS_TOLERANCE, step=kept.STEP_TOLERANCE)
    def write(**more): write_json(args.out, device, trials=trials, tolerances=tolerances,
                                  images=args.images, fits=args.fits, **more)
    for name,(net, size, bs) in NETWORKS.items():
        for way in dict(bf16=False), dict(bf16=True), dict(bf16=True, compile=True):
            if device=='cpu' and way!=dict(bf16=False): continue
            key = f"{name} {'bf16' if way['bf16'] else 'fp32'}{', compiled' if 'compile' in way else ''}"
            found, why = distances(device, net, size, bs, **way)
            worst = {k: max(o[k] for o in found) for k in (found[0] if found else ())}
            trials[key] = dict(worst=worst, n=len(found), why_not=why)
            print(f'{key:28}', why or ' '.join(f'{k} {o:.1e}' for k,o in worst.items()), flush=True)
            write()
            free_memory()
    cost(get_dls('synthetic', bs=64, loader='resident', device=device, size=32, n_channels=3, max_images=args.images), args, write)

if __name__=='__main__': main()
