"""What goes wrong while a sweep runs, done on purpose. No fault may end the other visits or lose a finished record"""
import gc, os, signal, subprocess, sys, time, warnings, weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gpubench.ground.record import read_records
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
    df = here(dict(model='deep.nett:make', device='cpu', dataset='digits', size=8))
    assert df.error.item()=="KeyError: 'x' (deep/nett.py:4)"

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

def test_a_cut_in_the_last_two_lines(tmp_path):
    "As a power cut may leave it"
    file = tmp_path/'records.jsonl'
    here(dict(x=[1, 2, 3, 4]), run=same, out=tmp_path, seed=3)
    whole = file.read_bytes()
    ends = [i+1 for i,o in enumerate(whole) if o==10]
    order = read_records(file).x.tolist()
    for cut in [*range(ends[-3], len(whole), 150), *(o-k for o in ends[-2:] for k in (0, 1, 2))]:
        file.write_bytes(whole[:cut])
        n = sum(cut>=o-1 for o in ends)                                      # a record whose line end alone is missing is whole
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            assert read_records(file).x.tolist()==order[:n], cut
            df = here(dict(x=[1, 2, 3, 4]), run=same, out=tmp_path, seed=3)
        assert sorted(df.x)==sorted(read_records(file).x)==[1, 2, 3, 4], cut

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
def test_workers_outlive_the_events_of_timers_that_are_gone():
    "A worker is a fork without CUDA: one that frees an event of this process dies"
    def fit(device, **kwargs):
        learn = make_learner(resolve(Trial(device=device, max_images=300, bs=16, **kwargs)))
        with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=[StepTimerCallback(), MonitorCallback(interval_s=.2)])
    for _ in range(3):
        fit('cuda')                                        # leaves a Learner to the garbage collector
        fit('cuda', loader='files', n_workers=4)
        fit('cpu', loader='files', n_workers=4)
