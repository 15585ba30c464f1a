"The command line as scripts and students meet it: in a process of its own"
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from click.testing import CliRunner

from gpubench.cli import cli
from gpubench.ground.core import find_devices
from gpubench.ground.record import read_records
from helpers import root, write_lab
from made_up_records import folder_of, visit, visits

def start(*args, cwd=None, preexec_fn=None):
    "Start `gpubench`"
    env = {k: v for k,v in os.environ.items() if k!='PYTEST_CURRENT_TEST'}
    env |= dict(PYTHONPATH=str(root), PYTHONIOENCODING='utf-8')
    return subprocess.Popen(
        [sys.executable, '-c', 'from gpubench.cli import main; main()', *map(str, args)], cwd=cwd,
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding='utf-8',
        preexec_fn=preexec_fn)

def gpubench(*args, **kwargs):
    "Run it to its end: exit code, output, and errors without that of a busy machine"
    p = start(*args, **kwargs)
    try: out, err = p.communicate(timeout=600)
    finally: p.kill()
    return p.returncode, out, re.sub('^WARNING: Other programs use .*\n', '', err, flags=re.M)

@pytest.fixture
def call(tmp_path, monkeypatch):
    "The same in this process, in an empty folder: quicker where nothing heavy is to happen"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', sys.path[:])
    return lambda *args: CliRunner().invoke(cli, [str(o) for o in args], prog_name='gpubench')

def refused(said, words): # exit code 2, and a message instead of a traceback
    found = said.exit_code, words in said.stderr, 'Traceback' in said.stderr
    assert found==(2, True, False), said.stderr
    assert isinstance(said.exception, SystemExit)

@pytest.fixture
def labs(tmp_path): return tmp_path/'labs'


# run

RECORD_ONE = f'from gpubench.ground.record import append_record\nappend_record(out, {visit()!r})'

@pytest.mark.slow
def test_a_run_ends_with_a_table_and_a_report(labs, tmp_path):
    write_lab(labs, '01_small', 'from gpubench.ground.record import append_record\nfor v in range(n):\n'
              f'    append_record(out, {visit()!r} | dict(visit=v, seed=seed, lr=lr))',
              extra='n: int = 1  # visits\nlr: float = .1')
    (tmp_path/'p.yaml').write_text('seed: 3\n01_small:\n  n: 4\n  lr: .5\n')
    code, out, err = gpubench('run', '--labs', labs, '-f', 'p.yaml', '-p', 'n=3', '-p', 'seed=5',
                              '--no-progress', cwd=tmp_path)
    assert (code, err)==(0, '')
    [folder] = (tmp_path/'runs').iterdir()
    assert (folder/'01_small.ipynb').is_file() and (folder/'report.html').as_uri() in out
    found = read_records(folder)[['visit', 'seed', 'lr']].values.tolist()
    assert found==[[0, 5, .5], [1, 5, .5], [2, 5, .5]] and 'made-up net' in out

@pytest.mark.parametrize('failed,code', [(True, 1), (False, 0)])
def test_a_lab_that_fails_has_its_exit_code(labs, call, monkeypatch, failed, code):
    from gpubench.course import labs as library
    def run(jobs, out, *args):
        for o in jobs: yield library.Outcome(o, out/o.notebook, 'failed' if failed else 'ok')
    monkeypatch.setattr(library, 'run_jobs', run)
    write_lab(labs, '01_small', 'print(1)')
    said = call('run', '--labs', labs, '--out', 'mine', '--no-progress')
    assert said.exit_code==code and ('repeat the command with --out' in said.stdout)==failed

@pytest.mark.parametrize('args,says', [
    (['01_smal'], "Did you mean '01_small'?"), (['-p', 'sed=1'], "Did you mean 'seed'?"),
    (['-p', 'seed'], 'form NAME=VALUE'), (['-p', 'device=cpu'], '--device'),
    (['--device', 'gpu'], "no device 'gpu'"), (['-f', 'none.yaml'], 'parameters in none.yaml'), (['-p', 'dataset=digit'], "Did you mean 'digits'?"), (['--labs', 'empty'], 'no labs in empty'),
    (['--out', 'file'], 'Cannot write'), (['--out', 'file/below'], 'Cannot write'),
    (['--timeout', '0'], "Invalid value for '--timeout'")])
def test_a_wrong_request_is_refused_before_anything_runs(labs, tmp_path, call, args, says):
    write_lab(labs, '01_small', 'print(1)', extra="dataset: str = 'digits'")
    (tmp_path/'file').write_text('mine')
    refused(call('run', '--labs', labs, '--no-progress', *args), says)
    assert not (tmp_path/'runs').exists() and (tmp_path/'file').read_text()=='mine'

def test_a_second_one_on_a_device_leaves_nothing(labs, tmp_path, call):
    from gpubench.run.process import device_locks
    write_lab(labs, '01_small', 'print(1)')
    (tmp_path/'mine').mkdir()
    with device_locks(find_devices()[-1:]):
        for args in (['run', '--labs', labs], ['run', '--labs', labs, '--out', 'new/deep'], ['sweep']):
            refused(call(*args, '--no-progress'), 'running')
    assert not (tmp_path/'runs').exists() and not (tmp_path/'new').exists()

def test_a_busy_machine_is_told_at_the_start(labs, call, monkeypatch):
    from gpubench.course import labs as library
    from gpubench.watch import doctor
    def stop(*args, **kwargs): raise KeyboardInterrupt
    monkeypatch.setattr(library, 'run_jobs', stop)
    write_lab(labs, '01_small', 'print(1)')
    for load in (.6, .02, None):
        monkeypatch.setattr(doctor, 'cpu_load', lambda: load)
        said = call('run', '--labs', labs, '--no-progress', '--out', 'mine')
        assert ('WARNING: Other programs use 60% of the CPU' in said.stderr)==(load==.6), said.output
        assert said.exit_code==130

@pytest.mark.slow
@pytest.mark.skipif(os.name=='nt', reason='no such pipes')
def test_whoever_reads_may_go(labs, tmp_path):
    "`| head -1`: all labs run, and the report is there"
    write_lab(labs, '01_small', RECORD_ONE)
    p = start('run', '--labs', labs, '--out', tmp_path/'out', '--device', 'cpu')
    p.stderr.close()
    assert 'Results go to' in p.stdout.readline()
    p.stdout.close()
    assert p.wait(timeout=120)==0 and (tmp_path/'out'/'report.html').is_file()

@pytest.mark.slow
@pytest.mark.skipif(os.name=='nt', reason='no such descriptors')
def test_without_stdout_and_stderr(labs, tmp_path):
    "As a daemon starts it"
    write_lab(labs, '01_small', RECORD_ONE)
    p = start('run', '--labs', labs, '--out', tmp_path/'out', '--device', 'cpu',
              preexec_fn=lambda: (os.close(1), os.close(2)))
    assert p.wait(timeout=120)==0 and (tmp_path/'out'/'report.html').is_file()
    assert nbformat.read(tmp_path/'out'/'01_small.ipynb', 4).metadata.gpubench


# sweep

@pytest.mark.slow
def test_a_sweep_writes_records_and_a_report(tmp_path):
    args = ('sweep', '--bs', '128,256', '--max-images', 400, '--repeats', 2, '--device', 'cpu',
            '--no-progress', '--out', 'mine')
    code, out, err = gpubench(*args, cwd=tmp_path)
    assert (code, err)==(0, '') and 'lenet on digits' in out
    df = read_records(tmp_path/'mine')
    assert sorted(zip(df.bs, df.visit))==[(128, 0), (128, 1), *((256, i) for i in range(4))]
    assert (df.status=='ok').all() and (df.max_images==400).all() and df.twin.sum()==2  # the A/A pair
    assert (tmp_path/'mine'/'report.html').is_file()
    file = tmp_path/'mine'/'records.jsonl'
    file.write_text(''.join(file.read_text().splitlines(keepends=True)[:4]))
    assert gpubench(*args, cwd=tmp_path)[0]==0 and len(read_records(tmp_path/'mine'))==6

@pytest.mark.slow
def test_a_network_of_ones_own(tmp_path):
    (tmp_path/'my_helper.py').write_text('def half(x): return x/2')
    (tmp_path/'my_network.py').write_text('''from torch import nn
class Half(nn.Module):
    def forward(self, x):
        from my_helper import half              # while it trains
        return half(x)
def make(n_classes=10, n_in=3):
    return nn.Sequential(Half(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16*n_in, n_classes))
''')
    code, _, err = gpubench('sweep', '--model', 'my_network:make', '--max-images', 200, '--repeats', 1,
                            '--device', 'cpu', '--no-progress', '--out', 'mine', cwd=tmp_path)
    assert code==0, err
    assert read_records(tmp_path/'mine').model.tolist()==['my_network:make']

def test_a_visit_that_fails_has_its_exit_code(tmp_path, call, monkeypatch):
    from gpubench.run import sweep as library
    def made(todo, out, **kwargs): return read_records(folder_of(out, visits())).assign(status='error')
    monkeypatch.setattr(library, 'sweep', made)
    said = call('sweep', '--device', 'cpu', '--out', 'mine')
    assert said.exit_code==1 and 'made-up net on made-up images' in said.stdout

def test_a_stopped_sweep_says_what_it_kept(call, monkeypatch):
    from gpubench.run import sweep as library
    def stop(*args, **kwargs): raise KeyboardInterrupt('Stopped by Ctrl-C after 2 of 6 visits.')
    monkeypatch.setattr(library, 'sweep', stop)
    said = call('sweep', '--device', 'cpu', '--out', 'mine')
    assert said.exit_code==130 and 'after 2 of 6 visits' in said.stderr

def test_every_option_reaches_the_sweep(call, monkeypatch):
    from gpubench.run import sweep as library
    given = {}
    def stop(todo, **kwargs):
        given.update(kwargs, trials={(o.bs, o.seed, o.n_epoch, o.size) for o in todo})
        raise KeyboardInterrupt
    monkeypatch.setattr(library, 'sweep', stop)
    call('sweep', '--bs', '8,16', '--size', 28, '--epochs', 2, '--device', 'cpu', '--seed', 3,
         '--repeats', 4, '--timeout', 60, '--retry-failed', '--monitor', '--wait', '--no-progress',
         '--out', 'mine', '--on', 'slurm', '--slurm', 'time=30', '--slurm', 'partition=gpu',
         '--slurm', 'exclusive=true')
    assert Path(given.pop('out')).name=='mine'
    assert given==dict(trials={(8, 3, 2, 28), (16, 3, 2, 28)}, seed=3, repeats=4, timeout_s=60,
                       retry_failed=True, monitor=True, wait=True, progress=False, on='slurm',
                       slurm=dict(time=30, partition='gpu', exclusive=True))

@pytest.mark.parametrize('args,says', [
    (['--dataset', 'digit'], "Did you mean 'digits'?"), (['--bs', '-16'], 'not -16'),
    (['--bs', '16,x'], 'form N,N'), (['--loader', 'file'], "Did you mean 'files'?"),
    (['--loader', 'cached', '--n-workers', '2'], 'has its own processes, so n_workers=2'),
    (['--precision', 'fp8'], 'fp8'), (['--repeats', '0'], 'repeats'), (['--epochs', '0'], 'n_epoch'),
    (['--device', 'cpuu'], "Did you mean 'cpu'?"), (['--out', 'file'], 'Records cannot go to'),
    (['--dataset', 'one'], 'one')])
def test_a_wrong_sweep_is_refused(tmp_path, call, args, says):
    (tmp_path/'file').write_text('mine')
    (tmp_path/'one'/'cats').mkdir(parents=True)
    refused(call('sweep', '--no-progress', *args), says)
    assert not (tmp_path/'runs').exists()

# compare, report and gain

def test_other_work_is_told_and_nothing_is_refused(tmp_path, call):
    cpu = folder_of(tmp_path/'cpu', visits(devices=['cpu']))
    other = folder_of(tmp_path/'other', visits(devices=['cuda'], n_images=640, n_steps=10))
    assert 'NO: steps' in call('compare', cpu, other).stdout
    for args,says in [(['compare', cpu], 'nothing to compare it with'), (['compare', cpu, tmp_path/'none'], 'no records'),
                      (['report', __file__], 'no records')]: refused(call(*args), says)

def test_gain_prints_json(call, monkeypatch):
    from gpubench.run import models
    class Made: # what `gain` returns
        def __init__(self, *given): self.given = given
        def as_dict(self): return dict(given=self.given)
        def idle(self): return pd.DataFrame(dict(ms=[1.5]))
        memory = idle
    monkeypatch.setattr(models, 'find_factory', lambda name: name)
    monkeypatch.setattr(import_module('gpubench.show.gain'), 'gain', Made)
    assert json.loads(call('gain', 'my:f', '--epochs', 3, '--json').stdout)==dict(given=['my:f', 3, 'fit_one_cycle'], idle=[dict(ms=1.5)], memory=[dict(ms=1.5)])
