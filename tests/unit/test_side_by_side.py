"A sweep on several GPUs of one host at once: which GPU and CPUs each visit had, when, and what of it is recorded"
import json, os, re, time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, 'sched_setaffinity') or len(os.sched_getaffinity(0))<2, reason='needs Linux and two CPUs')]
from fake_nvml import FakeGPU, FakeNVML
from gpubench.run.cluster import sweep_side_by_side
from gpubench.ground.record import record_rows


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    monkeypatch.setattr('torch.cuda.is_available', lambda: False)             # whatever this machine has
    for o in ('tests', 'tests/unit'): monkeypatch.syspath_prepend(str(Path(__file__).parent.parent.parent/o))
    with FakeNVML([FakeGPU(), FakeGPU()]).installed() as nvml: yield [o.uuid for o in nvml.gpus]


def witness(x, folder, device='cpu'):
    "Where and when this visit was. Side by side, x=1 and the first of the others in a round wait for each other, for a minute at most"
    folder, start, end = Path(folder), time.time(), time.monotonic()+60
    (folder/f"{'checked' if x==1 else 'other' if x!=9 else 'cpu'}_{time.time_ns()}").touch()
    def n(name): return len([*folder.glob(f'{name}_*')])
    n_checked, n_other = n('checked'), n('other')                              # x=1: alone, then with neighbors; others: two a round
    def met(): return n('other')>=n_checked-1 if x==1 and n_checked%2==0 else n('checked')>=2*((n_other+1)//2) if x in (0, 2) else True
    while not met() and time.monotonic()<end: time.sleep(.05)
    return dict(step_ms=1.+.01*x, visible=os.environ.get('CUDA_VISIBLE_DEVICES'), cpus=sorted(os.sched_getaffinity(0)),
                threads=os.environ.get('OMP_NUM_THREADS'), start=start, end=time.time())


def overlap(a, b): return a['start']<b['end'] and b['start']<a['end']


def test_each_gpu_has_its_process_its_cpus_and_neighbors(two_gpus, tmp_path, capsys):
    "Side by side but for the check, its trial on each GPU in turn; the CPU's trial last and alone"
    notes = tmp_path/'notes'
    notes.mkdir()
    trials = [dict(x=x, device='cuda', folder=str(notes)) for x in range(3)] + [dict(x=9, folder=str(notes))]
    def go(): return sweep_side_by_side(trials, tmp_path, 2, run=witness, isolate=False)
    df = go()
    assert len(df)==2*(3+1)+2 and set(df.status)=={'ok'}
    rows = df.to_dict('records')
    gpu = [o for o in rows if o['gpu_uuid']==o['gpu_uuid'] and o['gpu_uuid']]
    assert all(o['visible']==o['gpu_uuid'] for o in gpu) and {o['visible'] for o in gpu}=={*two_gpus}
    cpus = {g: {tuple(o['cpus']) for o in gpu if o['visible']==g} for g in two_gpus}
    (a,), (b,) = cpus.values()
    assert not {*a} & {*b} and len(a)==len(b) and {o['threads'] for o in gpu}=={str(len(a))}
    alone, beside = ([o for o in gpu if ('side_by_side' in o['measure'])==side] for side in (False, True))
    assert sorted(o['x'] for o in alone)==[1, 1] and {o['visible'] for o in alone}=={*two_gpus}
    assert sorted(o['x'] for o in beside)==[0, 0, 1, 1, 2, 2] and {o['measure']['side_by_side'] for o in beside}=={2}
    for o in beside: assert o['x']!=1 or any(overlap(o, other) for other in beside if other['visible']!=o['visible'])
    for o in beside: assert not any(overlap(o, other) for other in beside if other['visible']==o['visible'] and other is not o)
    for o in [*alone, *(o for o in rows if o['x']==9)]: assert not any(overlap(o, other) for other in rows if other is not o)
    check = json.loads((tmp_path/'side_by_side.json').read_text())
    assert (check['ratio'], check['n_alone'], check['n_beside']) == (1., 2, 2)
    assert 0<=check['busy_frac']<=1
    assert [o['gpu_uuid'] for o in check['slots']]==two_gpus
    said = capsys.readouterr().out
    assert 'With 1 neighbor, the checked trial took 1 (1 to 1, 95%) times as long as alone.' in said
    assert ('The interval includes 1' in said)==(check['busy_frac']>=.9)
    before = (tmp_path/'records.jsonl').read_bytes()
    go()                                                                       # nothing is left
    assert (tmp_path/'records.jsonl').read_bytes()==before and 'Round' not in capsys.readouterr().out


def test_a_dry_run_divides_the_time_among_the_gpus(two_gpus, tmp_path, capsys):
    def go(**kwargs): return sweep_side_by_side(dict(x=[0, 1, 2], device='cuda'), tmp_path, 2, run=quick, isolate=False, **kwargs)
    go(dry_run=True)
    assert '8 visits to go, up to 2 at once, as long as your function does' in capsys.readouterr().out and not [*tmp_path.iterdir()]
    go()
    for path in tmp_path.glob('jobs/*/*.jsonl'):
        rows = [o | dict(visit_s=600.) for o in record_rows(path)]
        path.write_text(''.join(json.dumps(o)+'\n' for o in rows))
        if path.name.startswith('round_2_on'): path.unlink()
    capsys.readouterr()
    go(dry_run=True)                                               # of 2 visits on one GPU and 1 on the other
    assert capsys.readouterr().out=='x=0\nx=1\nx=2\n3 visits to go, up to 2 at once, about 20 min, as long as the 5 earlier visits took.\n'
    go()
    capsys.readouterr()
    assert len(go(dry_run=True))==8 and capsys.readouterr().out=='Nothing is left to run.\n'


def quick(x, device): return dict(step_ms=1.)


def broken(x, device): raise RuntimeError('the driver is too old')


def test_no_visit_starts_once_the_first_failed_alike(two_gpus, tmp_path, capsys):
    df = sweep_side_by_side(dict(x=[*range(6)], device='cuda'), tmp_path, 2, run=broken, isolate=False)
    said = capsys.readouterr().out
    assert re.search('Stopped after [3-7] of 14 visits, which all failed with the same error: RuntimeError: the driver is too old', said)
    assert 3<=len(df)<=7 and {*df.status}=={'error'} and 'Round 2' not in said and not (tmp_path/'side_by_side.json').exists()


def test_refusals_in_words(tmp_path, two_gpus, monkeypatch):
    trials = dict(x=[1, 2], folder='', device='cuda')
    with pytest.raises(ValueError, match="device is 'cuda:1'.*Use 'cuda'"): sweep_side_by_side(dict(x=[1, 2], folder='', device='cuda:1'), tmp_path, run=witness)
    with pytest.raises(ValueError, match='two trials or more on a GPU.*here are 0'): sweep_side_by_side(dict(x=[1, 2], folder=''), tmp_path, run=witness)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', two_gpus[1])
    with pytest.raises(RuntimeError, match='two whole GPUs or more; here is 1. Sweep without it'): sweep_side_by_side(trials, tmp_path, run=witness)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    with pytest.raises(RuntimeError, match='here are 0'): sweep_side_by_side(trials, tmp_path, run=witness)


def test_no_driver_is_a_sentence(tmp_path):
    with FakeNVML(library=False).installed(), pytest.raises(RuntimeError, match='GPUs cannot be listed.*driver'):
        sweep_side_by_side(dict(x=[1, 2], folder='', device='cuda'), tmp_path, run=witness)
    assert not any(tmp_path.iterdir())


def test_a_busy_gpu_is_refused_and_the_other_stays_free(two_gpus, tmp_path):
    from gpubench.run.process import device_locks
    with device_locks([two_gpus[1]], 'runs/other'), pytest.raises(RuntimeError, match='already running on device .GPU-0+1'):
        sweep_side_by_side(dict(x=[1, 2], folder='', device='cuda'), tmp_path, run=witness)
    with device_locks([two_gpus[0]]): pass
    assert not (tmp_path/'records.jsonl').exists()
