"""What goes wrong while a sweep runs, done on purpose. No fault may end the other visits or lose a finished record"""
import gc, json, os, re, shutil, signal, subprocess, sys, threading, time, warnings, weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gpubench.run import sweep as library
from gpubench.ground.record import append_record, read_records
from gpubench.watch.monitor import MonitorCallback
from gpubench.run.process import device_locks
from gpubench.run.sweep import sweep
from gpubench.watch.timing import StepTimerCallback
from gpubench.run.trial import Trial, make_learner, resolve

from helpers import root

linux = pytest.mark.skipif(sys.platform!='linux', reason='processes are looked up in /proc, and file systems mounted')


# ---- tools

def quiet(*args, **kwargs): return sweep(*args, **dict(progress=False, repeats=1, twin=None) | kwargs)
def here(*args, **kwargs): return quiet(*args, **dict(isolate=False) | kwargs)
def by(df, name): return dict(zip(df[name], df.status))
def same(x): return dict(y=x)

def running(pid):
    "Is there such a process, and does it still do anything?"
    try: return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] not in 'ZX'
    except OSError: return False

def soon(true, timeout_s=30):
    "Wait until `true()`"
    end = time.monotonic()+timeout_s
    while not true():
        assert time.monotonic()<end, 'waited too long'
        time.sleep(.05)

def start_script(tmp_path, text, *args, name='script.py', **env):
    "A script of a user, with no main guard, in a group of its own as a terminal gives it"
    (tmp_path/name).write_text(text)
    env = os.environ | dict(PYTHONPATH=str(root), OMP_NUM_THREADS='1') | env
    return subprocess.Popen([sys.executable, name, *map(str, args)], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, start_new_session=True)

def wait_for_end(p, timeout_s=90):
    try: return p.communicate(timeout=timeout_s)
    finally: p.kill()


# ---- memory

class Held: "Stands for a tensor that fills the GPU"

def test_out_of_memory_frees_what_the_visit_held():
    "In this process too: the traceback must not keep the frames"
    held = []
    def run(bs):
        big = Held()
        big.me = big                                         # as a Learner and its callbacks hold each other
        held.append(weakref.ref(big))
        raise torch.OutOfMemoryError('CUDA out of memory')
    gc.disable()                                         # nothing but the sweep itself may tidy up
    try: status, left = here(dict(bs=8), run=run).status.tolist(), [o() for o in held]
    finally: gc.enable()
    assert (status, left)==(['oom'], [None])


# ---- visits that end badly

@pytest.mark.slow
def test_whatever_a_rank_raises_keeps_its_text():
    from gpubench import launch
    def work(device, error): raise error
    with pytest.raises(RuntimeError, match='KeyboardInterrupt: its own words'): launch(work, KeyboardInterrupt('its own words'), n_devices=1)

def ends_badly(how):
    if how=='killed': os.kill(os.getpid(), signal.SIGKILL)
    if how=='raises': raise KeyError('x')
    return dict(y=float('nan'))

def test_a_bad_end_is_a_record_and_the_sweep_goes_on(tmp_path):
    "The notebook of `process` has more of them"
    df = quiet(dict(how='killed raises nan'.split()), run=ends_badly, out=tmp_path)
    assert by(df, 'how')==dict(killed='killed', raises='error', nan='ok')
    error = dict(zip(df.how, df.error))
    assert 'SIGKILL' in error['killed'] and 'dmesg' in error['killed']
    assert re.fullmatch(r"KeyError: 'x' \(.*test_faults.py:\d+\)", error['raises'])
    assert df[df.how=='nan'].y.isna().all()
    kept = read_records(tmp_path)
    assert by(kept, 'how')==by(df, 'how') and kept.visit_s.gt(0).all()

def hangs(x, folder):
    if x!=2: return dict(y=x)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])
    Path(folder, 'pids').write_text(f'{os.getpid()} {worker.pid}')
    time.sleep(300)

@pytest.mark.slow
@linux
def test_a_hang_is_ended_with_all_it_started(tmp_path):
    quiet(dict(x=1, folder=str(tmp_path)), run=hangs)                          # the server is loaded from here on
    df = quiet(dict(x=[1, 2, 3], folder=str(tmp_path)), run=hangs, timeout_s=10)
    assert by(df, 'x')=={1: 'ok', 2: 'timeout', 3: 'ok'}
    pids = (tmp_path/'pids').read_text().split()
    assert len(pids)==2
    soon(lambda: not any(map(running, pids)))

@pytest.mark.slow
def test_nan_loss():
    df = quiet(dict(device='cpu', lr=[1e-3, 1e25], max_images=300))
    assert dict(zip(df.lr, df.status))=={1e-3: 'ok', 1e25: 'error'}
    assert 'smaller learning rate' in df[df.lr>1].error.item()

def test_what_cannot_run_is_a_record_beside_what_can(monkeypatch):
    with pytest.raises(ValueError, match='fp16'): quiet(dict(device='cpu', precision='fp16'))
    asked = [Trial(device='cpu', precision='fp16'), Trial(device='cpu', bs=32, max_images=300)]
    assert by(here(asked, half_width=.9, max_s=0., whole_epoch=False), 'bs')=={64: 'skipped', 32: 'ok'}


# ---- workers

class Deadly(torch.utils.data.Dataset):
    "The worker that fetches image 5 is killed"
    def __len__(self): return 8
    def __getitem__(self, i):
        if i==5: os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(4)

def with_worker(bs):
    for _ in torch.utils.data.DataLoader(Deadly(), batch_size=bs, num_workers=1): pass
    return {}

@pytest.mark.slow
def test_a_worker_dies():
    df = quiet(dict(bs=2), run=with_worker)
    assert df.status.tolist()==['error']
    assert 'n_workers=0' in df.error[0] and 'dmesg' in df.error[0] and 'Traceback' not in df.error[0]

@pytest.mark.slow
def test_a_truncated_image_is_one_sentence(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(40):
        path = tmp_path/'cats dogs'.split()[i%2]/f'{i}.jpg'
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path)
    for o in tmp_path.rglob('1?.jpg'): o.write_bytes(o.read_bytes()[:-300])
    df = quiet(dict(dataset=str(tmp_path), device='cpu', bs=8, loader=['memory', 'resident'], size=32))
    assert set(df.status)<={'error', 'skipped'} and df.status.nunique()==1
    assert df.error.str.contains('cannot be decoded').all(), df.error.tolist()
    assert not df.error.str.contains('Traceback|File "').any() and (df.error.str.count('\n')==0).all()


# ---- Ctrl-C

SCRIPT = '''
import os, sys, time
from pathlib import Path
from gpubench.run import process
from gpubench.run.sweep import sweep
if len(sys.argv)>3: process.START_METHOD = sys.argv[3]
here, plan = Path(sys.argv[1]), [1, 2, 3]
with open(here/'started', 'a') as f: f.write('x')        # once a process that runs this script
class Mine: pass                                           # known in this script only
def slow(x, device):
    assert Mine() and 'PROBE' in os.environ
    (here/f'pid{x}').write_text(str(os.getpid()))
    if not (here/'go').exists(): time.sleep(300 if x==plan[-1] else 0)
    return dict(y=x)
print(sweep([dict(x=x, device='toy') for x in plan], repeats=1, twin=None, out=here/'out', run=slow, progress=False,
            seed=int(sys.argv[2])).y.tolist())
'''

@pytest.mark.slow
@linux
def test_ctrl_c_in_a_visit_and_the_same_call_again(tmp_path):
    p = start_script(tmp_path, SCRIPT, tmp_path, 0, PROBE='1')
    soon(lambda: (tmp_path/'pid3').exists() and (tmp_path/'pid3').read_text(), 90)
    pid, n = (tmp_path/'pid3').read_text(), len((tmp_path/'out'/'records.jsonl').read_text().splitlines()) if (tmp_path/'out'/'records.jsonl').exists() else 0
    assert running(pid)
    with pytest.raises(RuntimeError, match='Another measurement is running on toy'):    # two at once
        here(dict(x=1, device='toy'), run=lambda x, device: {})
    os.killpg(p.pid, signal.SIGINT)                                          # as the terminal does: the whole group
    out, err = wait_for_end(p)
    assert p.returncode!=0 and 'KeyboardInterrupt' in err
    soon(lambda: not running(pid), 10)
    assert (tmp_path/'started').read_text()=='x'                             # the script ran once, without a main guard
    with device_locks(['toy']): pass                                         # and its lock is free
    (tmp_path/'go').touch()
    p = start_script(tmp_path, SCRIPT, tmp_path, 0, PROBE='1')
    out, err = wait_for_end(p)
    assert p.returncode==0, err
    assert f'{n} of 3 visits' in out if n else 'visits are in' not in out
    df = read_records(tmp_path/'out')
    assert sorted(df.x)==[1, 2, 3] and set(df.status)=={'ok'}

@pytest.mark.parametrize('isolate', [True, False])
def test_ctrl_c_keeps_what_was_recorded(isolate, tmp_path):
    def press(x):
        if x==3 and not (tmp_path/'pressed').exists():
            (tmp_path/'pressed').touch()
            os.kill(parent, signal.SIGINT)
            time.sleep(30)
        return dict(y=x)
    parent, plan = os.getpid(), dict(x=[1, 2, 3])
    with pytest.raises(KeyboardInterrupt): quiet(plan, run=press, isolate=isolate, out=tmp_path)
    assert sorted(quiet(plan, run=press, isolate=isolate, out=tmp_path).x)==sorted(read_records(tmp_path).x)==[1, 2, 3]


# ---- the sweeping process dies

@pytest.mark.slow
@linux
def test_kill_9_leaves_no_visit_and_no_lock(tmp_path):
    p = start_script(tmp_path, SCRIPT.replace('[1, 2, 3]', '[3]'),
                     tmp_path, 0, 'spawn', PROBE='1')
    soon(lambda: (tmp_path/'pid3').exists() and (tmp_path/'pid3').read_text(), 120)
    pid = (tmp_path/'pid3').read_text()
    assert running(pid)
    p.kill()
    p.communicate()
    soon(lambda: not running(pid), 10)
    assert (tmp_path/'started').read_text()=='x'                             # nor does spawn run the script again
    assert here(dict(x=1, device='toy'), run=lambda x, device: {}).status.tolist()==['ok']

def test_the_lock_is_free_after_an_error(monkeypatch):
    monkeypatch.setattr(library, 'Records', lambda *args, **kwargs: 1/0)
    with pytest.raises(ZeroDivisionError): here(dict(x=1), run=same)
    with device_locks(['cpu']): pass


@pytest.mark.slow
@linux
def test_ctrl_c_while_the_server_loads(tmp_path):
    p = start_script(tmp_path, 'import sys\nfrom gpubench.run.sweep import sweep\nprint("now", flush=True)\n'
                     'sweep(dict(x=1), run=lambda x: {}, progress=False, twin=None)')
    assert p.stdout.readline()=='now\n'
    time.sleep(1.5)                                      # of the nine seconds or so that it takes
    os.killpg(p.pid, signal.SIGINT)
    out, err = wait_for_end(p)
    assert 'KeyboardInterrupt' in err and 'forkserver' not in err.rpartition('KeyboardInterrupt')[2], err


@linux
def test_a_lock_that_cannot_be_made_is_one_sentence(monkeypatch):
    monkeypatch.setenv('GPUBENCH_LOCKS', '/proc/none')
    with pytest.raises(RuntimeError, match='Set GPUBENCH_LOCKS'), device_locks(['toy']): pass


# ---- the user's own code

@pytest.mark.slow
def test_an_error_in_a_users_network_names_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('deep').mkdir()
    Path('deep/nett.py').write_text('import torch\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n'
                                    '        if len(x)>2: raise KeyError("x")\n        return super().forward(x.flatten(1))\n'
                                    'def make(n_classes, n_in): return Net(64*n_in, n_classes)\n')
    for isolate in (True, False):
        df = quiet(dict(model='deep.nett:make', device='cpu', dataset='digits', size=8), isolate=isolate)
        assert df.error.item()=="KeyError: 'x' (deep/nett.py:4)"

def test_a_module_that_cannot_be_imported_stops_the_sweep_at_its_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('torn.py').write_text('x = 1\nraise RuntimeError("no luck")')
    with pytest.raises(ValueError, match=r"no luck.*torn.py:2"): quiet(dict(model='torn:net', device='cpu', bs=[16, 32]), out='runs')
    assert not Path('runs').exists()

@pytest.mark.slow
@linux
def test_a_users_file_named_as_a_module_of_python(tmp_path):
    for o in ('random', 'queue', 'signal'): (tmp_path/f'{o}.py').write_text('raise RuntimeError("a game of dice")')
    text = ('import sys\nsys.path.remove("")\nfrom gpubench.run import process\nfrom gpubench.run.sweep import sweep\n'
            'process.START_METHOD = sys.argv[1]\nprint(sweep(dict(x=1), run=lambda x: {}, repeats=1, progress=False).status.tolist())')
    for how in ('forkserver', 'spawn'):
        p = subprocess.run([sys.executable, '-c', text, how], cwd=tmp_path, env=os.environ | dict(PYTHONPATH=str(root)), capture_output=True, text=True)
        assert p.stdout=="['ok']\n", p.stderr

@pytest.mark.slow
def test_a_torch_that_is_broken(tmp_path):
    (tmp_path/'torch').mkdir()
    (tmp_path/'torch'/'__init__.py').write_text('raise ImportError("libcudart.so.12: cannot open shared object file")')
    p = subprocess.run([sys.executable, '-c', 'import gpubench.run.sweep'], env=os.environ | dict(PYTHONPATH=f'{tmp_path}{os.pathsep}{root}'),
                       capture_output=True, text=True)
    assert p.stderr.splitlines()[-1].startswith('ImportError: torch cannot be loaded (libcudart.so.12') and 'gpubench doctor' in p.stderr


# ---- the disk

def test_a_cut_at_every_byte_of_the_last_two_lines(tmp_path):
    "As a power cut may leave it"
    file = tmp_path/'records.jsonl'
    here(dict(x=[1, 2, 3, 4]), run=same, out=tmp_path, seed=3)
    whole = file.read_bytes()
    ends = [i+1 for i,o in enumerate(whole) if o==10]
    order = read_records(file).x.tolist()
    cuts = range(ends[-3], len(whole))
    assert len(cuts)>500
    for cut in cuts:
        file.write_bytes(whole[:cut])
        n = sum(cut>=o-1 for o in ends)                                      # a record whose line end alone is missing is whole
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            assert read_records(file).x.tolist()==order[:n], cut
        assert bool(said)==(cut not in ends and cut+1 not in ends), cut
    for cut in [*cuts[::150], *(o-k for o in ends[-2:] for k in (0, 1, 2))]:
        file.write_bytes(whole[:cut])
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            df = here(dict(x=[1, 2, 3, 4]), run=same, out=tmp_path, seed=3)
        assert sorted(df.x)==sorted(read_records(file).x)==[1, 2, 3, 4], cut

def test_lines_that_are_no_records_are_left_out(tmp_path):
    here(dict(x=[1, 2, 3]), run=same, out=tmp_path)
    file = tmp_path/'records.jsonl'
    first, *others = file.read_text().splitlines()
    file.write_text('\n'.join([*others, '17', '[1, 2]', 'null', '"text"', '{"a": nan', '\0'*50])+'\n')
    with pytest.warns(UserWarning): df = here(dict(x=[1, 2, 3]), run=same, out=tmp_path)
    assert sorted(df.x)==[1, 2, 3] and set(df.status)=={'ok'}

@pytest.mark.parametrize('schema,says', [(4, 'Use the gpubench that wrote them'), (2, 'Use the gpubench that wrote them'), (None, 'schema null'), (True, 'schema true')])
def test_another_schema_is_refused_before_anything_runs(tmp_path, schema, says):
    (tmp_path/'records.jsonl').write_text(json.dumps(dict(schema=schema, trial_id='a', machine='b', visit=0, status='ok'))+'\n')
    with pytest.raises(RuntimeError, match=says): here(dict(x=1), run=lambda x: pytest.fail('it ran'), out=tmp_path)

def test_records_that_ship_can_be_read():
    found = [*(root/'nbs'/'labs'/'records').glob('*.jsonl'), *(root/'benchmarks'/'results').rglob('records.jsonl')]
    assert len(found)>=3 and all(len(read_records(o)) for o in found)

def test_two_writers_do_not_tear_each_other(tmp_path):
    "One of them sets torn lines aside again and again meanwhile"
    file, n = tmp_path/'records.jsonl', 60
    def write(who):
        for i in range(n): append_record(file, dict(who=who, i=i))
    writers = [threading.Thread(target=write, args=[o]) for o in 'ab']
    for o in writers: o.start()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        while any(o.is_alive() for o in writers):
            if file.exists():
                with open(file, 'ab') as f: f.write(b'\n{"torn\n')
                read_records(file)
        df = read_records(file)
    assert sorted(zip(df.who, df.i))==sorted((o, i) for o in 'ab' for i in range(n))

def unshare():
    "The command that gives a process mounts of its own; skips where that is not allowed"
    for o in (['unshare', '-m'], ['unshare', '-rm']):
        if shutil.which('unshare') and not subprocess.run([*o, 'mount', '-t', 'tmpfs', 'tmpfs', '/mnt'], capture_output=True).returncode: return o
    pytest.skip('this machine lets us mount nothing, not even in a namespace of our own')

MOUNTS = '''
import json, os, re, subprocess, sys
from pathlib import Path
disk = Path(sys.argv[1])/'disk'
disk.mkdir()
def mount(*args): subprocess.run(['mount', *map(str, args)], check=True)
mount('-t', 'tmpfs', '-o', 'size=64k', 'tmpfs', disk)
from gpubench.ground.record import append_record, read_records
from gpubench.show.report import report
from gpubench.run.sweep import sweep
ran, said = [], {}
def run(x):
    ran.append(x)
    if len(ran)==3 and not (disk/'filler').exists():
        with open(disk/'filler', 'wb', buffering=0) as f:
            try:
                while True: f.write(bytes(512))
            except OSError: pass
    return dict(y='y'*5000)
def once(x=[1, 2, 3, 4]): return sweep(dict(x=x), repeats=1, twin=None, out=disk/'runs', run=run, progress=False, isolate=False)
def refused(key, f=once):
    try: f(); said[key] = 'no error'
    except (RuntimeError, OSError) as e: said[key] = f'{type(e).__name__}: {e}'
refused('full')
said['whole'] = [len(o) for o in read_records(disk/'runs').y]
refused('still full')
refused('report', lambda: report(disk/'runs'))
said['ran'] = len(ran)
(disk/'filler').unlink()
df = once()
said['after'] = sorted(df.x.tolist()), len(read_records(disk/'runs')), len(ran)
mount('-o', 'remount,ro', disk)
refused('read-only', lambda: once([5]))
said['readable'] = len(read_records(disk/'runs'))
said['ran at last'] = len(ran)
mount('-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', '/dev/shm')
def images(n_workers):
    import torch
    for o in torch.utils.data.DataLoader(torch.zeros(64, 3, 128, 128), batch_size=32, num_workers=n_workers): pass
    return {}
df = sweep(dict(n_workers=[0, 1]), repeats=1, twin=None, run=images, progress=False)
said['shm'] = dict(zip(map(str, df.n_workers), zip(df.status, df.error)))
print(json.dumps(said))
'''

@pytest.mark.slow
@linux
def test_full_disk_read_only_folder_and_little_shared_memory(tmp_path):
    command = unshare()
    (tmp_path/'mounts.py').write_text(MOUNTS)
    env = os.environ | dict(PYTHONPATH=str(root), OMP_NUM_THREADS='1', TMPDIR=str(tmp_path))
    p = subprocess.run([*command, sys.executable, 'mounts.py', str(tmp_path)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert p.returncode==0, p.stderr
    said = json.loads(p.stdout.splitlines()[-1])
    assert said['full'].startswith('StateError') and 'No space left' in said['full'] and 'the same sweep again' in said['full']
    assert said['whole']==[5000, 5000]                                         # the torn line is skipped
    assert all('No space left on device' in said[o] for o in ('full', 'still full', 'report'))
    assert said['ran']==4 and said['after']==[[1, 2, 3, 4], 4, 6]              # the third ran again
    assert 'Read-only' in said['read-only'] and said['readable']==4 and said['ran at last']==6
    assert said['shm']['0'][0]=='ok' and said['shm']['1'][0] in ('error', 'killed')
    assert '--shm-size' in said['shm']['1'][1] and 'Traceback' not in said['shm']['1'][1]


# ---- a GPU

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')

def fills(gib, device):
    before = torch.cuda.is_initialized()
    x = torch.empty(int(gib*2**30), dtype=torch.uint8, device=device)
    return dict(n_bytes=x.numel(), started_before=before, n_gpus_seen=torch.cuda.device_count())

@gpu
@pytest.mark.parametrize('isolate', [True, False])
def test_out_of_memory_on_a_gpu(isolate):
    "More than the GPU has, between two visits that fit, in fresh processes and in this one"
    total = torch.cuda.get_device_properties(0).total_memory/2**30
    df = quiet(dict(gib=[.5, 2*total, .6*total], device='cuda'), run=fills, repeats=2, isolate=isolate)
    assert sorted(zip(df.gib, df.status))==sorted([(.5, 'ok'), (2*total, 'oom'), (.6*total, 'ok')]*2)
    assert 'out of memory' in df[df.status=='oom'].error.iloc[0]
    if isolate: assert not df[df.status=='ok'].started_before.any()            # the server never touched the GPU

@gpu
def test_out_of_memory_of_a_trial():
    df = quiet(dict(dataset='synthetic', max_images=30_000, size=128, n_channels=3, model='resnet18', bs=[64, 20_000], device='cuda'))
    assert by(df, 'bs')=={64: 'ok', 20_000: 'oom'}

@gpu
def test_one_gpu_has_one_lock_whatever_it_is_called(monkeypatch):
    with device_locks(['cuda']):
        with pytest.raises(RuntimeError, match='Another measurement'), device_locks(['cuda:0']): pass
        with device_locks(['cpu']): pass

@gpu
def test_workers_outlive_the_events_of_timers_that_are_gone():
    "A worker is a fork without CUDA: one that frees an event of this process dies"
    def fit(device, **kwargs):
        learn = make_learner(resolve(Trial(device=device, max_images=300, bs=16, **kwargs)))
        with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=[StepTimerCallback(), MonitorCallback(interval_s=.2)])
    for _ in range(3):
        fit('cuda')                                        # leaves a Learner to the garbage collector
        fit('cuda', loader='files', n_workers=4)
        fit('cpu', loader='files', n_workers=4)
