"""Does each way to make a step faster train the same? Single steps against float64, and the accuracy of whole trainings

    equivalence.py --device cuda --out equivalence.json [--steps 20] [--seeds 5] [--epochs 4]

Steps: a Learner in float32 trains, and every step starts from what it had then (weights, buffers, moments, batch), in
each of the ways and in float64. The error of a way is the distance of its change of the weights from float64's,
relative to the length of that. `eager again` is the noise floor. What counts is the median of its errors as a multiple
of that of the eager step of the same precision.

Trainings: each way trains on digits60k by `fit_one_cycle`, once for each seed; what counts is the interval of the
differences in accuracy to the eager training with the same seed."""
import io
from contextlib import nullcontext, redirect_stdout
from functools import partial
from statistics import mean, median

import torch
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai.callback.schedule import ParamScheduler  # noqa: F401 (adds fit_one_cycle to Learner)
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.torch_core import set_seed
from gpubench.ground.core import free_memory
from gpubench.data.loaders import get_dls, get_images
from gpubench.step.fast import FusedStepCallback, GraphedStepCallback, speed_up
from gpubench.run.models import get_model

from common import NoValidationCallback, bf16_callbacks, device_of, device_parser, difference, write_json

def with_cbs(*makes, bf16=False):
    def change(learn):
        learn.add_cbs([*(bf16_callbacks() if bf16 else []), *(o() for o in makes)])
        return nullcontext()
    return change

compiled_graph = partial(GraphedStepCallback, True)
# name -> what changes a Learner until the end of a `with` (or later ways would have cuDNN's search,
# too), and the way of the same precision that it is compared with
WAYS = {'eager': (with_cbs(), 'eager'),
        'eager again': (with_cbs(), 'eager'),
        'fused': (with_cbs(FusedStepCallback), 'eager'),
        'speed_up': (speed_up, 'eager')}
GPU_WAYS = WAYS | {
    'graph': (with_cbs(GraphedStepCallback), 'eager'),
    'compiled graph': (with_cbs(compiled_graph), 'eager'),
    'speed_up, compiled': (partial(speed_up, compile=True), 'eager'),
    'bf16': (with_cbs(bf16=True), 'bf16'),
    'bf16, graph': (with_cbs(GraphedStepCallback, bf16=True), 'bf16'),
    'bf16, compiled graph': (with_cbs(compiled_graph, bf16=True), 'bf16'),
    'speed_up, bf16, compiled': (partial(speed_up, precision='bf16', compile=True), 'bf16')}
CASES = dict(mnist_cnn_b64=('lenet', 64, 28, 1), resnet18_32px_b64=('resnet18', 64, 32, 3))
TRAININGS = dict(mnist_cnn=('lenet', 256), resnet18=('resnet18', 1024))
SKIPPED = 12     # steps in which a graph warms up and is captured, and moments begin

class StartCallback(Callback):
    "Begins each step from a state of `states`, which it makes if there are none, and keeps by how much the step changed the weights"
    graph_safe = True                            # it changes weights and moments where they lie
    def __init__(self, states, is_first): self.states, self.is_first, self.changes = states, is_first, []
    def tensors(self):
        moments = [self.learn.opt.state[p] for p in self.learn.model.parameters()]
        return [*self.learn.model.parameters(), *self.learn.model.buffers(),
                *[o for m in moments for o in (m['grad_avg'], m['sqr_avg'])]]
    def weights(self): return torch.cat([p.detach().double().cpu().reshape(-1) for p in self.learn.model.parameters()])
    def before_batch(self):
        i = self.iter
        if self.is_first:
            kept = [o.detach().clone() for o in self.tensors()] if i else None
            self.states.append((kept, self.learn.xb[0].clone(), self.learn.yb[0].clone()))
        elif i:
            kept, xb, yb = self.states[i]
            with torch.no_grad():
                for a,b in zip(self.tensors(), kept, strict=True): a.copy_(b)
            self.learn.xb, self.learn.yb = (xb.to(self.learn.xb[0].dtype),), (yb,)
        self.before = self.weights()
    def after_batch(self):
        if self.iter>=SKIPPED: self.changes.append(self.weights()-self.before)

class DoubleCallback(Callback):
    order = -1e6
    def before_batch(self): self.learn.xb = (self.learn.xb[0].double(),)

def one_step_changes(case, device, n_steps, states, change, double=False):
    model, bs, size, n_in = case
    set_seed(0)
    dls = get_dls('synthetic', bs=bs, loader='resident', device=device, max_images=2*bs*(n_steps+SKIPPED),
                  size=size, n_channels=n_in)
    dls.train.n = bs*(n_steps+SKIPPED)
    net = get_model(model, n_in=n_in)
    learn = Learner(dls, net.double() if double else net, loss_func=CrossEntropyLossFlat(),
                    cbs=[NoValidationCallback(), *[DoubleCallback()]*double])
    start = StartCallback(states, not states)
    with change(learn), redirect_stdout(io.StringIO()):
        learn.fit(1, 1e-3, cbs=start)
        if 'graphed_step' in vars(learn) and not learn.graphed_step.n_replays: raise RuntimeError(learn.graphed_step.why_not)
    return start.changes

def errors_of(case, device, ways, n_steps):
    "way -> relative errors of single steps"
    states, found = [], {}
    found['eager'] = one_step_changes(case, device, n_steps, states, ways['eager'][0])
    exact = one_step_changes(case, device, n_steps, states, ways['eager'][0], double=True)
    for name in list(ways)[1:]:
        found[name] = one_step_changes(case, device, n_steps, states, ways[name][0])
        free_memory()
    return {k: [((a-b).norm()/b.norm()).item() for a,b in zip(o, exact, strict=True)] for k,o in found.items()}

def accuracy_of(training, device, n_epoch, seed, change):
    model, bs = training
    set_seed(seed)
    dls = get_dls('digits60k', bs=bs, loader='resident', device=device, seed=seed)
    learn = Learner(dls, get_model(model, n_in=1), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    learn.remove_cbs(ProgressCallback)
    with change(learn), learn.no_logging(): learn.fit_one_cycle(n_epoch, 3e-3)
    return learn.recorder.values[-1][-1]

def main():
    p = device_parser(__doc__)
    for name,n in dict(steps=20, seeds=5, epochs=4).items(): p.add_argument(f'--{name}', type=int, default=n)
    args = p.parse_args()
    device, steps, trainings = device_of(args), {}, {}
    ways = GPU_WAYS if device!='cpu' else WAYS
    for name,case in CASES.items():
        errors = errors_of(case, device, ways, args.steps)
        medians = {k: median(o) for k,o in errors.items()}
        steps[name] = dict(errors=errors, median=medians,
                           of_eager={k: o/medians[ways[k][1]] for k,o in medians.items()})
        write_json(args.out, device, n_steps=args.steps, steps=steps)
        for k,o in medians.items(): print(f"{name:18} {k:22} error {o:.2e}, {steps[name]['of_eager'][k]:.2f} times that of {ways[k][1]}", flush=True)
    if args.seeds: get_images('digits60k')
    for name,training in TRAININGS.items() if args.seeds else ():
        found = {k: [] for k in ways}
        for seed in range(args.seeds):
            for k,(change,_) in ways.items(): found[k].append(accuracy_of(training, device, args.epochs, seed, change))
        differences = {k: difference(found['eager'], o) for k,o in found.items() if k!='eager'}
        to_eager = {k: dict(zip(('mid', 'lo', 'hi'), o)) for k,o in differences.items()}
        trainings[name] = dict(accuracy=found, to_eager=to_eager)
        write_json(args.out, device, n_steps=args.steps, steps=steps, n_epoch=args.epochs, trainings=trainings)
        for k,o in to_eager.items():
            print(f"{name:18} {k:22} accuracy {100*mean(found[k]):.2f} %, {100*o['mid']:+.2f} points ({100*o['lo']:+.2f} to {100*o['hi']:+.2f})", flush=True)

if __name__=='__main__': main()
