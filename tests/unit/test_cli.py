"The command line as scripts and students meet it: in a process of its own"
import errno
import json
import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import torch
from click.testing import CliRunner

import gpubench
from gpubench.cli import cli
from gpubench.ground.record import append_record, read_records
from gpubench.ground.core import InputError, StateError, find_devices
from helpers import write_lab

PACKAGE = Path(gpubench.__file__).parent

VERBS = [*cli.commands]
HEAVY = 'torch torchvision fastai fastcore pandas numpy matplotlib papermill nbformat jupyter_client IPython'.split()


def gpubench_process(*args, cwd=None, path=(), before='', preexec_fn=None, **env):
    "Start `gpubench`; `path` goes before the installed packages, the code `before` before all else"
    old = {k: v for k,v in os.environ.items() if k!='PYTEST_CURRENT_TEST'}
    full = old | dict(PYTHONPATH=os.pathsep.join(map(str, [*path, PACKAGE.parent])),
                      PYTHONIOENCODING='utf-8') | {k: str(v) for k,v in env.items()}
    return subprocess.Popen([sys.executable, '-c', f'{before}from gpubench.cli import main; main()', *map(str, args)], cwd=cwd, env=full,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding='utf-8', preexec_fn=preexec_fn)


def gpubench_command(*args, **kwargs):
    "Run it to its end"
    p = gpubench_process(*args, **kwargs)
    try: out, err = p.communicate(timeout=600)
    finally: p.kill()
    err = re.sub('^WARNING: Other programs use .*\n', '', err, flags=re.M)                # tests run on busy machines, too
    return subprocess.CompletedProcess(p.args, p.returncode, out, err)


@pytest.fixture
def call(tmp_path, monkeypatch):
    "The same in this process, in an empty folder: quicker where nothing heavy is to happen"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', sys.path[:])
    return lambda *args: CliRunner().invoke(cli, [str(o) for o in args], prog_name='gpubench')


def refused(said, words): # exit code 2, and a message instead of a traceback
    assert (said.exit_code, words in said.stderr, 'Traceback' in said.stderr) == (2, True, False), said.stderr
    assert isinstance(said.exception, SystemExit)


def made_up_visit(bs=64, device='cpu', visit=0, epoch_s=1., n_images=1408, **kw):
    return dict(trial_id=f'{device}{bs}', visit=visit, status='ok', error=None,
                time_utc=f'2000-01-01T00:00:{visit:02}+00:00', dataset='digits', model='lenet',
                bs=bs, device=device, loader='memory', n_workers=0, precision='fp32', n_epoch=1, lr=.001, seed=0,
                n_train=1437, n_valid=360, n_images=n_images,
                n_steps=n_images//bs, n_dropped=1437-n_images, n_params=54528, epoch_s=epoch_s*(1+.01*visit),
                images_per_s=n_images/epoch_s/(1+.01*visit), step_ms=10.,
                accuracy=.9, loss=.4, machine='madeup01', cpu='made-up CPU', gpu='made-up GPU' if device=='cuda'
                else None, n_cores=2, torch='2.15.0', fastai='2.8.7') | kw


def write_run(folder, **kw):
    for device,epoch_s in (('cpu', 3.), ('cuda', 1.)):
        for visit in range(3):
            if kw.get('device', device)==device: append_record(folder, made_up_visit(device=device, visit=visit,
                epoch_s=epoch_s) | kw)
    return folder


@pytest.fixture
def labs(tmp_path): return tmp_path/'labs'


# starting and help

def test_help_imports_nothing_heavy():
    code = ('import sys; sys.argv = ["gpubench", "--help"]\nfrom gpubench.cli import main\ntry: main()\n'
            f'except SystemExit: print(sorted({{o.partition(".")[0] for o in sys.modules}} & set({HEAVY})))')
    p = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert p.stdout.splitlines()[-1] == '[]'
    assert len(VERBS)>6 and all(f'  {o.split()[0]} ' in p.stdout for o in VERBS)


@pytest.mark.slow
def test_version_and_unknown_verb():
    assert gpubench_command('--version').stdout == f'gpubench {gpubench.__version__}\n'
    p = gpubench_command('bench')
    assert p.returncode==2 and 'Traceback' not in p.stderr


# run

SIGNAL_IN_REPORT = 'import gpubench.cli as c, os, time; c.show_report = lambda *o: (os.kill(os.getpid(), 15), time.sleep(9))'
RECORD_ONE = 'from gpubench.ground.record import append_record', f'append_record(out, {made_up_visit()!r})'       # cells of a lab

@pytest.mark.slow
def test_a_run_ends_with_a_table_and_a_report(labs, tmp_path):
    write_lab(labs, '01_small', 'from gpubench.ground.record import append_record',
              f'for v in range(n): append_record(out, {made_up_visit()!r} | dict(visit=v, seed=seed))',
              extra='n: int = 1  # visits')
    p = gpubench_command('run', '--labs', labs, '-p', 'n=3', '-p', '01_small.seed=5', '--no-progress', cwd=tmp_path)
    assert (p.returncode, p.stderr) == (0, ''), p.stderr
    [out] = (tmp_path/'runs').iterdir()
    assert (out/'01_small.ipynb').is_file() and (out/'report.html').is_file()
    assert read_records(out)[['visit', 'seed']].values.tolist() == [[0, 5], [1, 5], [2, 5]]
    assert 'lenet on digits' in p.stdout and (out/'report.html').as_uri() in p.stdout


@pytest.mark.parametrize('status,code', [
    ('error', 1), ('died', 1), ('timeout', 1), ('interrupted', 130)])
def test_failures_have_codes_of_their_own(labs, call, monkeypatch, status, code):
    from gpubench.course import labs as library
    def run(jobs, out, *args):
        return [library.Outcome(o, k, 1., out/o.notebook, 'planted') for o,k in zip(jobs, (status, 'ok', 'not run'))]
    monkeypatch.setattr(library, 'run_jobs', run)
    for o in ('01_small', '02_good', '03_next'): write_lab(labs, o, 'print(1)')
    said = call('run', '--labs', labs, '--out', 'mine', '--no-progress')
    assert said.exit_code==code and 'repeat the command with --out' in said.stdout
    assert f'{status.upper():12} 01_small on every device: planted' in said.stdout and 'NOT RUN      03_next' in said.stdout
    assert 'ok           02_good on every device  1 s  02_good.ipynb' in said.stdout


@pytest.mark.parametrize('args,says', [
    (['01_smal'], "no lab '01_smal'. Did you mean '01_small'?"),
    (['-p', 'sed=1'], "Did you mean 'seed'?"),
    (['-p', 'seed=one'], "must be int, and 'one' is not"),
    (['-p', 'seed=4294967296'], 'from 0 to 2147483648'),
    (['-p', 'seed'], 'not of the form name=value'),
    (['-p', 'device=cpu'], '--device'),
    (['--device', 'gpu'], "no device 'gpu'"),
    (['--profile', 'ful'], "Use 'quick' or 'full'"),
    (['-f', 'none.yaml'], 'Cannot read the parameters in none.yaml'),
    (['-f', ''], 'Cannot read the parameters in : '),          # "$FILE" that isn't set
    (['-p', 'dataset=./not_there'], "There is no folder './not_there'"),
    (['--out', 'file'], 'Cannot write to the output folder'),
    (['--out', 'file/below'], 'Cannot write to the output folder'),
    (['--labs', 'empty'], 'no labs in empty'),
    (['--timeout', '0'], "Invalid value for '--timeout'")])
def test_a_wrong_request_is_refused_before_anything_runs(labs, tmp_path, call, args, says):
    write_lab(labs, '01_small', 'print(1)', extra="dataset: str = 'digits'")
    (tmp_path/'file').write_text('mine')
    refused(call('run', '--labs', labs, '--no-progress', *args), says)
    assert not (tmp_path/'runs').exists() and (tmp_path/'file').read_text()=='mine'


@pytest.mark.skipif('cuda' in find_devices(), reason='there is a GPU')
def test_cuda_where_there_is_none(labs, tmp_path, call):
    write_lab(labs, '01_small', 'print(1)')
    for args in (['run', '--labs', labs, '--device', 'cuda'], ['sweep', '--device', 'cuda']):
        refused(call(*args), "Device 'cuda' was asked for")
    assert not (tmp_path/'runs').exists()


@pytest.mark.slow
def test_debug_brings_the_traceback_back(labs, tmp_path, call):
    write_lab(labs, '01_small', 'print(1)')
    args = ['run', '--labs', labs, '-p', 'sed=1']
    assert [type(call(*o).exception) for o in ([*args, '--debug'], ['--debug', *args], args)] == [InputError,
        InputError, SystemExit]
    p = gpubench_command('report', tmp_path/'none'), gpubench_command('report', tmp_path/'none', '--debug')
    assert [(o.returncode, 'Traceback' in o.stderr) for o in p] == [(2, False), (1, True)]
    assert p[0].stderr.count('\n')==1


def refuses(*args, **kwargs): raise InputError('Say what to do.')
def lacks(*args, **kwargs): raise StateError('Say what to do.')

@pytest.mark.parametrize('function, args', [
    ('show.compare.load_records', ['report', 'run']), ('show.report.write_report', ['report', 'run']),
    ('show.machines.compare_pairs', ['compare', 'run']), ('run.sweep.plan', ['sweep']), ('course.labs.prepare_run', ['run']),
    ('run.models.find_factory', ['gain', 'module:function']), ('watch.doctor.examine', ['doctor'])])
def test_only_an_error_for_users_is_shown_as_one(function, args, call, tmp_path, monkeypatch):
    "Not what Python, torch or pandas raise where the library calls them, whatever it is called"
    import gpubench.show.report, gpubench.show.machines, gpubench.course.labs, gpubench.show.gain            # noqa: F401, E401  what they import isn't replaced
    write_run(tmp_path/'run')
    for inside in (partial(math.sqrt, -1), partial(int, 'x'), partial(torch.empty, -1), partial(pd.concat, []), partial(os.close, -1)):
        library = dict(__name__='gpubench.inside', inside=inside)
        exec('def called(*args, **kwargs): return inside()', library)
        monkeypatch.setattr(f'gpubench.{function}', library['called'])
        said = call(*args)
        assert (said.exit_code, isinstance(said.exception, (ValueError, RuntimeError, OSError))) == (1, True), said.output
    for ours in (refuses, lacks):
        monkeypatch.setattr(f'gpubench.{function}', ours)
        refused(call(*args), 'gpubench: Say what to do.')


@pytest.mark.slow
def test_parameters_from_a_file(labs, tmp_path):
    write_lab(labs, '01_small', 'print(seed, n)', extra='n: int = 1')
    (tmp_path/'p.yaml').write_text('seed: 3\n01_small:\n  n: 4\n')
    p = gpubench_command('run', '--labs', labs, '-f', tmp_path/'p.yaml', '-p', 'seed=9', '--out', tmp_path/'out',
                         '--no-progress')
    assert p.returncode==0
    assert nbformat.read(tmp_path/'out'/'01_small.ipynb', 4).cells[-1].outputs[0].text == '9 4\n'


def test_a_lab_that_stands_twice_in_a_file(labs, tmp_path, call):
    write_lab(labs, '01_small', 'print(seed, n)', extra='n: int = 1')
    (tmp_path/'p.yaml').write_text('01_small: {n: 4}\nseed: 3\n01_small: {seed: 5}\n')
    refused(call('run', '--labs', labs, '-f', 'p.yaml'), "p.yaml has '01_small' twice in one mapping, on lines 1 and 3.")
    assert not (tmp_path/'runs').exists()


def test_a_second_one_on_a_device_leaves_nothing(labs, tmp_path, call):
    "Not even a folder, unless it was there; and it names the device, whatever was asked for"
    from gpubench.run.process import device_locks
    write_lab(labs, '01_small', 'print(1)')
    says = f"A series of labs is already running on device '{find_devices()[-1]}': process "
    (tmp_path/'mine').mkdir()
    with device_locks(find_devices()[-1:], 'runs/other', 'series of labs'):
        for device in (['--device', 'auto'], []):
            refused(call('run', '--labs', labs, '--no-progress', *device), says)
            said = call('sweep', '--no-progress', *device)
            refused(said, says)
            assert not (tmp_path/'runs').exists() and 'Results go to' not in said.output
        refused(call('run', '--labs', labs, '--no-progress', '--out', 'mine'), says)
        refused(call('run', '--labs', labs, '--no-progress', '--out', 'new/deep'), says)
    assert (tmp_path/'mine').is_dir() and not (tmp_path/'new').exists()


@pytest.mark.slow
def test_a_run_waits_for_its_device(labs, tmp_path):
    from gpubench.run.process import device_locks
    write_lab(labs, '01_small', 'print(1)')
    with device_locks(['cpu'], 'runs/other'):
        p = gpubench_process('run', '--labs', labs, '--device', 'cpu', '--wait', '--no-progress', '--out', tmp_path/'out')
        said = next(o for o in p.stderr if 'queue' in o)
        assert "Waiting for device 'cpu', number 1 of 1 in the queue: a sweep runs there since" in said and p.poll() is None
    out, _ = p.communicate(timeout=120)
    assert p.returncode==0 and 'ok           01_small on cpu' in out


@pytest.mark.parametrize('load,warns', [((.6, 'game'), True), ((.02, ''), False), (None, False)])
def test_a_busy_machine_is_told_at_the_start(labs, call, monkeypatch, load, warns):
    from gpubench.watch import doctor
    from gpubench.course import labs as library
    from gpubench.run import sweep
    def stop(*args, **kwargs): raise KeyboardInterrupt
    monkeypatch.setattr(doctor, 'cpu_load', lambda: load)
    monkeypatch.setattr(sweep, 'sweep', stop)
    monkeypatch.setattr(library, 'run_jobs', stop)
    write_lab(labs, '01_small', 'print(1)')
    for verb in (['run', '--labs', labs], ['sweep', '--device', 'cpu']):
        said = call(*verb, '--no-progress', '--out', verb[0])
        assert ('WARNING: Other programs use 60% of the CPU now, most of all game' in said.stderr)==warns, said.output
        assert 'Results go to' in said.stdout


@pytest.mark.slow
def test_a_lab_that_runs_again_says_why(labs, tmp_path):
    write_lab(labs, '01_small', 'print(1)')
    args = 'run', '--labs', labs, '--out', tmp_path/'out', '--device', 'cpu', '--no-progress'
    older = 'import gpubench; now, gpubench.__version__ = gpubench.__version__, "0.0.1"; '
    first, p = gpubench_command(*args, before=older), gpubench_command(*args)
    assert (first.returncode, p.returncode)==(0, 0)
    assert f'01_small.ipynb will run again. Changed: gpubench (0.0.1 then, {gpubench.__version__} now)' in p.stdout
    assert re.search('ok +01_small', p.stdout)
    p = gpubench_command(*args)
    assert 'will run again' not in p.stdout and re.search('ok before +01_small', p.stdout)


@pytest.mark.slow
@pytest.mark.skipif(os.name=='nt', reason='no signals')
def test_a_signal_while_the_report_is_made(labs, tmp_path):
    write_lab(labs, '01_small', *RECORD_ONE)
    p = gpubench_command('run', '--labs', labs, '--out', tmp_path/'out', '--device', 'cpu', '--no-progress', before=f'{SIGNAL_IN_REPORT}; ')
    assert (p.returncode, p.stderr, 'ok           01_small' in p.stdout)==(143, '\ngpubench: SIGTERM\n', True)
    assert f"To make one: gpubench report {tmp_path/'out'}" in p.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.name=='nt', reason='no such pipes')
def test_whoever_reads_may_go(labs, tmp_path):
    "`| head -1`: all labs run, and the report is there"
    write_lab(labs, '01_small', *RECORD_ONE)
    p = gpubench_process('run', '--labs', labs, '--out', tmp_path/'out', '--device', 'cpu')
    p.stderr.close()
    assert 'Results go to' in p.stdout.readline()
    p.stdout.close()
    assert p.wait(timeout=120)==0
    assert (tmp_path/'out'/'01_small.ipynb').is_file() and (tmp_path/'out'/'report.html').is_file()
    write_lab(labs, '01_small', *RECORD_ONE, 'print(2)')                              # so it runs again, and says why before that
    for cut,code in (('', 0), (f'{SIGNAL_IN_REPORT}; ', 143)):
        p = gpubench_process('run', '--labs', labs, '--out', tmp_path/'out', '--device', 'cpu', before=cut)
        p.stderr.close(), p.stdout.close()
        assert p.wait(timeout=120)==code
        assert 'print(2)' in (tmp_path/'out'/'01_small.ipynb').read_text()


@pytest.mark.slow
@pytest.mark.skipif(os.name=='nt', reason='no such descriptors')
def test_progress_keeps_to_stderr(labs, tmp_path):
    "stdout has the outcomes alone, also where stderr is closed"
    write_lab(labs, '01_small', 'print(1)')
    p = gpubench_process('run', '--labs', labs, '--out', tmp_path/'out', '--device', 'cpu', preexec_fn=lambda: os.close(2))
    out, _ = p.communicate(timeout=120)
    assert p.returncode==0 and 'ok           01_small' in out and '1 of 1' not in out


@pytest.mark.slow
@pytest.mark.skipif(os.name=='nt', reason='no such descriptors')
def test_without_stdout_and_stderr(labs, tmp_path):
    "As a daemon starts it"
    write_lab(labs, '01_small', *RECORD_ONE)
    p = gpubench_process('run', '--labs', labs, '--out', tmp_path/'out', '--device', 'cpu', preexec_fn=lambda: (os.close(1), os.close(2)))
    assert p.wait(timeout=120)==0
    assert nbformat.read(tmp_path/'out'/'01_small.ipynb', 4).metadata.gpubench.status=='ok' and (tmp_path/'out'/'report.html').is_file()


@pytest.mark.skipif(os.name=='nt', reason='no such terminals')
@pytest.mark.parametrize('args,says', [(('report', 'none'), 'Reading the records …')])
def test_a_terminal_is_told_at_once_that_work_goes_on(tmp_path, args, says):
    import pty
    ours, theirs = pty.openpty()
    p = subprocess.Popen([sys.executable, '-c', 'from gpubench.cli import main; main()', *args], cwd=tmp_path, stdout=subprocess.PIPE,
                         stderr=theirs, env=os.environ | dict(PYTHONPATH=str(PACKAGE.parent), PYTHONIOENCODING='utf-8'))
    os.close(theirs)
    out, _ = p.communicate(timeout=60)
    said = os.read(ours, 10_000).decode()
    os.close(ours)
    assert out==b'' and said.splitlines()[0]==says and 'no records' in said


# labs

def test_labs_are_listed_shown_and_copied(labs, tmp_path, call):
    write_lab(labs, '01_small', 'print(1)', extra='n: int = 1  # visits')
    p = gpubench_command('labs', '--labs', labs)
    assert p.stdout.splitlines() == ['01_small', '  Is 01_small there?',
                                     '  0.1 min with the quick profile · any machine · measures every device it finds']
    assert re.search(r'n: int = 1 +visits', call('labs', '1', '--labs', labs).stdout)
    assert '1 files copied' in call('labs', '--labs', labs, '--copy', 'mine').stdout
    (tmp_path/'mine'/'01_small.ipynb').write_text('my answers')
    said = call('labs', '--labs', labs, '--copy', 'mine')
    assert 'Kept, because it differs from the original: 01_small.ipynb' in said.stdout and said.exit_code==0
    assert (tmp_path/'mine'/'01_small.ipynb').read_text()=='my answers'
    said = call('labs', '--labs', labs, '--copy', 'mine/01_small.ipynb')
    refused(said, 'Cannot write')
    assert '--out' not in said.stderr


# sweep

@pytest.mark.parametrize('number, words', [(errno.ENOSPC, 'the disk is full'), (errno.EDQUOT, 'your share of the disk is used up'),
                                           (errno.EACCES, 'Permission denied. Make the folder writable')])
def test_a_report_that_cannot_be_written_hides_no_table(call, tmp_path, monkeypatch, number, words):
    write_run(tmp_path/'mine')
    before = (tmp_path/'mine'/'records.jsonl').read_bytes()
    def full(path, *args, **kwargs):
        path.touch()
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(Path, 'write_text', full)
    said, rows = call('report', 'mine'), call('report', 'mine', '--json')
    for o in (said, rows): refused(o, f'The report cannot be written into mine: {words}')
    assert 'lenet on digits' in said.stdout and [o['bs'] for o in json.loads(rows.stdout)]==[64, 64]
    assert 'Report:' not in said.stdout and (tmp_path/'mine'/'records.jsonl').read_bytes()==before
    assert not [*(tmp_path/'mine').glob('*.html*')]                                      # nor half a page
    assert ('writable' in said.stderr)==(number==errno.EACCES)

def test_a_sweep_that_fills_the_disk_shows_what_it_has(call, tmp_path, monkeypatch):
    import gpubench.run.sweep as library
    def full(trials, out, **kwargs):
        write_run(out)
        raise StateError("records.jsonl can't be written: the disk is full") from OSError(errno.ENOSPC, 'No space left on device')
    monkeypatch.setitem(globals(), '__name__', 'gpubench.made_up')                         # where our own errors come from
    monkeypatch.setattr(library, 'sweep', full)
    said = call('sweep', '--bs', 64, '--device', 'cpu', '--no-progress', '--out', 'mine')
    refused(said, 'the disk is full')
    assert 'lenet on digits' in said.stdout and len(read_records(tmp_path/'mine'))==6

@pytest.mark.slow
def test_a_sweep_writes_records_and_a_report(tmp_path):
    p = gpubench_command('sweep', '--bs', '128,256', '--max-images', 400, '--repeats', 2, '--device', 'cpu',
                         '--no-progress', '--out', 'mine', cwd=tmp_path)
    assert (p.returncode, p.stderr) == (0, '')
    df = read_records(tmp_path/'mine')
    assert sorted(zip(df.bs, df.visit)) == [(128, 0), (128, 1), (256, 0), (256, 1), (256, 2), (256, 3)]
    assert sorted(df.twin) == [False]*4 + [True]*2       # the A/A pair
    assert (df.status=='ok').all() and (df.max_images==400).all()
    assert (tmp_path/'mine'/'report.html').is_file() and 'lenet on digits' in p.stdout
    file = tmp_path/'mine'/'records.jsonl'
    file.write_text(''.join(file.read_text().splitlines(keepends=True)[:4]))
    p = gpubench_command('sweep', '--bs', '128,256', '--max-images', 400, '--repeats', 2, '--device', 'cpu',
                         '--no-progress', '--out', 'mine', cwd=tmp_path)
    assert p.returncode==0 and '4 of 6 visits are in' in p.stdout and '2 to go' in p.stdout
    assert len(read_records(tmp_path/'mine'))==6


@pytest.mark.slow
def test_a_sweep_of_loaders(tmp_path):
    p = gpubench_command('sweep', '--loader', 'files,cached', '--max-images', 400, '--repeats', 1, '--device', 'cpu',
                         '--no-progress', '--out', 'mine', cwd=tmp_path)
    assert p.returncode==0, p.stdout+p.stderr
    df = read_records(tmp_path/'mine').set_index('loader')
    assert df.status.to_dict()==dict(files='ok', cached='ok')
    assert df.valid_loss['files']==pytest.approx(df.valid_loss['cached'], rel=1e-5)     # Normalize rounds differently
    assert 'files decoded once' in p.stdout and 'files decoded once' in (tmp_path/'mine'/'report.html').read_text()


def test_a_stopped_sweep_says_what_it_kept(tmp_path, call, monkeypatch):
    from gpubench.run import sweep as library
    def stop(*args, **kwargs): raise KeyboardInterrupt('Stopped by Ctrl-C after 2 of 6 visits.')
    monkeypatch.setattr(library, 'sweep', stop)
    said = call('sweep', '--device', 'cpu', '--out', 'mine')
    assert said.exit_code==130 and 'after 2 of 6 visits' in said.stderr and 'Traceback' not in said.stderr


def test_every_option_reaches_the_sweep(tmp_path, call, monkeypatch):
    from gpubench.run import sweep as library
    given = {}
    def stop(todo, **kwargs):
        given.update(kwargs, seeds={o.seed for o in todo})
        raise KeyboardInterrupt
    monkeypatch.setattr(library, 'sweep', stop)
    call('sweep', '--device', 'cpu', '--seed', 3, '--repeats', 4, '--timeout', 60, '--retry-failed', '--monitor', '--wait', '--no-progress', '--out', 'mine',
         '--on', 'slurm', '--slurm', 'time=30', '--slurm', 'partition=gpu')
    assert Path(given.pop('out')).name=='mine'
    assert given==dict(seeds={3}, seed=3, repeats=4, timeout_s=60, retry_failed=True, monitor=True, wait=True, progress=False,
                       on='slurm', slurm=dict(time=30, partition='gpu'))


@pytest.mark.slow
def test_a_visit_that_cannot_be_is_told_with_both_numbers(tmp_path):
    p = gpubench_command('sweep', '--bs', '4000', '--repeats', 1, '--device', 'cpu', '--no-progress', '--out', 'mine',
                         cwd=tmp_path)
    assert p.returncode==1 and re.search(r'1 of 1 visits failed: .*4000.*1437', p.stdout)
    assert read_records(tmp_path/'mine').status.tolist()==['skipped']


@pytest.mark.slow
def test_a_network_of_ones_own(tmp_path):
    (tmp_path/'my_helper.py').write_text('def half(x): return x/2')
    (tmp_path/'my_network.py').write_text('''from torch import nn
class Half(nn.Module):
    def forward(self, x):
        from my_helper import half              # while it trains
        return half(x)
def make(n_classes=10, n_in=3): return nn.Sequential(Half(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16*n_in, n_classes))
''')
    p = gpubench_command('sweep', '--model', 'my_network:make', '--max-images', 200, '--repeats', 1, '--device', 'cpu',
                         '--no-progress', '--out', 'mine', cwd=tmp_path)
    assert p.returncode==0, p.stderr
    assert read_records(tmp_path/'mine').model.tolist()==['my_network:make']


@pytest.mark.parametrize('args,says', [
    (['--dataset', 'digit'], "Did you mean 'digits'?"), (['--model', 'lnet'], "Did you mean 'lenet'?"),
    (['--bs', '0'], 'bs must be a whole number of at least 1, not 0'), (['--bs', '-16'], 'not -16'),
    (['--bs', '16,x'], 'not a list of whole numbers'), (['--loader', 'file'], "Did you mean 'files'?"),
    (['--loader', 'cached', '--n-workers', '2'], 'has its own processes, so n_workers=2'),
    (['--precision', 'fp8'], 'fp8'), (['--repeats', '0'], 'repeats'),
    (['--epochs', '0'], 'n_epoch must be'), (['--device', 'cpuu'], "Did you mean 'cpu'?"),
    (['--out', 'file'], 'Cannot write to'), (['--dataset', 'one'], 'one')])
def test_a_wrong_sweep_is_refused(tmp_path, call, args, says):
    (tmp_path/'file').write_text('mine')
    (tmp_path/'one'/'cats').mkdir(parents=True)
    refused(call('sweep', '--no-progress', *args), says)
    assert not (tmp_path/'runs').exists()


# compare and report

def test_compare_two_runs_and_the_devices_of_one(tmp_path, call):
    cpu, gpu, both = write_run(tmp_path/'cpu', device='cpu'), write_run(tmp_path/'gpu',
        device='cuda'), write_run(tmp_path/'both')
    for args in ([cpu, gpu], [both], [cpu, gpu/'records.jsonl', '--strict']):
        said = call('compare', *args)
        assert said.exit_code==0 and 'as fast' in said.stdout and 'NOT THE SAME WORK' not in said.stdout
    assert 'Every ratio is against cpu · CPU' in call('compare', cpu, gpu, both).stdout


@pytest.mark.slow
def test_compare_warns_where_the_work_differs(tmp_path, call):
    cpu, gpu = write_run(tmp_path/'cpu', device='cpu'), write_run(tmp_path/'gpu', device='cuda', n_images=640,
        n_steps=10)
    p = gpubench_command('compare', cpu, gpu)
    assert p.returncode==0 and 'NOT THE SAME WORK' in p.stdout and '1,408 and 640 images' in p.stdout
    assert call('compare', cpu, gpu, '--strict').exit_code==1
    like = write_run(tmp_path/'like', device='cuda')
    for others in ([gpu, like], [like, gpu]): assert call('compare', cpu, *others, '--strict').exit_code==1      # one is enough


def test_strict_fails_where_no_ratio_could_be_made(tmp_path, call):
    cpu, gpu = write_run(tmp_path/'cpu', device='cpu', epoch_s=0., images_per_s=None), write_run(tmp_path/'gpu', device='cuda')
    said = call('compare', cpu, gpu, '--strict')
    assert said.exit_code==1 and 'No ratio for ' in said.stdout and 'NOT THE SAME WORK' not in said.stdout
    assert call('compare', cpu, gpu).exit_code==0


def test_nothing_to_compare_or_report(tmp_path, call):
    cpu = write_run(tmp_path/'cpu', device='cpu')
    for args,says in [(['compare', cpu], 'records of one device only'),
                      (['compare', cpu, tmp_path/'none'], 'no records'),
                      (['report', tmp_path/'none'], 'no records'), (['report', cpu/'records.jsonl'/'below'], 'no records'),
                      (['compare'], 'Missing argument')]: refused(call(*args), says)


@pytest.mark.slow
def test_report_makes_the_page_anew(tmp_path):
    folder = write_run(tmp_path/'both')
    p = gpubench_command('report', folder)
    assert (p.returncode, p.stderr) == (0, '')
    assert (folder/'report.html').is_file() and 'report.html' in p.stdout


# for scripts

@pytest.mark.slow
def test_a_sweep_for_scripts_prints_nothing_but_its_table(tmp_path):
    p = gpubench_command('sweep', '--bs', '16,64', '--max-images', 200, '--repeats', 1, '--json', '--out', tmp_path/'mine', '--no-progress')
    assert (p.returncode, [(o['bs'], o['n_visits']) for o in json.loads(p.stdout)]) == (0, [(16, 1), (64, 1)])
    assert '2 combination(s)' in p.stderr and 'Report: ' in p.stderr
    again = gpubench_command('sweep', '--bs', '16,64', '--max-images', 200, '--repeats', 1, '--csv', '--out', tmp_path/'mine', '--no-progress')
    assert again.stdout.startswith('workload,') and again.stdout.count('\n')==3 and '2 of 2 visits are in' in again.stderr


def test_a_dry_run_runs_nothing(tmp_path, call):
    said = call('sweep', '--bs', '16,64', '--device', 'cpu', '--dry-run', '--out', tmp_path/'mine')
    assert said.exit_code==0 and '9 visits to go, 3 min at most' in said.stdout and not (tmp_path/'mine').exists()


def test_a_dry_run_for_a_cluster_needs_no_gpu_here(call, monkeypatch):
    monkeypatch.setattr('torch.cuda.is_available', lambda: False)
    args = 'sweep', '--bs', '16,64', '--device', 'cuda', '--dry-run'
    assert call(*args, '--on', 'slurm').exit_code==0
    for on in ([], ['--on', 'gpus']): refused(call(*args, *on), 'cuda')


@pytest.mark.parametrize('form', ['json', 'csv'])
def test_a_dry_run_has_no_table(call, form): refused(call('sweep', '--device', 'cpu', '--dry-run', f'--{form}'), f'Leave out --{form}')


@pytest.mark.parametrize('args,says', [
    (['--size', '3'], 'size must be'), (['--max-images', '3'], 'max_images=3 is too few'), (['--dataset', 'one'], 'only one class'),
    (['--out', 'file'], 'another kind')])
def test_a_dry_run_refuses_what_the_sweep_would(tmp_path, call, args, says):
    from PIL import Image
    (tmp_path/'file').write_text('mine')
    (tmp_path/'one'/'cats').mkdir(parents=True)
    Image.new('L', (8, 8)).save(tmp_path/'one'/'cats'/'a.png')
    refused(call('sweep', '--device', 'cpu', '--dry-run', *args), says)


@pytest.mark.parametrize('args, says', [
    (['--slurm', 'time=60'], "has options for on='slurm'"), (['--on', 'slurm', '--device', 'auto'], "Name one: device='cuda'"),
    (['--on', 'slurm', '--slurm', 'time=1:00:00'], 'It is in minutes'), (['--on', 'gpus'], "trials on one GPU, device='cuda', not cpu")])
def test_jobs_are_refused_before_any_starts(tmp_path, call, args, says):
    pytest.importorskip('submitit')
    refused(call('sweep', '--bs', '16', '--device', 'cpu', *args), says)
    assert not (tmp_path/'runs').exists()


@pytest.mark.parametrize('option', ['--html', '--json', '--trace'])
def test_gain_refuses_a_folder_for_a_file_before_it_measures(call, tmp_path, option):
    done = call('gain', 'no_module:f', option, tmp_path)
    assert done.exit_code==2 and option in done.output and 'is a directory' in done.output
