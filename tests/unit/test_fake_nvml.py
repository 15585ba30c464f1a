"""The faked NVML itself: pynvml, unchanged, reads from it what was put in, here and in another process"""
import os, subprocess, sys, time

import pytest

from fake_nvml import (DRIVER_NOT_LOADED, GPU_IS_LOST, LIB_RM_VERSION_MISMATCH, NO_PERMISSION, NOT_SUPPORTED, UNKNOWN,
                       FakeGPU, FakeMig, FakeNVML, wsl2)

pynvml = pytest.importorskip('pynvml')


def test_values_come_through_pynvml():
    gpu = FakeGPU(name='NVIDIA T4', power_w=70, temperature_c=61, sm_clock_mhz=1590, mem_clock_mhz=5001, throttle_reasons=0x24, processes=[[42, 100], [43, None]])
    with FakeNVML([gpu, FakeGPU()], driver='1.2.3', cuda_version=12040).installed() as nvml:
        pynvml.nvmlInit()
        assert pynvml.nvmlSystemGetDriverVersion()=='1.2.3' and pynvml.nvmlSystemGetCudaDriverVersion()==12040 and pynvml.nvmlDeviceGetCount()==2
        h = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        assert pynvml.nvmlDeviceGetName(h)=='NVIDIA T4' and pynvml.nvmlDeviceGetUUID(h)==gpu.uuid
        assert pynvml.nvmlDeviceGetPowerUsage(h)==70000 and pynvml.nvmlDeviceGetTemperature(h, 0)==61
        assert [pynvml.nvmlDeviceGetClockInfo(h, o) for o in (1, 2)]==[1590, 5001] and pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(h)==0x24
        assert [(o.pid, o.usedGpuMemory) for o in pynvml.nvmlDeviceGetComputeRunningProcesses(h)]==[(42, 100*2**20), (43, None)]
        assert pynvml.nvmlDeviceGetMemoryInfo(h).total==143771*2**20
        pynvml.nvmlShutdown()
        assert nvml.n_inits==0
        with pytest.raises(pynvml.NVMLError_Uninitialized): pynvml.nvmlDeviceGetCount()

@pytest.mark.parametrize('code', [DRIVER_NOT_LOADED, NO_PERMISSION, LIB_RM_VERSION_MISMATCH, UNKNOWN])
def test_init_fails(code):
    with FakeNVML(init_error=code).installed(), pytest.raises(pynvml.NVMLError) as e: pynvml.nvmlInit()
    assert e.value.value==code

def test_no_library():
    with FakeNVML(library=False).installed(), pytest.raises(pynvml.NVMLError_LibraryNotFound): pynvml.nvmlInit()

def test_chosen_queries_fail():
    gpu = FakeGPU(errors=dict(nvmlDeviceGetPowerUsage=UNKNOWN, nvmlDeviceGetMemoryInfo=NOT_SUPPORTED))
    with FakeNVML([gpu, wsl2()], missing=['nvmlDeviceGetClockInfo']).installed():
        pynvml.nvmlInit()
        h, w = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(2)]
        with pytest.raises(pynvml.NVMLError_Unknown): pynvml.nvmlDeviceGetPowerUsage(h)
        with pytest.raises(pynvml.NVMLError_NotSupported): pynvml.nvmlDeviceGetMemoryInfo(h)
        with pytest.raises(pynvml.NVMLError_FunctionNotFound): pynvml.nvmlDeviceGetClockInfo(h, 1)
        with pytest.raises(pynvml.NVMLError_NotSupported): pynvml.nvmlDeviceGetTotalEnergyConsumption(w)
        assert pynvml.nvmlDeviceGetPowerUsage(w)==300000

def test_one_of_two_is_lost():
    with FakeNVML([FakeGPU(lost_after=3), FakeGPU()]).installed():
        pynvml.nvmlInit()
        a, b = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(2)]
        assert [pynvml.nvmlDeviceGetPowerUsage(a) for _ in range(3)]==3*[300000]
        with pytest.raises(pynvml.NVMLError_GpuIsLost): pynvml.nvmlDeviceGetPowerUsage(a)
        with pytest.raises(pynvml.NVMLError_GpuIsLost): pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetPowerUsage(b)==300000

def test_one_query_hangs():
    with FakeNVML([FakeGPU(slow=dict(nvmlDeviceGetPowerUsage=.3)), FakeGPU()], slow=dict(nvmlDeviceGetTemperature=.2)).installed():
        pynvml.nvmlInit()
        took = []
        for i,ask in ((0, pynvml.nvmlDeviceGetPowerUsage), (1, pynvml.nvmlDeviceGetPowerUsage), (1, lambda h: pynvml.nvmlDeviceGetTemperature(h, 0)),
                      (0, pynvml.nvmlDeviceGetUUID)):
            handle, start_s = pynvml.nvmlDeviceGetHandleByIndex(i), time.monotonic()
            ask(handle)
            took.append(time.monotonic()-start_s)
    assert took[0]>=.3 and took[2]>=.2 and took[1]<.2 and took[3]<.2

def test_energy_ticks():
    now = [0.]
    with FakeNVML([FakeGPU(power_w=200, energy_j=1000)], clock=lambda: now[0]).installed():
        pynvml.nvmlInit()
        h, seen = pynvml.nvmlDeviceGetHandleByIndex(0), []
        for now[0] in (.05, .1, .19, .55): seen.append(pynvml.nvmlDeviceGetTotalEnergyConsumption(h))
    assert seen==[1000000, 1020000, 1020000, 1100000]

def test_mig():
    part = FakeMig(memory_used_mib=123)
    with FakeNVML([FakeGPU(mig=[part])]).installed():
        pynvml.nvmlInit()
        h, whole = pynvml.nvmlDeviceGetHandleByUUID(part.uuid), pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetMemoryInfo(h).used==123*2**20 and pynvml.nvmlDeviceGetMigMode(whole)==[1, 1]
        for o in (h, whole):
            with pytest.raises(pynvml.NVMLError_NotSupported): pynvml.nvmlDeviceGetUtilizationRates(o)

CHILD = """import pynvml
try:
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    print(pynvml.nvmlDeviceGetName(gpu), pynvml.nvmlDeviceGetTemperature(gpu, 0))
except pynvml.NVMLError as e: print(e)
"""

def child(**env): return subprocess.run([sys.executable, '-c', CHILD], env=os.environ | env, capture_output=True, text=True).stdout.strip()

def test_another_process():
    fake, broken = FakeNVML([FakeGPU(name='NVIDIA T4', temperature_c=44)]), FakeNVML(init_error=LIB_RM_VERSION_MISMATCH)
    assert child(**fake.child_env())=='NVIDIA T4 44'
    assert child(**broken.child_env())=='RM has detected an NVML/RM version mismatch.'
    with FakeNVML([FakeGPU(name='NVIDIA A100')]).installed(): assert child()=='NVIDIA A100 55'

def test_all_is_as_before():
    before = pynvml.nvmlLib, pynvml.CDLL, dict(os.environ)
    with FakeNVML([FakeGPU()]).installed():
        pynvml.nvmlInit()
        assert pynvml.nvmlLib is not None
    assert (pynvml.nvmlLib, pynvml.CDLL, dict(os.environ))==before
    assert GPU_IS_LOST==pynvml.NVML_ERROR_GPU_IS_LOST
