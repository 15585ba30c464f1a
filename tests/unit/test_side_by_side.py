"A sweep on several GPUs of one host: what each job sees, and what becomes of one that is interrupted or refused"
import _thread
import os
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip('submitit', reason='submitit is not installed: pip install submitit')
has_cpus = hasattr(os, 'sched_getaffinity') and len(os.sched_getaffinity(0))>1
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_cpus, reason='needs Linux and two CPUs')]
import fake_gpus
from fake_gpus import witness
from gpubench import read_records, sweep
from gpubench.run.process import device_locks


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    "Two GPUs here and in jobs; a folder for the notes of `witness`"
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    monkeypatch.setenv(fake_gpus.COUNT, '2')
    monkeypatch.setenv('GPUBENCH_LOCKS', str(tmp_path/'locks'))
    fake_gpus.fake(monkeypatch.setattr)
    (tmp_path/'notes').mkdir()
    return tmp_path/'notes'


def go(out, notes, repeats=3, **kwargs):
    points = [dict(x=x, folder=str(notes), device='cuda', **kwargs) for x in (1, 2)]
    return sweep(points, repeats, out, run=witness, twin=None, isolate=False, progress=False, on='gpus')


def test_each_gpu_makes_whole_rounds_on_its_own_cpus_at_the_same_time(two_gpus, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, 'benchmark', True)
    df = go(tmp_path/'run', two_gpus, n_beside=2)
    assert (df.status.tolist(), len(df)) == (['ok']*6, 6)
    assert sorted(zip(df['round'], df.x))==[(r, x) for r in range(3) for x in (1, 2)]
    assert df.groupby('round').gpu_seen.agg(lambda o: ','.join({*o})).tolist()==['0', '1', '0']
    first, second = ({*map(tuple, o.cpus)} for _,o in df.groupby('gpu_seen'))
    assert len(first)==len(second)==1 and not {*first.pop()} & {*second.pop()}
    assert df.sweep_id.nunique()==1 and df.cudnn_benchmark.all()                     # torch's switches are this process's
    assert {*df.n_gpus}=={1} and df.machine.nunique()==1       # not pooled with visits that have both GPUs
    pids = [o.name.split('_')[1] for o in sorted(two_gpus.iterdir())]
    assert len({*pids[:2]})==2                                 # neither GPU's first visit waited for the other's end
    assert len(go(tmp_path/'run', two_gpus, n_beside=2))==6 and len([*two_gpus.iterdir()])==6       # nothing is left


def test_an_interrupted_sweep_ends_its_jobs_and_goes_on(two_gpus, tmp_path):
    stay = tmp_path/'stay'
    stay.touch()
    def interrupt():
        while len([*two_gpus.iterdir()])<2: time.sleep(.05)
        _thread.interrupt_main()
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt): go(tmp_path/'run', two_gpus, 2, stay=str(stay))
    for o in two_gpus.iterdir(): assert not Path('/proc', o.name.split('_')[1]).exists()
    stay.unlink()
    df = go(tmp_path/'run', two_gpus, 2, stay=str(stay))
    assert sorted(zip(df['round'], df.x, df.status))==[(r, x, 'ok') for r in range(2) for x in (1, 2)]
    assert len(read_records(tmp_path/'run'))==4


def test_a_busy_gpu_is_refused_and_the_other_goes_on(two_gpus, tmp_path):
    with device_locks(['cuda:1']), pytest.raises(RuntimeError, match='2 of 4 visits are missing.*Another measurement.*same call again'):
        go(tmp_path/'run', two_gpus, 2)
    assert [*read_records(tmp_path/'run').gpu_seen]==['0', '0']
