"Where a step's time goes on the device, and its memory: made profiles, real ones on a CPU, and planted faults on a GPU"
import subprocess
import sys
import time

import fastai.callback.progress  # noqa: F401  gives Learner its no_bar
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import OptimWrapper
from fastai.test_utils import synth_learner
from torch import nn

from gpubench.data.loaders import get_dls
from gpubench.run.profile import Profile, Span, idle_table, memory_table, profile_steps
from gpubench.step.capture import TapeCapture
from gpubench.step.fast import speed_up
from gpubench.step.graphed import GraphedStepCallback

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')

def quiet(f, learn, *args, **kwargs):
    with learn.no_bar(), learn.no_logging(): return f(learn, *args, **kwargs)

def checked(profile, n_steps=20):
    df = idle_table(profile)
    assert df.what.iloc[-1]=='step' and len(profile.steps)==n_steps and (df.ms>=0).all()
    assert df.ms[:-1].sum()==pytest.approx(df.ms.iloc[-1]) and df.step_frac[:-1].sum()==pytest.approx(1)
    return df.set_index('what')

# ---- made profiles: steps of 1000 µs

def step(i=0): return Span('step', 1000.*i, 1000.*(i+1))

def test_a_gap_belongs_to_what_the_loop_does_when_it_begins():
    def gap(*loop): # from 300 to 700 µs
        work = [Span('gemm', 0., 300.), Span('gemm', 100., 200.), Span('gemm', 700., 1000.)]
        return checked(Profile([step()], loop, work), 1).ms.drop(['device busy', 'step']).to_dict()
    assert gap(Span('wait', 290., 680.), Span('forward', 680., 900.))=={'wait': .4}
    assert gap(Span('loss', 200., 400.), Span('SlowCallback', 250., 350.))=={'SlowCallback': .4}
    assert gap(Span('loss', 310., 700.))=={'between phases': .4}

def test_steps_apart_and_work_beyond_them():
    "A validation between two steps is part of neither"
    work = [Span('early', -500., 100.), Span('valid', 2000., 3000.), Span('last', 5990., 6500.)]
    assert checked(Profile([step(0), step(5)], [], work), 2).ms['device busy']==pytest.approx((.1+.01)/2)
    assert checked(Profile([step()], [], [Span('a', 0., 490.), Span('b', 500., 1000.)]), 1).ms['short gaps']==pytest.approx(.01)

# ---- real ones on a CPU

class SleepCallback(Callback):
    "Sleeps at one event"
    def __init__(self, event, s): setattr(self, event, lambda: time.sleep(s))

def test_a_sleeping_callback_on_a_cpu():
    learn = synth_learner(n_trn=30, cbs=SleepCallback('before_step', .02))
    def state(): return '_call_one' in vars(learn), sorted(type(o).__name__ for o in learn.cbs)
    before = state()
    df = checked(quiet(profile_steps, learn, 8, 4), 8)
    assert state()==before and df.index[0]=='SleepCallback' and df.n.iloc[0]==1 and df.step_frac.iloc[0]>.5

@pytest.mark.parametrize('loader', ['memory', 'resident'])
def test_graphs_stay_graphs_under_a_profile(loader):
    "Here a tape repeats the step; the profile doesn't count as a stranger among the callbacks, and it ends"
    dls = get_dls('digits', bs=8, loader=loader, device='cpu', max_images=400, size=8)
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), CrossEntropyLossFlat(), cbs=GraphedStepCallback(capture=TapeCapture()))
    df = checked(quiet(profile_steps, learn, 10, 8), 10)
    assert 'graph' in df.index and not learn.graphed_step.why_not and learn.epoch==0

@pytest.mark.slow
def test_the_profiler_prints_nothing_of_its_own():
    code = ("import os; import fastai.callback.progress; from fastai.test_utils import synth_learner; from gpubench.run.profile import profile_steps\n"
            "learn = synth_learner()\n"
            "with learn.no_bar(), learn.no_logging(): profile_steps(learn, trace=os.devnull)")
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr)==(0, '', '')

# ---- memory

def large(device='cpu', **kwargs): # A weight is a MiB
    dl = TfmdDL([(torch.randn(512), torch.randn(1))]*64, bs=8, num_workers=0, device=device)
    net = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 1, bias=False)).to(device)
    return Learner(DataLoaders(dl, dl), net, nn.functional.mse_loss, **kwargs)

def sizes(learn): return quiet(memory_table, learn).set_index('what').mib

def test_what_tensors_take():
    found = sizes(large())
    assert found[['weights', 'gradients', 'optimizer state']].round(1).tolist()==[1, 1, 2] and found['batch']==8*513*4/2**20
    assert sizes(large(opt_func=lambda *args, **kw: OptimWrapper(*args, opt=torch.optim.AdamW, **kw)))['optimizer state'].round(1)==2
    assert sizes(large(cbs=GradientAccumulation(64)))['gradients'].round(1)==1                    # between its steps

def test_too_few_steps():
    learn = synth_learner()
    learn.dls.loaders[0] = []
    with pytest.raises(RuntimeError, match='fewer than three steps'): quiet(memory_table, learn)

# ---- planted faults on a GPU

class Items(torch.utils.data.Dataset):
    "Random rows; each takes some seconds to make"
    def __init__(self, n_in, s): self.n_in, self.s = n_in, s
    def __len__(self): return 512
    def __getitem__(self, i):
        if self.s: time.sleep(self.s)
        return torch.randn(self.n_in), torch.randn(1)

class Products(nn.Module):
    "Works for a while on the device, with few launches"
    def __init__(self, n, size=4096):
        super().__init__()
        self.n, self.layer = n, nn.Linear(64, 1)
        self.register_buffer('m', torch.randn(size, size)/64)
    def forward(self, x):
        m = self.m
        with torch.no_grad():
            for _ in range(self.n): m = m@self.m
        return self.layer(x)+0*m.sum()

class Tiny(nn.Module):
    "Many small kernels, with some 50 µs of Python in between"
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 1)
    def forward(self, x):
        x = x.as_subclass(torch.Tensor)
        for _ in range(100): x = x+float(sum(range(5000))>0)
        return self.layer(x)

def on_gpu(model, item_s=0., cbs=()):
    dl = TfmdDL(Items(64, item_s), bs=4, num_workers=0, device='cuda')
    return Learner(DataLoaders(dl, dl), model.cuda(), nn.functional.mse_loss, cbs=list(cbs))
def slow_loader():
    learn = on_gpu(Products(1), item_s=.005)
    learn.remove_cb(learn.recorder)                         # in which the host would wait for the device
    return learn

@needs_gpu
@pytest.mark.parametrize('make,what', [
    (lambda: on_gpu(Products(1), cbs=[SleepCallback('after_batch', .1)]), 'SleepCallback'), (slow_loader, 'wait'),
    (lambda: on_gpu(Tiny()), 'forward'), (lambda: on_gpu(Products(60, 8192)), 'device busy')], ids=['callback', 'loader', 'launches', 'busy'])
def test_what_limits_a_gpu_comes_first(make, what):
    df = checked(quiet(profile_steps, make()))
    assert df.index[0]==what and df.step_frac.iloc[0]>.4

@needs_gpu
@pytest.mark.parametrize('loader', ['memory', 'resident'])
def test_a_graphed_step_shows_no_false_idle(loader):
    dls = get_dls('digits', bs=32, loader=loader, device='cuda', max_images=1600, size=28)
    model = nn.Sequential(nn.Conv2d(1, 32, 3), *[nn.Sequential(nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)) for _ in range(20)],
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    learn = Learner(dls, model, CrossEntropyLossFlat())
    speed_up(learn, compile=False)
    profile = quiet(profile_steps, learn, 20, 10)
    assert checked(profile).index[0]=='device busy' and 'graph' in {o.name for o in profile.loop}

@needs_gpu
def test_memory_of_a_gpu():
    before = torch.cuda.memory_allocated()
    found = sizes(large('cuda'))
    assert found.index.tolist()[:4]==['weights', 'gradients', 'optimizer state', 'batch'] and len(found)==8 and (found>=0).all()
    assert found['weights'].round(1)==1 and found['other tensors of this process']>=before/2**20-1
    assert found['CUDA context and other programs']>50
