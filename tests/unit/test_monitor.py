"""The monitor above a faked NVML: pynvml's own code runs. Whatever the hardware does, a real fit finishes,
nothing that was not measured reads 0, and a sentence says what to do"""
import gc, os, subprocess, sys, threading, time
from types import SimpleNamespace

import pytest

import torch
import fastai.callback.progress   # noqa: F401  gives Learner its no_bar
from fastai.callback.core import Callback, CancelFitException
from fastai.test_utils import synth_learner

from fake_nvml import (DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH, NO_PERMISSION, NOT_SUPPORTED, TIMEOUT, UNKNOWN,
                       FakeGPU, FakeMig, FakeNVML, wsl2)
from gpubench.watch.monitor import GPU_COLUMNS, Monitor, MonitorCallback, Sampling, gpu_sources
from gpubench.watch.nvml import Steps

from helpers import root

QUERIES = { # function -> the columns that it fills
    'nvmlDeviceGetUtilizationRates': ['gpu_util_frac', 'mem_util_frac'], 'nvmlDeviceGetMemoryInfo': ['gpu_mem_mib'],
    'nvmlDeviceGetPowerUsage': ['power_w'], 'nvmlDeviceGetTemperature': ['temperature_c'],
    'nvmlDeviceGetClockInfo': ['sm_clock_mhz', 'mem_clock_mhz'], 'nvmlDeviceGetTotalEnergyConsumption': ['energy_counter_j']}


# ---- tools

def samplers(): return [o for o in threading.enumerate() if o.name=='gpubench-monitor']

def all_ended():
    "Wait for threads that a query holds up, so that they disturb no other test"
    for o in samplers(): o.join(30)
    assert samplers()==[]

class LongEnough(Callback):
    "Epochs until so many samples were taken"
    order = 50
    def __init__(self, n): self.n = n
    def after_epoch(self):
        if self.learn.monitor.fits[-1].n>=self.n or not self.learn.monitor.running: raise CancelFitException()

def fitted(devices=(0,), n=3, **kwargs):
    "A callback after a real fit that went on until `n` samples were there; the loss says that it trained"
    cb = MonitorCallback(devices=list(devices), **kwargs)
    learn = synth_learner(n_trn=2, cbs=[cb, LongEnough(n)])
    with learn.no_bar(), learn.no_logging(): learn.fit(10**6)
    assert learn.recorder.losses[-1].item()>0 and not cb.running
    assert samplers()==[]
    return cb

def zeros(cb):
    "GPU columns and GPU names of the summary in which a 0 stands; that nothing throttled is a measured 0"
    df, s = cb.to_df(), cb.summary()
    own = [k for k in s if k!='throttled_frac' and k.removeprefix('cuda0_').removeprefix('cuda1_').startswith(('gpu_', 'mem_', 'power', 'temp', 'sm_', 'energy', 'thrott'))]
    return [o for o in GPU_COLUMNS if (df[o]==0).any()] + [o for o in own if s[o]==0 and s[o] is not False]

def measured(cb, device='cuda:0'):
    df = cb.to_df()
    df = df[df.device==device]
    return [o for o in GPU_COLUMNS if df[o].notna().any()]

BUSY = dict(throttle_reasons=0x4)      # at the power cap, so that no column has a measured 0


# ---- what works

def test_all_columns_of_a_working_gpu():
    with FakeNVML([FakeGPU(**BUSY | dict(power_w=321, temperature_c=66, util_gpu_percent=87))]).installed() as nvml:
        cb = fitted()
        row = cb.to_df().query("device=='cuda:0'").iloc[0]
        assert [row[o] for o in GPU_COLUMNS[:8]]==[.87, .4, 2048., 321., 66., 1980., 3201., 4]
        assert row.throttle_words=='' and row.energy_counter_j>=1e6
        assert not any('cuda:0' in o for o in cb.notes) and zeros(cb)==[]
        before = nvml.n_inits
        for _ in range(3): fitted()
        assert nvml.n_inits==before or torch.cuda.is_available()           # fits leave no initialisation behind; CUDA's torch makes some of its own

def test_throttling_is_told():
    with FakeNVML([FakeGPU(throttle_reasons=0x40 | 0x8)]).installed(): cb = fitted()
    df = cb.to_df().query("device=='cuda:0'")
    assert set(df.throttle_bits)=={0x48} and set(df.throttle_words)=={'hardware slowdown, heat (slowed by hardware)'}
    assert cb.summary()['throttle_seen']=='hardware slowdown, heat (slowed by hardware)'

def test_means_and_energy_after_three_windows():
    with FakeNVML([FakeGPU(**BUSY | dict(power_w=200))]).installed(), Monitor(devices=0) as m:
        end = time.monotonic()+30
        while not m.is_enough and time.monotonic()<end: time.sleep(.05)
        assert m.fits[0].last_s>=3                                         # three windows of 1 s, and not before
    s = m.summary()
    assert s['gpu_util_mean_frac']==pytest.approx(.9) and s['power_mean_w']==pytest.approx(200) and s['energy_source']=='counter'
    assert abs(s['energy_j']-200*s['monitored_s'])<=2*s['energy_error_j'] and s['throttled_frac']==0 and s['power_capped_frac']==pytest.approx(1)

def test_visible_devices_are_honoured(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '1')
    with FakeNVML([FakeGPU(power_w=100, **BUSY), FakeGPU(power_w=222, **BUSY)]).installed():
        assert set(fitted().to_df().power_w.dropna())=={222.}
        cb = fitted(devices=[0, 1])
    assert set(cb.to_df().device)=={'cpu', 'cuda:0'} and 'cuda:1 was not found' in ' '.join(cb.notes) and 'CUDA_VISIBLE_DEVICES' in ' '.join(cb.notes)

def test_a_gpu_by_its_uuid():
    gpus = [FakeGPU(power_w=100, **BUSY), FakeGPU(power_w=222, **BUSY)]
    with FakeNVML(gpus).installed():
        cb = fitted(devices=[gpus[1].uuid])
        assert set(cb.to_df().power_w.dropna())=={222.} and set(cb.to_df().device)=={'cpu', gpus[1].uuid}
        assert 'GPU-none was not found' in ' '.join(fitted(devices=['GPU-none']).notes)

@pytest.mark.parametrize('visible, devices', [(None, ['cuda:0', 'cuda', 0]), (None, [0, 'GPU-00000000-1111-2222-3333-444444444444']),
                                              ('0,0', [0, 1]), ('GPU-00000000-1111-2222-3333-444444444444,0', [0, 1])])
def test_a_gpu_named_twice_is_one(monkeypatch, visible, devices):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if visible: monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    with FakeNVML([FakeGPU(power_w=100, **BUSY), FakeGPU(power_w=222, **BUSY)]).installed() as nvml:
        cb, n = fitted(devices=devices), nvml.n_inits
    assert cb.to_df().device.value_counts().to_dict().keys()=={'cpu', 'cuda:0'} and cb.summary()['power_max_w']==100
    assert n==0 or torch.cuda.is_available()


# ---- NVML as a whole does not work

@pytest.mark.parametrize('nvml, says', [
    (dict(library=False), 'libnvidia-ml is missing'),
    (dict(init_error=LIB_RM_VERSION_MISMATCH), 'wsl --shutdown'),
    (dict(init_error=DRIVER_NOT_LOADED), 'not loaded. Load or install it'),
    (dict(init_error=NO_PERMISSION), 'Ask an administrator'),
    (dict(init_error=UNKNOWN), 'restart the machine'),
    (dict(errors=dict(nvmlDeviceGetHandleByIndex=UNKNOWN, nvmlDeviceGetCount=UNKNOWN)), 'was not found'),
    (dict(), 'was not found')])
def test_no_nvml(nvml, says, capfd):
    gpus = [FakeGPU()] if 'errors' in nvml else []
    with FakeNVML(gpus, **nvml).installed(): cb = fitted()
    about_gpu = [o for o in cb.notes if "CPU's energy" not in o]
    assert len(about_gpu)==1 and says in about_gpu[0]
    assert measured(cb)==[] and zeros(cb)==[] and cb.summary()['power_mean_w'] is None and cb.summary()['gpu_util_mean_frac'] is None
    assert cb.summary()['cpu_mean_frac'] is not None                       # the CPU is watched all the same
    assert ''.join(capfd.readouterr())==''                                 # nothing on the screen

def stub(**kwargs): return type(sys)('pynvml') if not kwargs else vars(o := type(sys)('pynvml')).update(kwargs) or o
def odd(): raise RuntimeError('odd')

@pytest.mark.parametrize('package', [None, stub(), stub(nvmlInit=odd), stub(nvmlInit=None)])
def test_packages_that_do_not_work(monkeypatch, package):
    monkeypatch.setitem(sys.modules, 'pynvml', package)                   # None: `import pynvml` raises
    cb = fitted()
    assert set(cb.to_df().device)=={'cpu'} and 'No GPU was sampled' in cb.notes[0]


# ---- single queries do not work

@pytest.mark.parametrize('function, code', [(o, code) for o in QUERIES for code in (NOT_SUPPORTED, UNKNOWN)]
                         + [('nvmlDeviceGetPowerUsage', code) for code in (NO_PERMISSION, TIMEOUT)])
def test_a_query_that_fails_costs_its_own_columns(function, code):
    with FakeNVML([FakeGPU(**BUSY, errors={function: code})]).installed() as nvml: cb = fitted()
    assert measured(cb)==[o for o in GPU_COLUMNS if o not in QUERIES[function]] and zeros(cb)==[]
    notes = [o for o in cb.notes if 'cuda:0' in o]
    assert len(notes)==1 and ', '.join(QUERIES[function]) in notes[0] and f'NVML error {code}' in notes[0]
    assert nvml.calls[function]<=2<cb.fits[0].n                    # asked once for each column or under each name, then left alone

def test_functions_that_an_old_driver_lacks(caplog):
    gone = ['nvmlDeviceGetCurrentClocksEventReasons', 'nvmlDeviceGetTotalEnergyConsumption', 'nvmlDeviceGetMemoryInfo_v2', 'nvmlDeviceGetTemperatureV']
    with FakeNVML([FakeGPU(**BUSY)], missing=gone).installed(): cb = fitted()
    assert measured(cb)==GPU_COLUMNS[:-1] and 'newer NVIDIA driver' in ' '.join(cb.notes)      # the old names serve for the rest
    assert caplog.records==[]                                              # nothing is written into the training

def test_wsl2():
    with FakeNVML([wsl2()]).installed(): cb = fitted(n=5)
    assert measured(cb)==['gpu_mem_mib', 'power_w', 'temperature_c', 'sm_clock_mhz', 'mem_clock_mhz'] and zeros(cb)==[]
    assert sum('cuda:0' in o for o in cb.notes)==2 and 'WSL2' in ' '.join(cb.notes)             # one for each reason
    assert cb.summary()['throttled_frac'] is None and cb.summary()['throttle_seen'] is None

def test_impossible_values_are_not_measured():
    with FakeNVML([FakeGPU(**BUSY, power_w=0, temperature_c=0, sm_clock_mhz=0, energy_j=0, memory_total_mib=0, memory_used_mib=0)]).installed(): cb = fitted()
    assert measured(cb)==['gpu_util_frac', 'mem_util_frac', 'mem_clock_mhz', 'throttle_bits', 'throttle_words'] and zeros(cb)==[]

GLITCHES = dict( # column -> what the sensor gives for a moment
    power_w=dict(power_w=4_294_967.2), temperature_c=dict(temperature_c=255), sm_clock_mhz=dict(sm_clock_mhz=0),
    mem_clock_mhz=dict(mem_clock_mhz=2**32-1), gpu_mem_mib=dict(memory_used_mib=143_772), gpu_util_frac=dict(util_gpu_percent=101),
    throttle_bits=dict(throttle_reasons=2**64-1))

def sampled_by(monkeypatch, gpu, change, missing=(), n=17, every_s=.25):
    "A monitor that sampled a fake GPU without waiting; `change(i)` comes before sample `i`"
    fake_clock = [0.]
    monkeypatch.setattr(Steps.__init__, '__defaults__', (lambda: fake_clock[0],))
    monitor, fit = Monitor(), Sampling(None, clock=lambda: fake_clock[0], cpu_clock=lambda: 0.)
    with FakeNVML([gpu], missing=missing, clock=lambda: fake_clock[0]).installed():
        fit.sources, _ = gpu_sources(['cuda:0'])
        for i in range(n):
            fake_clock[0] = i*every_s
            change(i)
            if i==n-1: fit.sources[0].due_s = 0.            # as at the end of a fit
            fit.take()
        fit.sources[0].close()
    fit.end_s = fake_clock[0]
    monitor.fits.append(fit)
    return monitor

@pytest.mark.parametrize('column, glitch', [*GLITCHES.items(), ('power_w', dict(power_w=7001)), ('power_w', dict(power_w=4e5))])
def test_a_glitch_costs_its_row_and_one_note(monkeypatch, column, glitch):
    "More than ten times the limit of 700 W, too: no mean, maximum or energy has it"
    gpu = FakeGPU(**BUSY | dict(power_w=600))
    usual = {k: getattr(gpu, k) for k in glitch}
    def change(i):
        for k,v in (glitch if i in (4, 5, 9) else usual).items(): setattr(gpu, k, v)
    m = sampled_by(monkeypatch, gpu, change, missing=['nvmlDeviceGetTotalEnergyConsumption'])
    x, s = m.to_df()[column], m.summary()
    assert x.isna().to_numpy().nonzero()[0].tolist()==[4, 5, 9] and x.nunique()==1
    assert [column in o for o in m.notes if 'Impossible' in o]==[True]
    assert s['power_max_w']==600 and s['temperature_max_c']==55 and s['gpu_mem_max_mib']==2048 and s['sm_clock_mean_mhz']==pytest.approx(1980)
    assert (s['energy_source'], s['energy_j'])==('power', pytest.approx(600*4))

@pytest.mark.parametrize('at', [3, 16])
@pytest.mark.parametrize('jump_j', [1e12, 1e5, -5e5])
def test_a_counter_that_jumps_leaves_the_energy_to_the_power(monkeypatch, jump_j, at):
    gpu = FakeGPU(**BUSY | dict(power_w=100, power_limit_w=300))
    def change(i):
        if i==at: gpu.energy_j += jump_j
    m = sampled_by(monkeypatch, gpu, change)
    s = m.summary()
    assert (s['energy_source'], s['energy_j'])==('power', pytest.approx(100*4))
    assert sum('give energy_counter_j' in o for o in m.notes)==1
    usual = sampled_by(monkeypatch, gpu, lambda i: None)
    assert usual.summary()['energy_source']=='counter' and usual.summary()['energy_j']==pytest.approx(100*4, rel=.03) and usual.notes==[]

def test_throttle_reasons_of_all_ones_are_not_measured():
    with FakeNVML([FakeGPU(throttle_reasons=2**64-1)]).installed(): cb = fitted()
    s = cb.summary()
    assert 'throttle_bits' not in measured(cb) and s['throttled_frac'] is None and s['throttle_seen'] is None

def test_a_query_that_fails_later():
    gpu = FakeGPU(**BUSY)
    class Fails(Callback):
        def after_epoch(self):
            if self.learn.monitor.fits[-1].n>=2: gpu.errors['nvmlDeviceGetPowerUsage'] = UNKNOWN
    with FakeNVML([gpu]).installed():
        cb = MonitorCallback(devices=[0])
        learn = synth_learner(n_trn=2, cbs=[cb, LongEnough(5), Fails()])
        with learn.no_bar(), learn.no_logging(): learn.fit(10**6)
    power = cb.to_df().query("device=='cuda:0'").power_w
    assert power.notna().iloc[0] and power.isna().iloc[-1] and (power.dropna()==300).all() and zeros(cb)==[]
    assert sum('did not give power_w' in o for o in cb.notes)==1


# ---- GPUs that are lost

def test_lost_in_the_middle():
    with FakeNVML([FakeGPU(**BUSY, lost_after=35)]).installed(): cb = fitted(n=8)
    df = cb.to_df()
    assert 1<=(df.device=='cuda:0').sum()<(df.device=='cpu').sum() and zeros(cb)==[]
    note = next(o for o in cb.notes if 'was lost' in o)
    assert 'dmesg' in note and 'restart' in note and cb.summary()['energy_j'] is None and cb.summary()['power_mean_w'] is None
    assert cb.is_enough                                                    # nobody waits for it

def test_lost_before_the_fit():
    with FakeNVML([FakeGPU(lost=True)]).installed(): cb = fitted()
    assert measured(cb)==[] and zeros(cb)==[] and 'cuda:0' in cb.notes[0]

def test_one_of_two_is_lost():
    with FakeNVML([FakeGPU(**BUSY, power_w=100), FakeGPU(**BUSY, power_w=222, lost_after=35)]).installed():
        with Monitor(devices=[0, 1]) as m:
            end = time.monotonic()+30
            while not m.is_enough and time.monotonic()<end: time.sleep(.05)
    df, s = m.to_df(), m.summary()
    assert (df.device=='cuda:1').sum()<(df.device=='cuda:0').sum()==(df.device=='cpu').sum()
    assert s['power_mean_w'] is None and s['energy_j'] is None and s['cuda1_power_mean_w'] is None and s['cuda0_power_mean_w']==pytest.approx(100)
    assert s['cuda0_energy_j']>0 and sum('was lost' in o for o in m.notes)==1 and 'cuda:1 was lost' in s['monitor_note']


# ---- a query that hangs while the others answer

@pytest.mark.slow
def test_a_query_that_hangs_in_a_fit():
    "The fit ends two seconds after its end; what was sampled in part has no mean; the next fit neither waits nor asks again"
    gpu = FakeGPU(**BUSY)
    class Hangs(Callback):
        def after_epoch(self):
            if self.learn.monitor.fits[-1].n<3: return
            gpu.slow['nvmlDeviceGetPowerUsage'] = 9
            time.sleep(4)
            raise CancelFitException()
    with FakeNVML([gpu]).installed():
        cb, hangs, start_s = MonitorCallback(devices=[0]), Hangs(), time.monotonic()
        learn = synth_learner(n_trn=2, cbs=[cb, hangs])
        with learn.no_bar(), learn.no_logging(): learn.fit(10**6)
        took_s = [time.monotonic()-start_s]
        s = cb.summary()
        learn.remove_cb(hangs)
        with learn.no_bar(), learn.no_logging(): learn.fit(3)
        took_s.append(time.monotonic()-start_s-took_s[0])
        all_ended()
    assert 6<=took_s[0]<20 and s['monitored_s']>4 and s['cpu_mean_frac'] is None and s['gpu_mem_max_mib']==2048
    assert [s[o] for o in ('power_mean_w', 'gpu_util_mean_frac', 'throttled_frac', 'energy_j')]==[None]*4 and zeros(cb)==[]
    assert len(cb.notes)<=2 and 'did not answer for 2 s' in cb.notes[0] and 'Samples end after' in cb.notes[0]
    assert took_s[1]<10 and cb.fits[1].n>=1 and not cb.fits[1].left
    assert set(cb.to_df().query('fit==1').device)=={'cpu'} and cb.summary()['power_mean_w'] is None

@pytest.mark.slow
def test_python_ends_although_a_query_hangs():
    "nvitop would wait for it, two minutes"
    code = """import fake_nvml, time
from gpubench.watch.monitor import Monitor
with Monitor(devices=0) as m:
    fake_nvml.playing.slow['nvmlDeviceGetPowerUsage'] = 100
    time.sleep(1)
print(m.notes[0])"""
    env, start_s = os.environ | FakeNVML([FakeGPU()]).child_env(), time.monotonic()
    env['PYTHONPATH'] += os.pathsep + str(root)
    p = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, timeout=120)
    assert 'did not answer' in p.stdout and p.stderr=='' and time.monotonic()-start_s<60, p.stderr

def test_a_query_that_hangs_from_the_start(monkeypatch):
    "Other queries answer; the fit waits for its patience and goes on, and nothing reads 0"
    start = Sampling.start
    monkeypatch.setattr(Sampling, 'start', lambda self: start(self, patience_s=1.))
    with FakeNVML([FakeGPU(**BUSY, slow=dict(nvmlDeviceGetTemperature=6))]).installed():
        cb = MonitorCallback(devices=[0])
        learn = synth_learner(n_trn=2, cbs=cb)
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
        all_ended()
    assert 'first sample was not there after 1 s' in cb.notes[0] and measured(cb)==[] and zeros(cb)==[] and cb.summary()['power_mean_w'] is None


# ---- a part of a GPU

def test_mig():
    part = FakeMig(memory_used_mib=777)
    with FakeNVML([FakeGPU(**BUSY, mig=[part])]).installed():
        cb, whole = fitted(devices=[part.uuid]), fitted()
    assert measured(cb, part.uuid)==['gpu_mem_mib'] and set(cb.to_df().gpu_mem_mib.dropna())=={777.} and zeros(cb)==[]
    assert 'MIG' in ' '.join(cb.notes)
    assert zeros(whole)==[] and not {'gpu_util_frac', 'mem_util_frac'} & set(measured(whole))

def test_mig_through_cuda(monkeypatch):
    part = FakeMig(memory_used_mib=777)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', part.uuid)
    with FakeNVML([FakeGPU(mig=[part])]).installed(): cb = fitted()
    assert set(cb.to_df().gpu_mem_mib.dropna())=={777.}


def test_the_second_of_two_parts_through_cuda(monkeypatch):
    parts = [FakeMig(f'MIG-{i}1111111-2222-3333-4444-555555555555', memory_used_mib=100*i) for i in (1, 2)]
    with FakeNVML([FakeGPU(memory_used_mib=50), FakeGPU(mig=parts)]).installed():
        for value,used in ((parts[1].uuid, {200.}), (','.join(o.uuid for o in parts[::-1]), {200.}), ('MIG-99999999-2222-3333-4444-555555555555', set())):
            monkeypatch.setenv('CUDA_VISIBLE_DEVICES', value)
            cb = fitted(n=2)
            assert set(cb.to_df().gpu_mem_mib.dropna())==used and zeros(cb)==[]
            assert bool(used) or 'cuda:0 was not found' in ' '.join(cb.notes)


# ---- the thread

def open_files(): return len(os.listdir('/proc/self/fd'))

@pytest.mark.skipif(sys.platform!='linux', reason='open files are counted in /proc')
def test_nothing_leaks():
    with FakeNVML([FakeGPU(**BUSY)]).installed() as nvml:
        fitted()
        gc.collect()                                 # what earlier tests left, too
        before = threading.active_count(), open_files(), nvml.n_inits
        for _ in range(5): fitted(n=2)
        gc.collect()
        assert (threading.active_count(), open_files(), nvml.n_inits)==before

def test_gone_within_a_second_of_an_error():
    class Fails(Callback):
        def after_pred(self): raise ValueError('in the middle of a batch')
    with FakeNVML([FakeGPU(**BUSY)]).installed():
        cb = MonitorCallback(devices=[0])
        learn = synth_learner(cbs=[cb, Fails()])
        with learn.no_bar(), learn.no_logging(), pytest.raises(ValueError) as kept: learn.fit(1)   # `kept` holds the frames, as a notebook does
        end = time.monotonic()+20
        while cb.fits[0].thread.is_alive() and time.monotonic()<end: time.sleep(.01)
        took_s = time.monotonic()-(end-20)
    assert not cb.running and kept.value is not None and took_s<10       # at once, as a rule

@pytest.mark.slow
def test_a_slow_driver_is_asked_less_often():
    with FakeNVML([FakeGPU(**BUSY)], query_s=.03).installed(), Monitor(devices=0) as m: time.sleep(3)
    assert m.fits[0].period_s>=2*7*.03 and m.fits[0].n<=3/.42+3     # of eight queries one is a counter, and put off

@pytest.mark.slow
def test_an_interrupt_and_the_end_of_python():
    "Ctrl-C in a fit, with nothing after it: Python ends at once, with no word from the thread"
    code = """import gpubench.watch.monitor as m, fastai.callback.progress, os, signal
from fastai.callback.core import Callback
from fastai.test_utils import synth_learner
class Interrupts(Callback):
    def after_pred(self): os.kill(os.getpid(), signal.SIGINT)
learn = synth_learner(cbs=[m.MonitorCallback(devices=[0]), Interrupts()])
with learn.no_bar(), learn.no_logging(): learn.fit(1)"""
    env = os.environ | FakeNVML([FakeGPU()]).child_env()
    env['PYTHONPATH'] += os.pathsep + str(root)
    p = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, timeout=120)
    assert p.stderr.strip().endswith('KeyboardInterrupt') and 'Exception in thread' not in p.stderr and 'Fatal' not in p.stderr, p.stderr

@pytest.mark.slow
def test_an_exported_learner_loads_without_gpubench(tmp_path):
    learn = synth_learner(cbs=MonitorCallback(devices=[]))
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    torch.save(learn, tmp_path/'export.pkl')                               # as `learn.export()` does, which wants other data
    code = """import sys, torch, warnings
warnings.simplefilter('ignore')
sys.modules['gpubench'] = None
print(type(torch.load('export.pkl', weights_only=False).monitor).__name__)"""
    p = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert p.stdout.strip()=='Callback', p.stderr


# ---- warm at the start

@pytest.mark.parametrize('temperature_c, clock_mhz, is_warm', [(58., 1980., True), (52., 1980., False), (58., 1400., False)])
def test_what_warm_at_the_start_means(temperature_c, clock_mhz, is_warm):
    "60 °C and 1,980 MHz on average: no more than 5 °C cooler and 20 % slower"
    monitor, fit = Monitor(), Sampling(None)
    fit.sources = [SimpleNamespace(device='cuda:0', alive=True, windowed=True, notes=[])]
    for i in range(1001):
        hot = dict(temperature_c=60., sm_clock_mhz=1980.) if i else dict(temperature_c=temperature_c, sm_clock_mhz=clock_mhz)
        fit.rows.append(dict(sample=i, time_s=.1*i, device='cuda:0') | hot)
    fit.n, fit.end_s = len(fit.rows), 100.
    monitor.fits.append(fit)
    assert monitor.summary()['warm_at_start'] is is_warm
