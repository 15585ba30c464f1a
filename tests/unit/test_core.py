"What only a GPU or a small quota shows, with stand-ins for both"
from types import SimpleNamespace

import psutil
import pytest
import torch

from gpubench.ground import core
from gpubench.watch.timing import DeviceMarks


def fake_gpus(monkeypatch, n=2):
    "A torch that believes in `n` GPUs; the calls that it gets"
    calls = []
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: n)
    for name in 'synchronize empty_cache reset_peak_memory_stats'.split():
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: calls.append((name, *args)))
    return calls

def test_waiting_waits_for_that_gpu(monkeypatch):
    calls = fake_gpus(monkeypatch)
    for o in ('cpu', 'cuda:1', torch.device('cuda:0'), None): core.wait_for(o)
    assert calls==[('synchronize', torch.device(o)) for o in ('cuda:1', 'cuda:0', 'cuda')]

def test_freeing_memory_starts_the_peaks_anew_on_each_gpu(monkeypatch):
    calls = fake_gpus(monkeypatch)
    core.free_memory()
    assert calls==[('empty_cache',), ('reset_peak_memory_stats', 0), ('reset_peak_memory_stats', 1)]

def test_a_gpus_marks_are_waited_for(monkeypatch):
    "Else times would be read of events that the GPU has not passed"
    calls = fake_gpus(monkeypatch)
    marks = DeviceMarks.__new__(DeviceMarks)
    marks.device = torch.device('cuda:1')
    marks.wait()
    assert calls==[('synchronize', torch.device('cuda:1'))]

def test_part_of_a_core_counts_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(core.os, 'sched_getaffinity', lambda pid: set(range(8)), raising=False)
    (tmp_path/'sys/fs/cgroup').mkdir(parents=True)
    for quota, n in (('250000 100000', 3), ('50000 100000', 1), ('1600000 100000', 8), ('max 100000', 8)):
        (tmp_path/'sys/fs/cgroup/cpu.max').write_text(quota)
        assert core.n_cores(tmp_path)==n


def write_groups(root, files):
    for k,text in files.items():
        (root/k).parent.mkdir(parents=True, exist_ok=True)
        (root/k).write_text(text)
    return root

@pytest.mark.parametrize('files, cores', [
    ({'proc/self/cgroup': '0::/user.slice/job\n', 'sys/fs/cgroup/user.slice/job/cpu.max': 'max 100000\n',
      'sys/fs/cgroup/user.slice/cpu.max': '50000 100000\n'}, .5),
    ({'proc/self/cgroup': '5:cpu,cpuacct:/slurm/job_7\n1:name=systemd:/\n', 'sys/fs/cgroup/cpu/slurm/job_7/cpu.cfs_quota_us': '200000',
      'sys/fs/cgroup/cpu/slurm/job_7/cpu.cfs_period_us': '100000'}, 2.),
    ({'proc/self/cgroup': '4:cpu:/docker/abc\n0::/docker/abc\n', 'sys/fs/cgroup/cpu/cpu.cfs_quota_us': '150000',
      'sys/fs/cgroup/cpu/cpu.cfs_period_us': '100000'}, 1.5),
    ({'proc/self/cgroup': '0::/../../other\n', 'sys/fs/cgroup/cpu.max': '250000 100000'}, 2.5),
    ({'proc/self/cgroup': '0::/mine\n', 'sys/fs/cgroup/other/cpu.max': '100000 100000'}, None),
    ({'proc/self/cgroup': 'nonsense', 'sys/fs/cgroup/cpu.max': '0 0'}, None)])
def test_the_strictest_quota_of_all_groups_counts(tmp_path, files, cores):
    assert core.cpu_quota(write_groups(tmp_path, files))==cores

GIB = 2**30

@pytest.mark.parametrize('files, total, available', [
    ({'proc/self/cgroup': '0::/\n', 'sys/fs/cgroup/memory.max': 'max'}, 64, 50),
    ({'proc/self/cgroup': '0::/hub/ann\n', 'sys/fs/cgroup/hub/ann/memory.max': f'{4*GIB}', 'sys/fs/cgroup/hub/memory.max': f'{8*GIB}',
      'sys/fs/cgroup/hub/memory.current': f'{7*GIB}'}, 4, 1),                         # neighbors leave less than the own limit
    ({'proc/self/cgroup': '0::/ann\n', 'sys/fs/cgroup/ann/memory.max': f'{2*GIB}', 'sys/fs/cgroup/ann/memory.current': f'{2*GIB}',
      'sys/fs/cgroup/ann/memory.stat': f'inactive_file {GIB}\nactive_file 7\n'}, 2, 1),
    ({'proc/self/cgroup': '7:memory:/slurm/job\n', 'sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes': str(3*GIB),
      'sys/fs/cgroup/memory/slurm/job/memory.usage_in_bytes': str(2*GIB), 'sys/fs/cgroup/memory/memory.limit_in_bytes': str(2**63-4096)}, 3, 1),
    ({'proc/self/cgroup': '0::/ann\n', 'sys/fs/cgroup/ann/memory.max': f'{90*GIB}'}, 64, 50)])
def test_memory_is_what_all_groups_allow(tmp_path, monkeypatch, files, total, available):
    monkeypatch.setattr(psutil, 'virtual_memory', lambda: SimpleNamespace(total=64*GIB, available=50*GIB))
    assert core.memory_bytes(write_groups(tmp_path, files))==(total*GIB, available*GIB)
