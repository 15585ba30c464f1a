# %% Stages are told from the slowest
ms = [67.108864/10, 67.108864/50, .03]                           # 10 and 50 GB/s
copied = dict(copies=dict(way=['pageable', 'pinned', 'within the device'], mib=[64]*3, returns_ms=[4, 1, None], there_ms=ms))
found = stages(dict(loader_per_s=300., train_per_s=30_000., model='x', size=224), copied)
assert found.index[0]=='decoding in one process' and found.images_per_s.is_monotonic_increasing
assert found.images_per_s['copy, pageable, bytes']==round(10e9/150_528)
assert found.images_per_s['copy, pinned, float32']==round(50e9/150_528/4)
assert list(found.index).index('copy, pageable, float32')<list(found.index).index('training x')  # there the copy limits

# %% Two clocks: until the call returns, until the data is there
from replay import planted
now = iter(range(100))
with planted(perf_counter=lambda: next(now), wait_for=lambda d: next(now)): assert copy_ms(.01).tolist()==[1e3, 3e3]

# %% Copies within the device are timed without the first three
now = iter([0., 5., 15.])
with planted(on_gpu=False, perf_counter=lambda: next(now)): assert measure(.01)[-1]['there_ms']==1e3*10/5

# %% A link's memory counts twice, few bytes in microseconds, many in gigabytes per second
with planted(copy_ms=lambda mib, **ends: pd.Series(dict(there_ms=.02 if mib<1 else 5.))):
    assert link('host to GPU, pinned', pinned=True)==dict(link='host to GPU, pinned', us=20., gb_per_s=51.2)
    assert link('GPU memory')['gb_per_s']==102.4

# %% Links are named by what they go over, where the driver knows it
known = dict(pcie_lanes=16, nvlinks=18)
links = 'host to GPU, pinned', 'GPU to host, pageable', 'GPU to GPU', 'GPU memory', 'all-reduce of 4 GPUs'
assert [named(o, known) for o in links]==['PCIe, host to GPU, pinned', 'PCIe, GPU to host, pageable', 'NVLink, GPU to GPU', *links[3:]]
assert [named(o, dict(pcie_lanes=16, nvlinks=0)) for o in links[1:3]]==['PCIe, GPU to host, pageable', 'GPU to GPU']
assert [named(o, {}) for o in links]==[*links]

# %% What joins a GPU comes from its driver; without one, nothing is known
import sys
from types import SimpleNamespace
from unittest.mock import patch
def state(gpu, i): return [1, 0][i]                              # a link that works, one that doesn't, and no more
nvml = dict(nvmlInit=lambda: None, nvmlDeviceGetHandleByIndex=lambda i: 'gpu', nvmlDeviceGetMaxPcieLinkWidth=lambda gpu: 8, nvmlDeviceGetNvLinkState=state)
with patch.dict(sys.modules, pynvml=SimpleNamespace(**nvml)): assert bus()==dict(pcie_lanes=8, nvlinks=1)
with patch.dict(sys.modules, pynvml=None): assert bus()==dict(pcie_lanes=None, nvlinks=0)
