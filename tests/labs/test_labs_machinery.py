"Labs are found, checked and executed; planted failures come out as what they are"
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_output

from gpubench.ground.record import append_record
from gpubench.ground.core import find_devices
from gpubench.course.lab_format import (
    ONE_DEVICE, check_parameters, check_values, find_labs, lab_parameters, pick_labs)
from gpubench.course.labs import copy_labs, earlier_run, prepare_run, run_folder, run_labs

from helpers import write_lab

@pytest.fixture
def labs(tmp_path): return tmp_path/'labs'


def run(labs, tmp_path, *names, **kwargs):
    os.environ.pop('PYTEST_CURRENT_TEST',
                   None)             # ipykernel treats its output in another way where it sees that
    return run_labs(names, tmp_path/'out', folder=labs, **kwargs)


def printed(path): return ''.join(o.text for c in nbformat.read(path, 4).cells if c.cell_type=='code'
                                  for o in c.outputs if o.output_type=='stream')


def leads_to(path):
    "The cell to which the first one of an executed notebook leads"
    cells = nbformat.read(path, 4).cells
    assert '#papermill-error-cell' in cells[0].source
    [i] = [i for i,o in enumerate(cells) if 'id="papermill-error-cell"' in o.source]
    return cells[i+1].source


# planted failures

@pytest.mark.slow
def test_a_failing_cell_is_told_and_stops_only_its_lab(labs, tmp_path):
    write_lab(labs, '01_bad', 'print("before")', 'raise KeyError("no such key")', 'print("after")')
    write_lab(labs, '02_good', 'print("fine")')
    bad, good = run(labs, tmp_path)
    assert (bad.status, good.status) == ('error', 'ok')
    # the fifth of the executed notebook: papermill adds one
    assert bad.error == 'cell 5 (`raise KeyError("no such key")`): KeyError: ' + repr('no such key')
    assert 'before' in printed(bad.notebook) and 'after' not in printed(bad.notebook)
    assert leads_to(bad.notebook)=='raise KeyError("no such key")'


# starts a process that only SIGKILL ends, and writes the kernel's and its number into a file
STUBBORN = """import os, subprocess, time
child = subprocess.Popen(["sh", "-c", "trap '' INT TERM HUP; echo; sleep 300"], stdout=subprocess.PIPE)
child.stdout.readline()                  # it ignores them by now
with open({!r}, "w") as f: f.write(f"{{os.getpid()}} {{child.pid}}")
os.rename({!r}, {!r})"""

def stubborn(path): return STUBBORN.format(f'{path}.new', f'{path}.new', str(path))


def alive(path):
    "Which of the processes in a file go on running; those that nobody waits for may be zombies, and a kill takes a moment"
    def runs(pid):
        try: return psutil.Process(pid).status()!=psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess: return False
    pids, until_s = [*map(int, path.read_text().split())], time.monotonic()+10
    while any(map(runs, pids)) and time.monotonic()<until_s: time.sleep(.05)
    return [o for o in pids if runs(o)]


@pytest.mark.slow
def test_a_dead_kernel_is_no_success(labs, tmp_path):
    "Nor does it leave a process behind"
    write_lab(labs, '01_dies', stubborn(tmp_path/'pids'), 'os._exit(9)', 'print("after")')
    write_lab(labs, '02_good', 'print("fine")')
    dead, good = run(labs, tmp_path)
    assert (dead.status, good.status) == ('died', 'ok')
    assert 'kernel died in cell 5' in dead.error
    assert 'stopped early: the kernel died in cell 5 (`os._exit(9)`)' in nbformat.read(dead.notebook, 4).cells[0].source
    if os.name!='nt': assert alive(tmp_path/'pids')==[]


@pytest.mark.slow
def test_a_cell_that_takes_too_long(labs, tmp_path):
    write_lab(labs, '01_slow', 'import time', 'time.sleep(300)', 'print("after")')
    write_lab(labs, '02_good', 'print("fine")')
    start = time.monotonic()
    slow, good = run(labs, tmp_path, timeout_s=3)
    assert (slow.status, good.status) == ('timeout', 'ok')
    assert 'cell 5 (`time.sleep(300)`) took longer than 3 s' in slow.error and '--timeout' in slow.error
    assert 'stopped early' in nbformat.read(slow.notebook, 4).cells[0].source
    assert time.monotonic()-start < 120


@pytest.mark.slow
def test_leaving_with_exit_code_0_is_no_success(labs, tmp_path):
    write_lab(labs, '01_leaves', 'import sys', 'sys.exit(0)', 'print("after")')
    [o] = run(labs, tmp_path)
    assert (o.status, 'sys.exit' in o.error) == ('error', True)


@pytest.mark.slow
def test_old_outputs_do_not_survive_a_failure(labs, tmp_path):
    path = write_lab(labs, '01_bad', '1/0', 'print("never")')
    nb = nbformat.read(path, 4)
    nb.cells[-1].outputs = [new_output('stream', text='committed long ago')]
    nbformat.write(nb, path)
    [o] = run(labs, tmp_path)
    assert o.status=='error' and 'committed long ago' not in o.notebook.read_text()


# going on

@pytest.mark.slow
def test_a_run_goes_on_with_what_failed(labs, tmp_path):
    "In the same folder, with the same code and parameters; whatever differs is executed again"
    notes, mended = tmp_path/'notes', tmp_path/'mended'
    note = f'with open({str(notes)!r}, "a") as f: f.write(f"{{name}}{{seed}} ")'
    write_lab(labs, '01_good', 'name = "good"', note)
    write_lab(labs, '02_bad', 'name = "bad"', note, f'open({str(mended)!r})')
    assert [o.status for o in run(labs, tmp_path)]==['ok', 'error']
    mended.touch()
    assert [(o.status, o.before) for o in run(labs, tmp_path)]==[('ok', True), ('ok', False)]
    assert [o.before for o in run(labs, tmp_path)]==[True, True]
    assert [o.before for o in run(labs, tmp_path, params={'02_bad.seed': 1})]==[True, False]
    assert notes.read_text().split()==['good0', 'bad0', 'bad0', 'bad1']


@pytest.mark.slow
@pytest.mark.parametrize('other,says', [
    (dict(torch='1.0'), 'torch (1.0 then, 2.0 now)'), (dict(gpubench='0.0.9'), 'gpubench (0.0.9 then, 0.1.0 now)'),
    (dict(cpu='Old CPU', n_cores=4), 'CPU (Old CPU then, New CPU now), cores (4 then, 2 now)'), (dict(gpu='H200'), 'GPU (H200 then, None now)'),
    (dict(ram_gib=7., python='3.12.0'), '')])
def test_another_machine_or_version_runs_again(labs, tmp_path, monkeypatch, other, says):
    "What ended well there was measured on something else, so its numbers are not those of this run"
    here = dict(gpubench='0.1.0', torch='2.0', cpu='New CPU', n_cores=2, gpu=None, ram_gib=8., python='3.11.0')
    write_lab(labs, '01_good', 'print(1)')
    [job] = prepare_run(device='cpu', folder=labs)
    monkeypatch.setattr('gpubench.course.labs.describe_machine', lambda: here | other)
    run(labs, tmp_path, device='cpu')
    monkeypatch.setattr('gpubench.course.labs.describe_machine', lambda: here)
    assert earlier_run(job, tmp_path/'out')==says
    assert [o.before for o in run(labs, tmp_path, device='cpu')]==[not says]
    assert [o.before for o in run(labs, tmp_path, device='cpu')]==[True]     # now it was made here


# what a run may write over

@pytest.mark.slow
def test_a_run_leaves_labs_and_copies_alone(labs, tmp_path):
    "Also a copy with answers, of a lab that is elsewhere; what a run wrote may be written again"
    write_lab(labs, '01_good', 'print(1)')
    (tmp_path/'out').mkdir()
    shutil.copy(labs/'01_good.ipynb', tmp_path/'out')
    for out in (labs, tmp_path/'out'):
        before = (out/'01_good.ipynb').read_bytes()
        with pytest.raises(ValueError, match='01_good.ipynb is a lab or a copy of one, .* would be overwritten'):
            run_labs(out=out, device='cpu', folder=labs)
        assert (out/'01_good.ipynb').read_bytes()==before
    (tmp_path/'out'/'01_good.ipynb').unlink()
    assert [run(labs, tmp_path, device='cpu', params=dict(seed=o))[0].status for o in (1, 2)]==['ok', 'ok']


def test_labs_of_one_name_do_not_write_over_each_other(labs, tmp_path):
    "The copies of two students"
    files = [write_lab(tmp_path/o, '01_good', 'print(1)') for o in ('ann', 'bob')]
    write_lab(labs, '01_good', 'print(1)')
    with pytest.raises(ValueError, match='Several labs of this run are named 01_good'): run(labs, tmp_path, *files, device='cpu')
    assert not (tmp_path/'out').exists()


# one run at a time on a device

@pytest.mark.slow
def test_the_labs_of_a_run_may_sweep_and_nobody_else_may(labs, tmp_path):
    write_lab(labs, '01_sweeps', 'import os\nfrom gpubench.run.process import HELD, device_locks\nwith device_locks(["cpu"]): print("we may")',
              'del os.environ[HELD]                     # as in any other process\ntry: device_locks(["cpu"]).__enter__()\n'
              'except RuntimeError as e: print(str(e)[:37])')
    [o] = run(labs, tmp_path, device='cpu')
    assert printed(o.notebook).splitlines()==['we may', 'Another measurement is running on cpu']


# what a lab prints

@pytest.mark.slow
def test_a_very_long_line(labs, tmp_path):
    "nbclient's own merging of streams takes .7 s for a line of 20,000 letters, and half an hour for this one, whatever the timeout"
    write_lab(labs, '01_long', 'print("x"*1_000_000)', 'for i in range(3): print(f"\\r{i} %", end="", flush=True)')
    done = subprocess.run([sys.executable, '-c', 'import sys; from gpubench.course.labs import run_labs; '
                           'print(run_labs((), sys.argv[1], "cpu", folder=sys.argv[2])[0].status)', tmp_path/'out', labs],
                          capture_output=True, text=True, timeout=120, env=package_env())
    assert done.stdout.strip()=='ok', done.stderr
    assert printed(tmp_path/'out'/'01_long.ipynb')=='x'*1_000_000+'\n2 %'


# what reaches a lab

@pytest.mark.slow
def test_the_kernel_is_this_python_whatever_is_registered(labs, tmp_path, monkeypatch):
    spec = tmp_path/'jupyter'/'kernels'/'python3'
    spec.mkdir(parents=True)
    (spec/'kernel.json').write_text(json.dumps(dict(argv=['/nowhere/python', '-m', 'ipykernel_launcher', '-f',
                                                          '{connection_file}'],
                                                    display_name='another', language='python')))
    monkeypatch.setenv('JUPYTER_PATH', str(tmp_path/'jupyter'))
    monkeypatch.setenv('MPLBACKEND', 'Agg')
    write_lab(labs, '01_who', 'import os, sys; print(sys.executable); print(os.environ["MPLBACKEND"])')
    [o] = run(labs, tmp_path)
    assert o.status=='ok'
    assert printed(o.notebook).split() == [sys.executable, 'module://matplotlib_inline.backend_inline']


@pytest.mark.slow
def test_parameters_arrive_as_they_are(labs, tmp_path):
    extra = '\n'.join(["sizes: tuple[int, ...] = (1, 2)", "limit: int | None = 3", "note: str = 'a # b = c'",
                       "rate: float = 1", "wild: bool = False"])
    write_lab(labs, '01_say', 'print(repr((sizes, limit, note, rate, wild, seed, device)))', extra=extra)
    note = 'say "it\'s\\n",\n{braces} ü'
    out = tmp_path/'out {of} ü'
    [o] = run_labs('1', out, 'cpu', params=dict(sizes=(16, 64), limit=None, note=note, rate=1),
                   texts=dict(wild='true', seed='7'), folder=labs)
    assert (o.status, o.notebook) == ('ok', out/'01_say.ipynb')
    assert eval(printed(o.notebook)) == ([16, 64], None, note, 1., True, 7, 'cpu')


@pytest.mark.slow
def test_a_lab_works_where_the_run_was_started(labs, tmp_path, monkeypatch):
    (tmp_path/'mine').mkdir()
    (tmp_path/'mine'/'my_network.py').write_text('name = "mine"')
    monkeypatch.chdir(tmp_path/'mine')
    write_lab(labs, '01_where', 'import my_network, os; print(my_network.name, os.path.basename(os.getcwd()), '
              'os.path.isdir(out))')
    [o] = run_labs(folder=labs)
    assert printed(o.notebook).split() == ['mine', 'mine', 'True']
    assert o.notebook.parent.parent == tmp_path/'mine'/'runs'


@pytest.mark.slow
def test_one_device_labs_run_once_for_each(labs, tmp_path):
    write_lab(labs, '01_each', 'print(device)', measures=ONE_DEVICE)
    write_lab(labs, '02_all', 'print(device)')
    done = run(labs, tmp_path)
    devices = find_devices()
    assert [(o.notebook.name, printed(o.notebook).strip()) for o in done] == [(f'01_each-{d}.ipynb', d)
        for d in devices]+[('02_all.ipynb', 'auto')]


@pytest.mark.slow
def test_students_see_nobody_elses_warnings(labs, tmp_path):
    write_lab(labs, '01_clean', 'from gpubench.ground.core import pick_device\nfrom fastai.vision.all import *', 'print(1)')
    code = ('from gpubench.course.labs import run_labs; import sys\n'
            'print(run_labs((), sys.argv[1], folder=sys.argv[2])[0].status)')
    p = subprocess.run([sys.executable, '-c', code, tmp_path/'out', labs], capture_output=True, text=True,
                       env=package_env())
    assert (p.stdout.strip(), p.stderr) == ('ok', '')
    assert [o for c in nbformat.read(tmp_path/'out'/'01_clean.ipynb', 4).cells if c.cell_type=='code'
            for o in c.outputs if o.get('name')=='stderr'] == []


# names and values

def test_a_lab_is_found_however_its_name_is_written(labs):
    for name in ('01_Größe und Maß', '02_UPPER', '03_v1.2'): write_lab(labs, name)
    names = ['01_größe und maß', '01_Gro\u0308ße und Maß', '02_UPPER', 'upper', '02_upper.ipynb']
    assert [pick_labs(o, labs)[0].name[:2] for o in names]==['01', '01', '02', '02', '02']
    assert [o.params for o in prepare_run('3', 'cpu', texts={'03_v1.2.seed': '4'}, folder=labs)]==[dict(seed=4)]


@pytest.mark.parametrize('given,first,second', [
    ({'01_a': dict(seed=3), 'seed': 4}, dict(seed=3), dict(seed=4)),         # in whatever order
    ({'seed': 4, '01_a.seed': 3}, dict(seed=3), dict(seed=4)),
    ({'01_a': None, 'seed': 4}, dict(seed=4), dict(seed=4)),                 # `01_a:` with nothing but comments below it
    ({'01_a.price': dict(gpu=2.)}, dict(price=dict(gpu=2.)), {})])           # a value may be a mapping itself
def test_what_is_said_of_one_lab_wins(labs, given, first, second):
    write_lab(labs, '01_a', extra='price: dict[str, float] = {}')
    write_lab(labs, '02_b')
    assert [o.params for o in prepare_run(device='cpu', params=given, folder=labs)]==[first, second]


# the output folder

def test_the_home_of_nobody(tmp_path, monkeypatch):
    "As a shell does: a name that begins with ~ and is no user's stays as it is"
    monkeypatch.chdir(tmp_path)
    assert run_folder('~nobody-at-all/mine')==tmp_path/'~nobody-at-all'/'mine'


def test_two_runs_in_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len({run_folder() for _ in range(3)}) == 3


def test_the_full_profile_needs_its_file(labs, tmp_path, monkeypatch):
    monkeypatch.setattr('gpubench.course.lab_format.__file__', str(tmp_path/'package'/'labs.py'))      # a package without labs
    write_lab(labs, '01_good', 'print(1)')
    with pytest.raises(ValueError, match='Cannot read the parameters in'): prepare_run(profile='full', folder=labs)


def test_a_slip_in_the_full_profile_is_told(labs):
    "Else the lab would run with the quick one, and nobody would know"
    write_lab(labs, '01_good', 'print(1)')
    (labs/'full.yaml').write_text('01_god: {seed: 3}')
    with pytest.raises(ValueError, match="Did you mean '01_good'"): prepare_run(profile='full', folder=labs)
    (labs/'full.yaml').write_text('01_good: {seed: 3}\n02_batch_size: {seed: 4}')         # one that ships and was not copied
    assert prepare_run(device='cpu', profile='full', folder=labs)[0].params==dict(seed=3)


# the labs that ship

def test_copies_have_no_outputs(labs, tmp_path):
    nb = nbformat.read(write_lab(labs, '01_a', 'print(1)'), 4)
    nb.cells[-1].update(outputs=[nbformat.v4.new_output('stream', text='1')], execution_count=3)
    nbformat.write(nb, labs/'01_a.ipynb')
    write_lab(labs/'deeper', '01_b', 'print(2)')
    assert copy_labs(tmp_path/'mine', labs)['copied']==['01_a.ipynb', 'deeper/01_b.ipynb']
    copy = nbformat.read(tmp_path/'mine'/'01_a.ipynb', 4)
    assert [(o.source, o.outputs, o.execution_count) for o in copy.cells if o.cell_type=='code'][-1]==('print(1)', [], None)
    assert copy_labs(tmp_path/'mine', labs)['same']==['01_a.ipynb', 'deeper/01_b.ipynb']
    copy_labs(tmp_path/'whole', labs, with_outputs=True)
    assert (tmp_path/'whole'/'01_a.ipynb').read_bytes()==(labs/'01_a.ipynb').read_bytes()


# stopping by hand

def package_env(): return os.environ | dict(PYTHONPATH=str(Path(find_package()).parent), PYTHONIOENCODING='utf-8')


def find_package():
    import gpubench
    return Path(gpubench.__file__).parent


def start_long_run(labs, tmp_path, **kwargs):
    "A run in a process of its own, in the middle of its second lab, and what it left when it goes on"
    write_lab(labs, '00_done', 'print(0)')
    write_lab(labs, '01_long', stubborn(tmp_path/'pids'), f'time.sleep(0 if os.path.exists({str(tmp_path/"mended")!r}) else 300)')
    write_lab(labs, '02_next', 'print(1)')
    args = ['run', '--labs', labs, '--out', tmp_path/'out', '--device', 'cpu', '--no-progress']
    p = subprocess.Popen([sys.executable, '-c', 'from gpubench.cli import main; main()', *args], env=package_env(), **kwargs)
    for _ in range(600):
        if (tmp_path/'pids').exists(): break
        time.sleep(.1)
    time.sleep(1)
    return p


@pytest.mark.slow
@pytest.mark.skipif(os.name=='nt', reason='no signals')
def test_ctrl_c_stops_the_run_and_says_what_did_not_run(labs, tmp_path):
    "And the same command goes on where it was stopped"
    p = start_long_run(labs, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    append_record(tmp_path/'out', dict(status='ok', device='cpu', bs=64))          # as a visit of that lab might
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=120)
    assert (p.returncode, 'Traceback' in err)==(130, False), err
    assert alive(tmp_path/'pids')==[]
    assert 'INTERRUPTED' in out and 'NOT RUN' in out and f'--out {tmp_path/"out"}' in out
    assert f'gpubench report {tmp_path/"out"}\n' in out and not (tmp_path/'out'/'report.html').exists()
    assert 'This run stopped early' in nbformat.read(tmp_path/'out'/'01_long.ipynb', 4).cells[0].source
    (tmp_path/'mended').touch()
    p = subprocess.run(p.args, capture_output=True, text=True, env=package_env())
    assert [o.split()[:2] for o in p.stdout.splitlines() if o.startswith('  ok ')]==[['ok', 'before'], ['ok', '01_long'], ['ok', '02_next']]


@pytest.mark.slow
@pytest.mark.skipif(os.name=='nt', reason='no process groups')
def test_ctrl_c_while_the_kernel_starts(labs, tmp_path, monkeypatch):
    "nbclient clears up only after a kernel that has started"
    from jupyter_client import AsyncKernelClient
    started = []
    async def stop(client, timeout=None): started.append(client.parent.provisioner.pid); raise KeyboardInterrupt
    monkeypatch.setattr(AsyncKernelClient, 'wait_for_ready', stop)
    write_lab(labs, '01_good', 'print(1)')
    write_lab(labs, '02_next', 'print(1)')
    assert [o.status for o in run(labs, tmp_path, device='cpu')]==['interrupted', 'not run']
    assert len(started)==1 and not psutil.pid_exists(started[0])


def test_a_lab_in_which_a_name_means_something_else(labs):
    path = write_lab(labs, '01_odd', extra="model: str = 'T-800'  # of the robot\nrepeats: int = -1  # days from now")
    assert check_parameters(path, dict(model='T-1000', repeats=-2))==dict(model='T-1000', repeats=-2)


def test_the_labs_that_ship_can_be_planned():
    found = find_labs()
    assert {o.lab.name for o in prepare_run()}=={o.name for o in found}
    for lab in found: check_values({o.name: o.default for o in lab_parameters(lab.path).values()})
    for job in prepare_run(profile='full'): check_values(job.params)
