"""Where a step's time goes on the device: the rule on made traces, real profiles on a CPU, and planted faults on a GPU"""
import inspect
import json
import random
import subprocess
import sys
import time
import warnings
from pathlib import Path

import fastai.callback.progress  # noqa: F401  gives Learner its no_bar
import pytest
import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.test_utils import synth_learner
from torch import nn

from gpubench.data.loaders import get_dls
from gpubench.run import idle, trace
from gpubench.run.idle import Profile, Span, device_work, idle_by_cause, profile_steps
from gpubench.run.trace import write_trace
from gpubench.step.capture import TapeCapture
from gpubench.step.fast import speed_up
from gpubench.step.graphed import GraphedStepCallback

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')


# ---- made traces: a step of 1000 µs on the device, times in µs

MAIN, BACKWARD, READER = 1, 2, 3                   # threads

class Made:
    "A made profile: what the host did, and what it launched"
    def __init__(self, **lines): self.spans, self.n, self.lines = [Span('step', 'step 0', 0., 1000.)], 0, lines
    def loop(self, kind, name, start, end, event=''):
        self.spans.append(Span(kind, name, start, end, event=event))
        return self
    def call(self, name, start, end, *work, thread=MAIN): # `work`: (name, start, end) or (name, start, end, stream)
        self.n += 1
        self.spans.append(Span('call', name, start, end, thread, self.n))
        for what,a,b,*stream in work:
            self.spans.append(Span('copy' if what.startswith('Memcpy') else 'kernel', what, a, b, *(stream or [7]), self.n))
        return self
    def launch(self, at, *work, thread=MAIN): return self.call('cudaLaunchKernel', at, at+5., *work, thread=thread)
    def table(self, n_steps=1):
        df = checked(Profile(self.spans, 'cuda', self.lines), n_steps)
        return {(o.cause, o.place): round(o.ms*1e3, 6) for o in df.itertuples() if o.cause not in ('device busy', 'step')}

def checked(profile, n_steps=1):
    df = idle_by_cause(profile)
    assert df.columns.tolist()==['cause', 'place', 'ms', 'step_frac', 'n'] and df.cause.iloc[-1]=='step'
    assert abs(df.ms[:-1].sum()-df.ms.iloc[-1])<1e-6 and abs(df.step_frac[:-1].sum()-1)<1e-9      # to a nanosecond
    assert (df.ms>=0).all() and not df.duplicated(['cause', 'place']).any()
    assert len(profile.of('step'))==n_steps
    return df

def two(gap_from=300., gap_to=700., launched=690., **kwargs):
    "A kernel before and one after a gap; the second one is launched at its end"
    return Made(**kwargs).launch(0., ('gemm', 0., gap_from)).launch(launched, ('gemm', gap_to, 1000.))

def test_a_gap_for_each_cause():
    gap = 400.
    assert two().loop('phase', 'wait', 290., 680.).table()=={('data', ''): gap}
    assert two().loop('phase', 'copy', 290., 680.).table()=={('copy', ''): gap}
    assert two().loop('phase', 'forward', 290., 699.).table()=={('launches', 'forward'): gap}
    assert two().table()=={('launches', 'between phases'): gap}
    assert two().loop('callback', 'LogCallback', 310., 690., 'after_batch').table()=={('callback LogCallback', 'after_batch'): gap}
    for name in ('cudaStreamSynchronize', 'cudaDeviceSynchronize', 'cudaEventSynchronize', 'cudaFree'):
        made = two().loop('phase', 'loss', 200., 699.).call(name, 250., 305.)
        assert made.table()=={('synchronization', f'loss: {name}'): gap}
    assert two(launched=100.).table()=={('unknown', 'launched in time'): gap}
    assert two(gap_to=320., launched=305.).table()=={('short gaps', ''): 20.}
    assert two(gap_to=321., launched=305.).table()=={('launches', 'between phases'): 21.}

def test_the_line_that_waits():
    made = two(loss=['train.py:12', 'train.py:15']).loop('phase', 'loss', 200., 699.).call('cudaStreamSynchronize', 250., 305.)
    assert made.table()=={('synchronization', 'loss: train.py:12 or train.py:15'): 400.}
    name = 'callback LogCallback'
    made = two(**{name: ['log.py:3']}).loop('callback', 'LogCallback', 200., 320., 'after_loss').call('cudaStreamSynchronize', 250., 305.)
    assert made.table()=={('synchronization', f'{name}: log.py:3'): 400.}

def test_a_copy_to_the_host_waits_and_one_from_it_does_not():
    made = Made().launch(0., ('gemm', 0., 290.)).loop('phase', 'loss', 200., 699.)
    made.call('cudaMemcpyAsync', 250., 305., ('Memcpy DtoH (Device -> Pageable)', 291., 300.)).launch(690., ('gemm', 700., 1000.))
    assert made.table()=={('synchronization', 'loss: cudaMemcpyAsync'): 400., ('short gaps', ''): 1.}
    made = two().loop('phase', 'forward', 200., 699.).call('cudaMemcpyAsync', 301., 650., ('Memcpy HtoD (Pageable -> Device)', 600., 601.))
    assert made.table()=={('copy', 'forward'): 399., ('copy', 'host to device'): 1.}

def test_waits_of_the_loader_are_data():
    "Whether the loader waits for the device itself, or another thread does that launches nothing"
    made = two().loop('phase', 'wait', 200., 600.).call('cudaStreamSynchronize', 250., 305.)
    assert made.table()=={('data', ''): 400.}
    made = two().loop('phase', 'forward', 200., 699.).call('cudaEventSynchronize', 100., 690., thread=READER)
    assert made.table()=={('launches', 'forward'): 400.}

def test_what_took_most_of_the_gap_is_its_cause():
    "The loss is read, then a callback takes long: without the callback, most of the gap would be gone"
    def made(slept): return (two().loop('phase', 'loss', 200., 310.).call('cudaStreamSynchronize', 250., 305.)
                             .loop('callback', 'LogCallback', 310., 310.+slept, 'after_loss'))
    assert made(250.).table()=={('callback LogCallback', 'after_loss'): 400.}
    assert made(150.).table()=={('synchronization', 'loss: cudaStreamSynchronize'): 400.}

def test_a_call_that_waited_long_before_is_not_the_cause():
    made = two().loop('phase', 'forward', 200., 699.).call('cudaStreamSynchronize', 200., 270.)
    assert made.table()=={('launches', 'forward'): 400.}

def test_nested_callbacks_name_the_innermost():
    made = two().loop('callback', 'ValidCallback', 290., 690., 'after_batch').loop('callback', 'LogCallback', 350., 650., 'after_loss')
    assert made.table()=={('callback LogCallback', 'after_loss'): 400.}
    made = two().loop('callback', 'ValidCallback', 290., 690., 'after_batch').loop('callback', 'LogCallback', 350., 400., 'after_loss')
    assert made.table()=={('callback ValidCallback', 'after_batch'): 400.}

def test_launches_of_the_backward_thread():
    made = Made().launch(0., ('gemm', 0., 300.)).launch(690., ('gemm', 700., 1000.), thread=BACKWARD).loop('phase', 'backward', 290., 720.)
    assert made.table()=={('launches', 'backward'): 400.}
    made.call('cudaStreamSynchronize', 292., 304., thread=BACKWARD)
    assert made.table()=={('synchronization', 'backward: cudaStreamSynchronize'): 400.}

def test_a_graph_is_busy_from_its_first_kernel_to_its_last():
    made = Made().call('cudaGraphLaunch', 0., 90., *[('tiny', t, t+5.) for t in range(40, 960, 40)]).loop('phase', 'graph', 0., 95.)
    assert made.launch(950., ('gemm', 980., 1000.)).table()=={('launches', 'graph'): 40., ('launches', 'between phases'): 55.}
    df = checked(Profile(made.spans))
    assert df.set_index('cause').ms['device busy']==pytest.approx((925.-40.+20.)/1e3)

def test_two_streams():
    "The device is busy as long as either is; a copy to it counts only where it is alone"
    made = Made().launch(0., ('gemm', 0., 600.)).launch(5., ('relu', 500., 800., 8)).launch(790., ('gemm', 800., 1000.))
    assert made.table()=={}
    made = Made().launch(0., ('gemm', 0., 600.)).call('cudaMemcpyAsync', 5., 9., ('Memcpy HtoD (Pinned -> Device)', 500., 800., 9))
    assert made.launch(790., ('gemm', 800., 1000.)).table()=={('copy', 'host to device'): 200.}

def test_other_gpus():
    made = Made().launch(0., ('gemm', 0., 600.)).launch(5., ('ncclDevKernel_AllReduce_Sum_f32_RING_LL', 500., 800., 9))
    assert made.launch(790., ('gemm', 800., 1000.)).table()=={('other GPU', 'NCCL'): 200.}

def test_a_lost_launch():
    for link in (99, None):
        made = Made().launch(0., ('gemm', 0., 300.)).loop('phase', 'wait', 290., 690.)
        made.spans.append(Span('kernel', 'gemm', 700., 1000., 7, link))
        assert made.table()=={('unknown', 'launch not recorded'): 400.}

def test_the_end_of_the_profile_and_a_device_that_did_nothing_before():
    made = Made().loop('phase', 'wait', 0., 390.).launch(395., ('gemm', 400., 600.)).loop('callback', 'LogCallback', 600., 1000., 'after_batch')
    assert made.table()=={('data', ''): 400., ('callback LogCallback', 'after_batch'): 400.}

def test_a_host_that_runs_ahead():
    "Two steps are launched within 20 µs; the device takes 500 µs each, and what went before isn't theirs"
    spans = [Span('step', 'step 0', 10., 20.), Span('step', 'step 1', 20., 30.)]
    for i,(at,a,b) in enumerate([(0., 0., 100.), (12., 100., 590.), (22., 600., 1100.)]):
        spans += [Span('call', 'cudaLaunchKernel', at, at+1, MAIN, i+1), Span('kernel', 'gemm', a, b, 7, i+1)]
    df = checked(Profile(spans), 2)
    assert df.cause.tolist()==['device busy', 'short gaps', 'step']
    assert df.ms.tolist()==pytest.approx([.495, .005, .5]) and df.n.tolist()==[1., .5, 1.]

def test_what_lies_between_epochs_is_no_part_of_a_step():
    spans = [Span('step', 'step 9', 0., 100.), Span('step', 'step 0', 5000., 5100.)]
    for i,(at,a,b) in enumerate([(0., 5., 100.), (4000., 4005., 4100.), (5001., 5005., 5100.)]):
        spans += [Span('call', 'cudaLaunchKernel', at, at+1, MAIN, i+1), Span('kernel', 'gemm', a, b, 7, i+1)]
    assert checked(Profile(spans), 2).ms.iloc[-1]==pytest.approx(.1)

def test_sums_of_random_traces():
    rng = random.Random(0)
    for _ in range(200):
        made, ends, t = Made(), [], 0.
        bounds = sorted(rng.uniform(0, 1000) for _ in range(3))
        made.spans = [Span('step', f'step {i}', a, b) for i,(a,b) in enumerate(zip(bounds, bounds[1:]))]
        for _ in range(rng.randrange(12)):
            at = rng.uniform(-100, 1000)
            names = 'gemm', 'Memcpy HtoD (Pinned -> Device)', 'Memcpy DtoH (Device -> Pinned)', 'ncclDevKernel'
            made.launch(at, *[(rng.choice(names), at+(d := rng.uniform(-3, 90)), at+d+rng.uniform(0, 90), rng.choice([7, 8])) for _ in range(rng.randrange(3))])
            made.call(rng.choice(['cudaStreamSynchronize', 'cudaMalloc', 'cudaEventQuery']), at+9, at+rng.uniform(9, 60))
            a = rng.uniform(-50, 1000)
            made.loop('callback', rng.choice('AB'), a, a+rng.uniform(0, 200), 'after_batch')
            made.loop('phase', rng.choice(['wait', 'copy', 'loss']), a, a+rng.uniform(0, 200))
        checked(Profile(made.spans), 2)


# ---- real profiles on a CPU

class SleepCallback(Callback):
    "Sleeps at one event"
    def __init__(self, event, s): setattr(self, event, lambda: time.sleep(s))

def quiet(learn, *args, **kwargs):
    with learn.no_bar(), learn.no_logging(): return profile_steps(learn, *args, **kwargs)

def causes(df): return df[:-1].groupby('cause').step_frac.sum().to_dict()

@pytest.mark.parametrize('ops', [False, True])
def test_a_sleeping_callback_on_a_cpu(ops):
    learn = synth_learner(n_trn=30, cbs=SleepCallback('before_step', .02))
    def state(): return '_call_one' in vars(learn), list(learn.cbs), warnings.filters[:], warnings.showwarning
    with learn.no_bar(), learn.no_logging():
        before = state()
        profile = profile_steps(learn, 8, 4, ops=ops)
        assert state()==before
    df = checked(profile, 8)
    assert (df.cause[0], df.place[0], df.n[0])==('callback SleepCallback', 'before_step', 1.) and df.step_frac[0]>.5
    assert bool(profile.of('op'))==ops

def test_a_slow_loader_on_a_cpu():
    learn = synth_learner(n_trn=12)
    make = learn.dls.train.create_batch
    def create_batch(b): time.sleep(.02); return make(b)
    learn.dls.train.create_batch = create_batch
    df = checked(quiet(learn, 5, 3), 5)
    assert df.cause[0]=='data' and df.step_frac[0]>.5

def waiting_loss(pred, y):
    warnings.warn('called a synchronizing CUDA operation (Triggered internally at a line of PyTorch)')
    return nn.functional.mse_loss(pred, y)
HERE = Path(__file__).resolve()
HERE = HERE.relative_to(Path.cwd()) if HERE.is_relative_to(Path.cwd()) else HERE
LOSS_LINE = f'{HERE}:{inspect.getsourcelines(waiting_loss)[1]+1}'

class WaitingCallback(Callback):
    def after_step(self): warnings.warn('called a synchronizing CUDA operation')

def test_lines_are_found_in_the_phase_or_callback_that_waits():
    learn = synth_learner(n_trn=12, cbs=WaitingCallback())
    learn.loss_func = waiting_loss
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'called a synchronizing')    # of the steps that aren't watched
        lines = quiet(learn, 2, 4).lines
    line = inspect.getsourcelines(WaitingCallback)[1]+1
    assert lines=={'loss': [LOSS_LINE], 'callback WaitingCallback': [f'{HERE}:{line}']}

@pytest.mark.parametrize('loader', ['memory', 'resident'])
def test_graphs_stay_graphs_under_a_profile(loader):
    "Here a tape repeats the step; the profile doesn't count as a stranger among the callbacks, and it ends"
    dls = get_dls('digits', bs=8, loader=loader, device='cpu', max_images=400, size=8)
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), CrossEntropyLossFlat(), cbs=GraphedStepCallback(capture=TapeCapture()))
    df = checked(quiet(learn, 10, 8), 10)
    assert 'graph' in set(df.cause) and not learn.graphed_step.why_not and learn.n_epoch==1


# ---- the trace's file

def overlaps(slices):
    "Slices of a track that overlap in part"
    ends, wrong = [], []
    for o in sorted(slices, key=lambda o: (o['ts'], -o['dur'])):
        end = round(o['ts']+o['dur'], 3)
        while ends and ends[-1]<=o['ts']: ends.pop()
        if ends and end>ends[-1]: wrong.append(o['name'])
        ends.append(end)
    return wrong

def test_the_file_of_a_profile(tmp_path):
    learn = synth_learner(n_trn=30, cbs=SleepCallback('after_pred', .001))
    path = write_trace(quiet(learn, 20, 5, n_valid=2, ops=True), tmp_path/'steps.json')
    found = json.loads(path.read_text())
    slices = [o for o in found['traceEvents'] if o['ph']=='X']
    assert {o['ph'] for o in found['traceEvents']}=={'X', 'M'} and path.stat().st_size<10e6
    assert all({'name', 'ts', 'dur', 'pid', 'tid', 'cat'}<=o.keys() and o['ts']>=0 and o['dur']>=0 for o in slices)
    names = {o['tid']: o['args']['name'] for o in found['traceEvents'] if o['name']=='thread_name'}
    assert names=={1: 'epochs, steps and phases', 2: 'callbacks', 3: 'host, training loop'}
    assert {o['tid'] for o in slices}=={*names} and sum(o['cat']=='step' for o in slices)==20
    assert [o['args']['sort_index'] for o in found['traceEvents'] if o['name']=='thread_sort_index']==[1, 2, 3]
    assert [overlaps([o for o in slices if o['tid']==t]) for t in names]==[[], [], []]
    assert overlaps([dict(name='a', ts=0, dur=5), dict(name='b', ts=3, dur=5)])==['b']         # the check itself
    assert {'cpu', 'torch', 'fastai', 'gpubench', 'n_steps'}<=found['otherData'].keys()

def test_a_long_profile_is_cut_at_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, 'MAX_SLICES', 50)
    spans = [Span('step', f'step {i}', 100.*i, 100.*(i+1)) for i in range(20)]
    spans += [Span('kernel', 'tiny', t, t+5., 7) for t in range(0, 2000, 10)]
    found = json.loads(write_trace(Profile(spans), tmp_path/'cut.json').read_text())
    slices = [o for o in found['traceEvents'] if o['ph']=='X']
    assert found['otherData']['n_steps']==4 and len(slices)<=51 and max(o['ts']+o['dur'] for o in slices)==400.
    monkeypatch.setattr(trace, 'MAX_SLICES', 2)
    assert json.loads(write_trace(Profile(spans), tmp_path/'cut.json').read_text())['otherData']['n_steps']==1


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
    "Many small kernels, with Python in between"
    n = 100
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 1)
    def forward(self, x):
        x = x.as_subclass(torch.Tensor)
        for _ in range(self.n): x = x+float(sum(range(5000))>0)         # some 50 µs of Python each
        return self.layer(x)

def on_gpu(model, item_s=0., cbs=(), loss_func=nn.functional.mse_loss):
    dl = TfmdDL(Items(64, item_s), bs=4, num_workers=0, device='cuda')
    return Learner(DataLoaders(dl, dl), model.cuda(), loss_func, cbs=list(cbs))

@needs_gpu
def test_a_sleeping_callback():
    df = checked(quiet(on_gpu(Products(1), cbs=[SleepCallback('after_batch', .02)])), 20)
    found = df[df.cause=='callback SleepCallback']
    assert found.place.tolist()==['after_batch'] and found.step_frac.sum()>.5 and .9<=found.n.sum()<=1.1

@needs_gpu
def test_a_slow_loader():
    assert causes(checked(quiet(on_gpu(Products(1), item_s=.005)), 20))['data']>.5

def reading_loss(pred, y):
    loss = nn.functional.mse_loss(pred, y)
    loss.item()
    time.sleep(.002)                                                   # a wait shows in what comes too late after it
    return loss
READ_LINE = f'{HERE}:{inspect.getsourcelines(reading_loss)[1]+2}'

@needs_gpu
def test_a_loss_that_is_read():
    before = torch.cuda.get_sync_debug_mode()
    profile = quiet(on_gpu(Products(40), loss_func=reading_loss))
    df = checked(profile, 20)
    assert torch.cuda.get_sync_debug_mode()==before and profile.lines['loss']==[READ_LINE]
    found = df[(df.cause=='synchronization') & (df.place==f'loss: {READ_LINE}')]
    assert len(found)==1 and found.n.iloc[0]>=.9 and found.ms.iloc[0]>1.5

@needs_gpu
def test_many_tiny_kernels():
    profile = quiet(on_gpu(Tiny()))
    df = checked(profile, 20)
    found = df[(df.cause=='launches') & (df.place=='forward')]
    assert found.step_frac.sum()>.4 and found.n.sum()>Tiny.n/2
    forward = [o for o in profile.of('phase') if o.name=='forward']     # the clocks of host and profiler agree
    calls = [o for o in profile.of('call') if 'Launch' in o.name]
    within = [sum(a.start_us<=o.start_us<a.end_us for o in calls) for a in forward[2:-1]]
    assert min(within)>=Tiny.n

@needs_gpu
def test_a_device_that_never_waits():
    df = checked(quiet(on_gpu(Products(60, 8192))), 20)
    assert df.cause[0]=='device busy' and df.step_frac[0]>.9

@needs_gpu
@pytest.mark.parametrize('loader', ['memory', 'resident'])
def test_a_graphed_step_shows_no_false_idle(loader):
    dls = get_dls('digits', bs=32, loader=loader, device='cuda', max_images=1600, size=28)
    model = nn.Sequential(nn.Conv2d(1, 32, 3), *[nn.Sequential(nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)) for _ in range(20)],
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    learn = Learner(dls, model, CrossEntropyLossFlat())
    speed_up(learn, compile=False)
    profile = quiet(learn, 20, 10)
    df, work = checked(profile, 20), device_work(profile)
    graphs = [o for o in work if o.call and 'GraphLaunch' in o.call.name]
    kernels = [o for o in profile.of('kernel') if o.link==graphs[-1].call.link]
    assert len(graphs)>=20 and len(kernels)>100                          # all kernels of a graph are one piece of work
    assert df.cause[0]=='device busy' and df.ms[0]>=.9*sum(o.end_us-o.start_us for o in graphs[-10:])/1e4
    assert 'graph' in {o.name for o in profile.of('phase')}

@needs_gpu
def test_the_file_of_a_gpu(tmp_path):
    for ops in (False, True):
        path = write_trace(quiet(on_gpu(Tiny()), n_valid=2, ops=ops), tmp_path/'steps.json')
        found = json.loads(path.read_text())
        names = {o['tid']: o['args']['name'] for o in found['traceEvents'] if o['name']=='thread_name'}
        assert [*names.values()][:4]==['epochs, steps and phases', 'callbacks', 'host, training loop', 'host, backward pass']
        assert all(o.startswith('cuda:0, stream ') for o in [*names.values()][4:]) and len(names)>4
        slices = [o for o in found['traceEvents'] if o['ph']=='X']
        assert [o for t in names for o in overlaps([s for s in slices if s['tid']==t])]==[] and path.stat().st_size<10e6
        assert ('aten::add' in {o['name'] for o in slices})==ops and found['otherData']['n_steps']==20


@pytest.mark.slow
def test_the_profiler_prints_nothing_of_its_own():
    code = ("import fastai.callback.progress; from fastai.test_utils import synth_learner; from gpubench.run.idle import profile_steps\n"
            "learn = synth_learner()\n"
            "with learn.no_bar(), learn.no_logging(): profile_steps(learn, ops=True)")
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr)==(0, '', '')
