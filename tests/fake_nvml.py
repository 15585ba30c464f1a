"""A made-up NVIDIA driver: what `pynvml` offers, for GPUs that exist as numbers

    with driver(FakeGPU(power_w=300), FakeGPU(errors=dict(PowerUsage=NOT_SUPPORTED))) as gpus:
        gpus[0].power_w = 50         # everything about a GPU may change while it is watched
    with no_driver(MISMATCH): …      # nvmlInit fails; LibraryNotFound: 12, DriverNotLoaded: 9 …"""
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import pynvml

NOT_SUPPORTED, NOT_FOUND, LOST, MISMATCH, UNKNOWN = 3, 6, 15, 18, 999
MIB = 2**20

@dataclass
class FakeGPU:
    uuid: str = 'GPU-0'
    memory_mib: float = 143771
    used_mib: float = 2048
    power_w: float = 300
    limit_w: float = 700
    temperature_c: int = 55
    sm_clock_mhz: int = 1980
    throttle_bits: int = 0
    util_percent: tuple = (90, 40)           # kernels, memory
    energy_j: float = 1e6                    # at the start; grows by `power_w`
    errors: dict = field(default_factory=dict)   # function -> NVML's error
    lost: bool = False
    start_s: float = field(default_factory=time.monotonic)

READINGS = dict( # function without nvmlDeviceGet -> its answer
    UtilizationRates=lambda o: SimpleNamespace(gpu=o.util_percent[0], memory=o.util_percent[1]),
    MemoryInfo=lambda o: SimpleNamespace(total=o.memory_mib*MIB, used=o.used_mib*MIB, free=(o.memory_mib-o.used_mib)*MIB),
    PowerUsage=lambda o: int(1e3*o.power_w), EnforcedPowerLimit=lambda o: int(1e3*o.limit_w),
    PowerManagementDefaultLimit=lambda o: 700_000, Temperature=lambda o, kind: o.temperature_c,
    ClockInfo=lambda o, kind: o.sm_clock_mhz,
    CurrentClocksEventReasons=lambda o: o.throttle_bits,
    TotalEnergyConsumption=lambda o: round(1e3*(o.energy_j+o.power_w*(time.monotonic()-o.start_s))),
    UUID=lambda o: o.uuid, MigMode=lambda o: (0, 0), ComputeRunningProcesses=lambda o: [])

def _answer(name, read):
    def ask(gpu, *args):
        code = LOST if gpu.lost else gpu.errors.get(name)
        if code: raise pynvml.NVMLError(code)
        return read(gpu, *args)
    return ask

@contextmanager
def driver(*gpus):
    "A driver that knows these GPUs; yields them"
    def find(key, of):
        found = [o for i,o in enumerate(gpus) if key==of(i, o)]
        if not found: raise pynvml.NVMLError(NOT_FOUND)
        return found[0]
    fake = SimpleNamespace(
        NVMLError=pynvml.NVMLError, n_open=0, nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda i: find(i, lambda i, o: i),
        nvmlDeviceGetHandleByUUID=lambda uuid: find(uuid, lambda i, o: o.uuid),
        **{f'nvmlDeviceGet{k}': _answer(k, v) for k,v in READINGS.items()})
    def close(): fake.n_open -= 1
    def open_nvml():
        fake.n_open += 1
        return fake
    fake.nvmlShutdown = close
    with mock.patch('gpubench.watch.nvml.open_nvml', open_nvml): yield gpus
    assert fake.n_open==0                    # whoever opened it closed it

def no_driver(code):
    def fail(): raise pynvml.NVMLError(code)
    return mock.patch('gpubench.watch.nvml.open_nvml', fail)
