"""A CNN of 54,528 parameters really trained: batch 1000, 20 epochs of 60,000 images, by `fit`, by a loop and by `speed_up`

    mnist_row.py --out mnist_row.json [--dataset digits60k] [--device auto] [--seeds 3] [--epochs 20]

`--dataset mnist` trains the real thing where it can be downloaded. Images lie on the device, and all three take Adam at a rate of 0.001, stock
numbers of fastai's (the loop by torch's fused AdamW). Each training is a process of its own; in each round every way runs once, in an order of its own,
and the rounds' seeds differ. A run's time is that of its epochs after one of warm-up, which is not trained on, without validation; accuracy is that of
the held-out images after the last epoch. `compiled` is `speed_up(learn, compile=True)`, `linear` is one linear layer by the same loop, for comparison of the accuracy."""
import json, subprocess, sys
from statistics import median
from time import perf_counter

WAYS, BS, LR = ['fit', 'loop', 'speed_up', 'compiled', 'linear'], 1000, 1e-3

def by_learner(dls, net, n_epoch, fast, compile=False):
    import io
    from contextlib import redirect_stdout
    from common import NoValidationCallback
    from fastai.callback.progress import ProgressCallback  # noqa: F401 (the bar that a fastai user has)
    from fastai.learner import Learner
    from gpubench.core import wait_for
    from gpubench.fast import keep_pages, speed_up
    from gpubench.trial import remember
    learn = Learner(dls, net, cbs=NoValidationCallback())
    if fast:
        keep_pages()
        speed_up(learn, compile=compile)
    put_back = remember(learn)
    with redirect_stdout(io.StringIO()):
        learn.fit(1, LR)
        put_back()
        wait_for(dls.device)
        start = perf_counter()
        learn.fit(n_epoch, LR)
        wait_for(dls.device)
    return perf_counter()-start

def by_loop(dls, net, n_epoch):
    import torch
    from fastai.torch_core import norm_bias_params
    from gpubench.core import wait_for
    from torch.nn.functional import cross_entropy
    free = {id(o) for o in norm_bias_params(net)}          # fastai takes no decay from these
    groups = [dict(params=[o for o in net.parameters() if (id(o) in free)==is_free], weight_decay=wd) for is_free,wd in ((False,.01), (True,0.))]
    opt = torch.optim.AdamW(groups, lr=LR, betas=(.9,.99), eps=1e-5, fused=True)
    plain = torch.Tensor
    def epoch(step):
        for x,y in dls.train:
            loss = cross_entropy(net(x.as_subclass(plain)), y.as_subclass(plain))
            loss.backward()
            if step: opt.step()
            opt.zero_grad()
    epoch(step=False)
    wait_for(dls.device)
    start = perf_counter()
    for _ in range(n_epoch): epoch(step=True)
    wait_for(dls.device)
    return perf_counter()-start

def train(way, dataset, device, n_epoch, seed):
    import torch
    from fastai.torch_core import set_seed
    from gpubench.data import get_dls
    from gpubench.models import count_params, get_model
    from torch import nn
    set_seed(seed)
    dls = get_dls(dataset, bs=BS, loader='resident', device=device, seed=seed)
    net = (nn.Sequential(nn.Flatten(), nn.Linear(28*28, 10)) if way=='linear' else get_model('lenet', n_in=1)).to(dls.device)
    fit_s = by_loop(dls, net, n_epoch) if way in ('loop','linear') else by_learner(dls, net, n_epoch, way!='fit', way=='compiled')
    net.eval()
    with torch.no_grad(): right = torch.cat([(net(x).argmax(1)==y).float() for x,y in dls.valid])
    n_steps = n_epoch*len(dls.train)
    return dict(way=way, seed=seed, fit_s=fit_s, step_ms=1e3*fit_s/n_steps, n_steps=n_steps, n_images=n_steps*BS, n_params=count_params(net),
                accuracy=right.mean().item(), n_held_out=len(right))

def main():
    from common import device_of, device_parser, write_json
    p = device_parser(__doc__)
    p.add_argument('--dataset', default='digits60k')
    p.add_argument('--seeds', type=int, default=3)
    p.add_argument('--epochs', type=int, default=20)
    p.add_argument('--ways', nargs='*', default=WAYS, choices=WAYS)
    args = p.parse_args()
    import random
    from gpubench.data import get_images
    from gpubench.stats import ratio_ci
    get_images(args.dataset)                                # made or downloaded before anything is timed
    device, rng, runs = device_of(args), random.Random(0), []
    for seed in range(args.seeds):
        for way in rng.sample(args.ways, len(args.ways)):
            what = map(str, (way, args.dataset, device, args.epochs, seed))
            done = subprocess.run([sys.executable, __file__, 'one', *what], capture_output=True, text=True)
            if done.returncode: raise RuntimeError(done.stderr[-2000:])
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            of = {k: [o['fit_s'] for o in runs if o['way']==k] for k in args.ways}
            ratios = {k: vars(ratio_ci(of['fit'], v)) for k,v in of.items() if min(len(v), len(of.get('fit', [])))>1 and k not in ('fit','linear')}
            write_json(args.out, device, dataset=args.dataset, n_epoch=args.epochs, bs=BS, lr=LR, runs=runs, times_as_fast_as_fit=ratios)
    for way in args.ways:
        mine = [o for o in runs if o['way']==way]
        s, right = ([o[k] for o in mine] for k in ('fit_s','accuracy'))
        print(f"{way:9} {median(s):7.2f} s ({min(s):.2f} to {max(s):.2f}), {median(o['step_ms'] for o in mine):6.2f} ms a step, "
              f"{100*median(right):.2f} % right ({100*min(right):.2f} to {100*max(right):.2f})")

if __name__=='__main__':
    if sys.argv[1:2]==['one']: print(json.dumps(train(*sys.argv[2:5], *map(int, sys.argv[5:]))))
    else: main()
