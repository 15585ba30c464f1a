"""Adam and SGD, fused, against their own steps: alone, in a captured step, and after they were made what they were before"""
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from fastai.callback.schedule import ParamScheduler  # noqa: F401 (adds fit_one_cycle and others to Learner)
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import (SGD, Adam, OptimWrapper, Optimizer, RAdam, adam_step, average_grad, average_sqr_grad, l2_reg,
                              momentum_step, ranger, sgd_step, step_stat, weight_decay)
from fastai.torch_core import params, set_seed
from fastcore.foundation import L
from on_tape import step_as_captured
from torch import nn

from gpubench.step import optim
from gpubench.step.capture import TapeCapture
from gpubench.data.loaders import get_dls
from gpubench.step.fast import FusedStepCallback, GraphedStepCallback, SpeedUp, defer
from gpubench.step.optim import FusedOptimizer, fuse, recipe_of, unfuse

pytestmark = pytest.mark.usefixtures('one_thread')


def wrapped(opt, **kwargs): return partial(OptimWrapper, opt=partial(opt, **kwargs))
MAKES = dict(adam=Adam, adam_l2=partial(Adam, decouple_wd=False, wd=.1), sgd=SGD, momentum=partial(SGD, mom=.9, wd=.1),
             momentum_l2=partial(SGD, mom=.9, wd=.1, decouple_wd=False))
OTHERS = dict(radam=RAdam, ranger=ranger, torch_adamw=wrapped(torch.optim.AdamW))


def assert_close(a, b, rtol=1e-6):
    "Tensors relative to their own size, and whatever holds them"
    if isinstance(a, torch.Tensor):
        a, b = a.detach().double(), b.detach().double()
        assert a.shape==b.shape and (a-b).norm()<=rtol*a.norm(), f'{(a-b).norm()/a.norm():.1e} away'
    elif isinstance(a, dict):
        assert a.keys()==b.keys()
        assert_close([*a.values()], [b[k] for k in a], rtol)
    elif isinstance(a, (list, tuple, L)):
        for x,y in zip(a, b, strict=True): assert_close(x, y, rtol)
    else: assert a==b

def state(opt):
    "Without what it keeps for a parameter that it hasn't stepped"
    states = enumerate(opt.state_dict()['state'])
    kept = {i: {k: v for k,v in o.items() if k not in ('force_train', 'do_wd')} for i,o in states}
    return {i: o for i,o in kept.items() if o}


def steps(make, act=lambda i, opt: opt, n=32):
    "Given gradients, a schedule, two groups, tensors without decay, one of which gets its first gradient late"
    torch.manual_seed(0)
    ps = [nn.Parameter(torch.randn(o)) for o in ((20, 15), 15, (7, 2, 3, 3), 4)]
    opt = make([ps[:2], ps[2:]], lr=.1)
    opt.state[ps[1]]['do_wd'] = False
    for i in range(n):
        opt = act(i, opt) or opt
        opt.set_hypers(lr=[1e-3*(i+1), 2e-3*(i+1)], mom=.95-.01*i)
        if i==16: opt.set_hyper('wd', [.2, .3])
        for p in ps: p.grad = torch.randn(p.shape) if p is not ps[3] or i>9 else None
        opt.step()
        opt.zero_grad()
    return ps, opt

@pytest.fixture(params=['alone', 'as captured'])
def ways(request, monkeypatch):
    "Steps by torch's lists, and as a captured step does them"
    if request.param=='as captured': monkeypatch.setattr(optim, 'step_in_lists', step_as_captured)

def fused(i, opt): return fuse(opt) if i==0 else None
def unfused_midway(i, opt): return fuse(opt) if i in (0, 22) else unfuse(opt) if i==17 else None

@pytest.mark.parametrize('name', MAKES)
@pytest.mark.parametrize('act', [fused, unfused_midway])
def test_a_fused_step_is_the_optimizers_own(name, act, ways):
    (ps, stock), (qs, ours) = steps(MAKES[name]), steps(MAKES[name], act)
    assert_close(ps, qs)
    assert_close(state(stock), state(ours), 2e-6)
    assert isinstance(ours, FusedOptimizer) and type(unfuse(ours)) is type(stock)
    assert all(type(v) is float for h in ours.hypers for k,v in h.items() if k in ('lr', 'mom', 'sqr_mom'))


@pytest.mark.parametrize('name', ['adam', 'momentum_l2'])
@pytest.mark.parametrize('how', ['disturb', 'append', 'l2', 'no_momentum'])
def test_a_fused_step_follows_what_happens_to_its_optimizer(name, how, ways):
    def clamped(p, **kwargs): p.data.clamp_(-.5, .5)
    def change(opt):
        if how=='disturb': opt.param_lists[1][1].data.add_(1.)                   # has no gradient yet
        if how=='append': opt.cbs.append(clamped)
        if how=='l2': opt.cbs[0] = l2_reg
    def act(i, opt):
        if i==8: change(opt)
        if how=='no_momentum' and i in (12, 13, 14): opt.set_hypers = lambda lr, mom: type(opt).set_hypers(opt, lr=lr, mom=0.)
        if how=='no_momentum' and i==15: del opt.set_hypers
    def fused_act(i, opt):
        fused(i, opt)
        act(i, opt)
    (ps, stock), (qs, ours) = steps(MAKES[name], act), steps(MAKES[name], fused_act)
    assert_close(ps, qs)
    assert_close(state(stock), state(ours), 2e-6)
    assert isinstance(ours, FusedOptimizer)==(how!='append')

def test_steps_beside_a_graph_compute_and_count_as_it_does():
    opt = fuse(Adam([p := nn.Parameter(torch.ones(2))], .1))
    p.grad = torch.ones(2)
    for i,is_ahead in enumerate((False, True, False), 1):
        if is_ahead: opt.plan().begin()
        opt.step()
        assert bool(opt._plan and opt._plan.is_ahead)==is_ahead and opt.state[p]['step']==i

def test_unfused_an_optimizer_is_the_users_own_object():
    _, opt = steps(Adam, fused, n=8)
    opt.plan()
    moments = [o.get('grad_avg') for o in opt.state_dict()['state']]
    copied = pickle.loads(pickle.dumps(opt))
    assert type(copied) is type(opt) and copied._plan is None
    assert unfuse(opt) is opt and type(opt) is Optimizer and '_plan' not in vars(opt)
    assert all(a is b.get('grad_avg') for a,b in zip(moments, opt.state_dict()['state']))
    assert unfuse(opt) is opt

class OwnStep(Optimizer):
    def step(self): pass
def own_step(p, lr, **kwargs): p.data.add_(p.grad.data, alpha=-lr)
def composed(*cbs): return lambda params, lr: Optimizer(params, cbs, lr=lr, mom=.9, sqr_mom=.99, eps=1e-5, wd=.01)
REFUSED = [
    (composed(weight_decay, own_step), 'functions of its own'), (composed(), 'functions of its own'),
    (composed(weight_decay, average_grad, sgd_step), 'functions of its own'),
    (composed(weight_decay, partial(average_grad, dampening=True), momentum_step), 'functions of its own'),
    (composed(weight_decay, partial(average_grad, dampening=True), partial(average_sqr_grad, dampening=False), step_stat, adam_step), 'functions of its own'),
    (lambda params, lr: OwnStep(params, Adam(params, lr).cbs, lr=lr), 'of class OwnStep'),
    (lambda params, lr: torch.optim.AdamW(params, lr), 'of class AdamW')]

@pytest.mark.parametrize('make, says', REFUSED)
def test_what_cannot_be_fused_is_refused_in_words(make, says):
    opt = make([nn.Parameter(torch.ones(2))], lr=.1)
    with pytest.raises(ValueError, match='cannot be fused: .*'+says+'.*Adam and SGD can be'): fuse(opt)
    assert recipe_of(opt) is None and not isinstance(opt, FusedOptimizer)

@pytest.mark.parametrize('name', ['adam', 'momentum'])
def test_what_a_backward_pass_does_not_reach_is_stepped_as_without_fusing(name, ways):
    "fastai steps it with a gradient of zeros"
    def train(act):
        ps = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        opt = MAKES[name]([ps[:1], ps[1:]], lr=.01)
        for i in range(9):
            act(i, opt)
            if i==6: ps[1].requires_grad_(False)
            sum((p*i).square().sum() for p in ps[:1 if i in (3, 4) else 2]).backward()
            opt.step()
            opt.zero_grad()
        return ps, opt
    (ps, stock), (qs, ours) = train(lambda i, opt: None), train(fused)
    assert_close(ps, qs)
    unfuse(ours)
    for o in stock, ours: o.step()                                            # of what has no gradient, or zeros
    assert_close(ps, qs)
    assert_close(state(stock), state(ours), 2e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='A kernel runs on a GPU.')
@pytest.mark.parametrize('name', MAKES)
def test_the_kernel_computes_what_operations_of_torch_do(name):
    "A table of eight steps, as of an epoch; one is skipped, and one parameter has no gradient, and others changed it"
    def train(by_kernel):
        torch.manual_seed(0)
        ps = [nn.Parameter(torch.randn(o, device='cuda')) for o in (1200, 30, (7, 2, 3, 3), 4)]
        opt = MAKES[name]([ps[:2], ps[2:]], lr=.1)
        for p in ps[:3]: p.grad = torch.randn_like(p)
        opt.state[ps[1]] = dict(do_wd=False, step=3) if 'adam' in name else dict(do_wd=False)
        plan = fuse(opt).plan()
        ps[3].data.add_(1.)
        update = optim.Update(plan, 8)
        assert update.kernel
        if not by_kernel: update.kernel = None
        for i in range(8):
            opt.set_hypers(lr=[.01*(i+1), .02], mom=.95-.01*i if i!=5 else 0.)
            update.set([plan.numbers()], i)
        for i in range(8):
            plan.skip.fill_(i==2)
            if i==4: update.grads[0].mul_(2.)
            update(torch.tensor(float(i), device='cuda'))
        return ps, state(opt), update.losses.tolist(), (update.at.item(), plan.count.item())
    (*a, losses, counts), (*b, _, _) = train(True), train(False)
    assert_close(a, b, 2e-6)
    assert losses==[*range(8)] and counts==(0, 7)

@pytest.mark.parametrize('capability', [(7, 5), (9, 0)])
def test_the_kernel_can_be_built_for(capability, monkeypatch):
    if not optim.nvrtc: pytest.skip("This torch isn't for CUDA.")
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
    assert optim._compile('cuda').startswith(b'\x7fELF')


class Net(nn.Module):
    "Two groups, without layers that amplify rounding"
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 4, 3), nn.Sequential(nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 10))
    def forward(self, x): return self.head(self.body(x))

def learner(make, how, path='.'):
    "`how`: stock, fused, captured, or with batches gathered by the captured step"
    set_seed(0)
    dls = get_dls('digits', bs=16, loader='resident', device='cpu', max_images=230, size=8)
    cbs = dict(stock=[], fused=[FusedStepCallback()]).get(how, [GraphedStepCallback(capture=TapeCapture())])
    learn = Learner(dls, Net(), loss_func=CrossEntropyLossFlat(), opt_func=make, cbs=cbs, path=path,
                    splitter=lambda m: [params(m.body), params(m.head)])
    learn.remove_cb(learn.progress)
    learn.logger = lambda *args: None
    if how=='gathered': defer(learn.recorder)
    set_seed(1)
    learn.dls.train.rng.seed(1)
    return learn

def unfreezing(learn):
    learn.freeze()
    learn.fit_one_cycle(1, 1e-3, wd=.1)
    learn.unfreeze()
    learn.fit_one_cycle(2, slice(1e-4, 1e-3), wd=.1)
def saving(learn):
    learn.fit_one_cycle(1, 1e-3)
    learn.save('saved')
    learn.fit_one_cycle(1, 1e-3)
    learn.load('saved')
    learn.fit_one_cycle(1, 1e-3, reset_opt=False)
    learn.opt.clear_state()
    learn.fit(1, 1e-3)
ACTS = dict(unfreezing=unfreezing, saving=saving)
CASES = [*[(o, 'unfreezing') for o in MAKES],
         *[pytest.param(o, 'saving', marks=pytest.mark.slow) for o in ('adam', 'momentum')]]

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name, act', CASES)
def test_a_learner_trains_as_without_it(name, act, tmp_path):
    stock, *others = (learner(MAKES[name], o, tmp_path) for o in ('stock', 'fused', 'captured', 'gathered'))
    ACTS[act](stock)
    for ours in others:
        ACTS[act](ours)
        for o in ours.cbs:
            if isinstance(o, FusedStepCallback): assert o.why_not=='' and getattr(o, 'n_replays', 8)>=8
        assert_close(list(stock.model.parameters()), list(ours.model.parameters()), 1e-5)
        assert_close(state(stock.opt), state(ours.opt), 1e-4)
        assert np.allclose(stock.recorder.losses, ours.recorder.losses, rtol=1e-5) and stock.recorder.lrs==ours.recorder.lrs

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', OTHERS)
def test_another_optimizer_steps_as_in_fastai_and_the_table_says_so(name, tmp_path):
    stock, *others = (learner(OTHERS[name], o, tmp_path) for o in ('stock', 'fused', 'captured', 'gathered'))
    unfreezing(stock)
    for ours in others:
        unfreezing(ours)
        [cb] = [o for o in ours.cbs if isinstance(o, FusedStepCallback)]
        assert 'cannot be fused' in cb.why_not and not getattr(cb, 'n_replays', 0) and type(ours.opt) is type(stock.opt)
        done = SpeedUp(ours)
        done.fuse_step()
        assert not done.to_df().on[0] and 'Adam and SGD can be' in done.to_df().why[0]
        for a,b in zip(stock.model.parameters(), ours.model.parameters(), strict=True): assert torch.equal(a, b)
        assert [*stock.recorder.losses]==[*ours.recorder.losses]
