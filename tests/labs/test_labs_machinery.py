"Labs are found, checked and executed; planted failures come out as what they are"
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest

from gpubench.course.labs import is_done, prepare_run, run_jobs

from helpers import root, write_lab

@pytest.fixture
def labs(tmp_path): return tmp_path/'labs'

def run(labs, tmp_path, *names, params=(), timeout_s=3600):
    os.environ.pop('PYTEST_CURRENT_TEST', None)  # ipykernel treats its output in another way then
    jobs = prepare_run(names, 'cpu', 'quick', dict(params), folder=labs)
    return list(run_jobs(jobs, tmp_path/'out', timeout_s))

def printed(path):
    return ''.join(o.text for c in nbformat.read(path, 4).cells if c.cell_type=='code'
                   for o in c.outputs if o.output_type=='stream')

def package_env(): return os.environ | dict(PYTHONPATH=str(root), PYTHONIOENCODING='utf-8')


# planted failures

@pytest.mark.slow
def test_a_failure_stops_only_its_lab(labs, tmp_path):
    write_lab(labs, '01_raises', 'print("before")', 'raise KeyError("no such key")', 'print("after")')
    write_lab(labs, '02_dies', 'import os', 'os._exit(9)')
    write_lab(labs, '03_hangs', 'import time', 'time.sleep(300)')
    write_lab(labs, '04_leaves', 'import sys', 'sys.exit(0)', 'print("after")')
    write_lab(labs, '05_good', 'print("fine")')
    *bad, good = run(labs, tmp_path, timeout_s=5)
    assert [o.status for o in bad]==['failed']*4 and good.status=='ok'
    for o,words in zip(bad, ('KeyError: ', 'Kernel died', 'timed out', 'sys.exit')):
        assert words in o.error and not is_done(o.job, tmp_path/'out'), o.error
    assert printed(bad[0].notebook)=='before\n' and printed(good.notebook)=='fine\n'


# going on

@pytest.mark.slow
def test_a_run_goes_on_with_what_failed(labs, tmp_path):
    "In the same folder, with the same code and parameters; whatever differs is executed again"
    notes, mended = tmp_path/'notes', tmp_path/'mended'
    note = f'with open({str(notes)!r}, "a") as f: f.write(f"{{name}}{{seed}} ")'
    write_lab(labs, '01_good', 'name = "good"', note)
    write_lab(labs, '02_bad', 'name = "bad"', note, f'open({str(mended)!r})')
    assert [o.status for o in run(labs, tmp_path)]==['ok', 'failed']
    mended.touch()
    assert [o.status for o in run(labs, tmp_path)]==['done before', 'ok']
    assert [o.status for o in run(labs, tmp_path)]==['done before']*2
    assert [o.status for o in run(labs, tmp_path, params={'02_bad': dict(seed=1)})]==['done before', 'ok']
    assert notes.read_text().split()==['good0', 'bad0', 'bad0', 'bad1']

# what a run may overwrite

def test_a_run_leaves_a_copy_with_answers_alone(labs, tmp_path):
    "Of a lab that is elsewhere"
    write_lab(labs, '01_good', 'print(1)')
    (tmp_path/'out').mkdir()
    mine = tmp_path/'out'/'01_good.ipynb'
    shutil.copy(labs/mine.name, mine)
    before = mine.read_bytes()
    with pytest.raises(ValueError, match='would be overwritten'): run(labs, tmp_path)
    assert mine.read_bytes()==before

def test_labs_of_one_name_do_not_overwrite_each_other(labs, tmp_path):
    "The copies of two students"
    files = [write_lab(tmp_path/o, '01_good', 'print(1)') for o in ('ann', 'bob')]
    write_lab(labs, '01_good', 'print(1)')
    with pytest.raises(ValueError, match='have the same name'): run(labs, tmp_path, *files)
    assert not (tmp_path/'out').exists()


# what reaches a lab

@pytest.mark.slow
def test_the_labs_of_a_run_may_sweep_and_nobody_else_may(labs, tmp_path):
    write_lab(labs, '01_sweeps', 'import os\nfrom gpubench.run.process import HELD, device_locks\n'
              'with device_locks(["cpu"]): print("we may")\n'
              'del os.environ[HELD]                     # as in any other process\n'
              'try: device_locks(["cpu"]).__enter__()\nexcept RuntimeError as e: print("refused")')
    [o] = run(labs, tmp_path)
    assert printed(o.notebook).split()==['we', 'may', 'refused']

@pytest.mark.slow
def test_the_kernel_is_this_python_whatever_is_registered(labs, tmp_path, monkeypatch):
    spec = tmp_path/'jupyter'/'kernels'/'python3'
    spec.mkdir(parents=True)
    argv = ['/nowhere/python', '-m', 'ipykernel_launcher', '-f', '{connection_file}']
    (spec/'kernel.json').write_text(json.dumps(dict(argv=argv, display_name='x', language='python')))
    monkeypatch.setenv('JUPYTER_PATH', str(tmp_path/'jupyter'))
    monkeypatch.setenv('MPLBACKEND', 'Agg')
    write_lab(labs, '01_who', 'import os, sys; print(sys.executable); print(os.environ["MPLBACKEND"])')
    [o] = run(labs, tmp_path)
    assert printed(o.notebook).split()==[sys.executable, 'module://matplotlib_inline.backend_inline']

@pytest.mark.slow
def test_parameters_arrive_as_they_are(labs, tmp_path, monkeypatch):
    "Where the run was started, with a user's own modules"
    (tmp_path/'mine').mkdir()
    (tmp_path/'mine'/'my_network.py').write_text('name = "mine"')
    monkeypatch.chdir(tmp_path/'mine')
    extra = '\n'.join(['sizes: list[int] = [1, 2]', 'limit: int | None = 3', "note: str = 'a # b'",
                       'rate: float = 1.', 'wild: bool = False'])
    write_lab(labs, '01_say', 'import my_network',
              'print([sizes, limit, note, rate, wild, seed, device, my_network.name])', extra=extra)
    note = 'say "it\'s\\n",\n{braces} ü'
    given = dict(sizes='16,64', limit=None, note=note, rate=1, wild='true', seed='7')
    [o] = run_jobs(prepare_run(['1'], 'cpu', 'quick', given, folder=labs), 'out {of} ü')
    assert o.notebook==tmp_path/'mine'/'out {of} ü'/'01_say.ipynb'
    assert eval(printed(o.notebook))==[[16, 64], None, note, 1., True, 7, 'cpu', 'mine']

# stopping by hand

@pytest.mark.slow
@pytest.mark.skipif(os.name=='nt', reason='no signals')
def test_ctrl_c_stops_the_run_and_the_same_command_goes_on(labs, tmp_path):
    kernel, mended = tmp_path/'kernel', tmp_path/'mended'
    write_lab(labs, '01_done', 'print(0)')
    write_lab(labs, '02_long', f'import os, time\nopen({str(kernel)!r}, "w").write(str(os.getpid()))',
              f'time.sleep(0 if os.path.exists({str(mended)!r}) else 300)')
    args = ['run', '--labs', labs, '--out', tmp_path/'out', '--device', 'cpu', '--no-progress']
    p = subprocess.Popen([sys.executable, '-c', 'from gpubench.cli import main; main()', *args],
                         env=package_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while p.poll() is None and not (kernel.exists() and kernel.read_text()): time.sleep(.1)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=120)
    assert (p.returncode, 'Traceback' in err)==(130, False), err
    assert f'--out {tmp_path/"out"}' in out and not psutil.pid_exists(int(kernel.read_text()))
    mended.touch()
    p = subprocess.run(p.args, capture_output=True, text=True, env=package_env())
    assert p.returncode==0 and 'done before 01_done' in p.stdout and 'ok          02_long' in p.stdout
