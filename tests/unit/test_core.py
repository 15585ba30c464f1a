"What only a GPU or a small quota shows, with stand-ins for both"
import torch

from gpubench import core
from gpubench.timing import DeviceMarks


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
