"""The monitor above a made-up driver. Whatever the hardware does, a real fit finishes, and nothing that was not measured reads 0"""
import threading

import fastai.callback.progress   # noqa: F401  gives Learner its no_bar
import pynvml
import pytest
from fastai.callback.core import Callback, CancelFitException
from fastai.test_utils import synth_learner

from fake_nvml import LOST, MISMATCH, NOT_SUPPORTED, UNKNOWN, FakeGPU, driver, no_driver
from gpubench.watch.monitor import GPU_COLUMNS, MonitorCallback
from gpubench.watch.nvml import SENSORS

class LongEnough(Callback):
    "Epochs until so many samples were taken; `change(n)` comes after each"
    order = 50
    def __init__(self, n, change=lambda n: None): self.n, self.change = n, change
    def after_epoch(self):
        n = self.learn.monitor.fits[-1].n
        self.change(n)
        if n>=self.n: raise CancelFitException()

def fitted(devices=(0,), n=3, change=lambda n: None):
    "A callback after a real fit that went on until `n` samples were there; the loss says that it trained"
    cb = MonitorCallback(devices=list(devices))
    learn = synth_learner(n_trn=2, cbs=[cb, LongEnough(n, change)])
    with learn.no_bar(), learn.no_logging(): learn.fit(10**6)
    assert learn.recorder.losses[-1].item()>0 and not cb.running
    assert not [o for o in threading.enumerate() if o.name=='gpubench-monitor']
    return cb

def measured(cb):
    df = cb.to_df().query("device!='cpu'")
    assert not (df[GPU_COLUMNS]==0).any(axis=None)       # nothing that these GPUs measure is 0
    return [o for o in GPU_COLUMNS if df[o].notna().any()]

BUSY = dict(throttle_bits=0x4)      # at the power cap, so that no column has a measured 0


def test_the_driver_has_every_function_that_is_asked():
    for functions,*_ in SENSORS.values():
        assert any(hasattr(pynvml, f'nvmlDeviceGet{o}') for o in functions.split()), functions

def test_all_columns_of_a_working_gpu():
    with driver(FakeGPU(**BUSY, power_w=321, temperature_c=66)): cb = fitted()
    row = cb.to_df().query("device=='cuda:0'").iloc[0]
    assert [row[o] for o in GPU_COLUMNS[:8]]==[.9, .4, 2048., 321., 66., 1980., 4, '']
    assert row.energy_counter_j>=1e6 and not any('cuda:0' in o for o in cb.notes)

GLITCHES = [ # column, what the sensor gives for a moment
    ('power_w', dict(power_w=7001)), ('sm_clock_mhz', dict(sm_clock_mhz=0)), ('gpu_mem_mib', dict(used_mib=143_772)),
    ('throttle_bits', dict(throttle_bits=2**64-1)), ('power_w', dict(errors=dict(PowerUsage=UNKNOWN)))]

@pytest.mark.parametrize('column,glitch', GLITCHES)
def test_a_glitch_costs_its_row_and_one_note(column, glitch):
    gpu = FakeGPU(**BUSY)
    usual = {k: getattr(gpu, k) for k in glitch}
    def change(n):
        for k,v in (glitch if n in (2, 3) else usual).items(): setattr(gpu, k, v)
    with driver(gpu): cb = fitted(n=5, change=change)
    x = cb.to_df().query("device=='cuda:0'")[column]
    assert x.isna().any() and x.notna().iloc[0] and x.nunique()==1
    assert sum(column in o for o in cb.notes)==1 and cb.summary()['power_max_w']==300

@pytest.mark.parametrize('function,columns', [('PowerUsage', {'power_w'}), ('UtilizationRates', {'gpu_util_frac', 'mem_util_frac'}),
                                              ('CurrentClocksEventReasons', {'throttle_bits', 'throttle_words'}), ('TotalEnergyConsumption', {'energy_counter_j'})])
def test_a_sensor_that_is_missing(function, columns):
    "As in WSL2, in a part of a GPU, or with an old driver"
    with driver(FakeGPU(**BUSY, errors={function: NOT_SUPPORTED})): cb = fitted()
    assert set(GPU_COLUMNS)-set(measured(cb))==columns
    [note] = [o for o in cb.notes if 'cuda:0' in o]
    assert min(columns-{'throttle_words'}) in note and 'NVML error 3' in note

def test_a_gpu_that_is_lost():
    gpu = FakeGPU(**BUSY)
    def change(n): gpu.lost = n>=3
    with driver(gpu): cb = fitted(n=6, change=change)
    power = cb.to_df().query("device=='cuda:0'").power_w
    assert power.notna().iloc[0] and power.isna().iloc[-1] and measured(cb)
    assert cb.summary()['energy_j'] is None and f'NVML error {LOST}' in cb.summary()['monitor_note']

@pytest.mark.parametrize('fails,says', [(lambda: no_driver(MISMATCH), 'NVML error 18'), (lambda: driver(), 'NVML error 6')])
def test_no_gpu_is_no_error(fails, says, capfd):
    with fails(): cb = fitted()
    [note] = [o for o in cb.notes if 'cuda:0' in o]
    assert says in note and 'gpubench doctor' in note and measured(cb)==[]
    assert cb.summary()['power_mean_w'] is None and cb.summary()['cpu_mean_frac'] is not None
    assert ''.join(capfd.readouterr())==''

def test_gpus_by_number_and_uuid_are_found_once(monkeypatch):
    first, second = FakeGPU(power_w=100), FakeGPU('GPU-1', power_w=222)
    def powers(*devices): return fitted(devices).to_df().groupby('device').power_w.max().dropna().to_dict()
    with driver(first, second):
        assert powers(0, 'cuda', 'GPU-0', 'GPU-1')=={'cuda:0': 100., 'GPU-1': 222.}
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '1')
        assert powers(0, 1)=={'cuda:0': 222.}
