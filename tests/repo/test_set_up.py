"""Set-up: at once when it is done, started over when it was interrupted, one sentence when it can't be done. Stand-ins replace uv, pip and venv"""
import os, re, shutil, signal, subprocess, sys, time
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from helpers import needed, pythons, root, text

wait_s = 60                                          # far more than any step here takes
# `python -m pip|uv …` notes the call, waits while the file `hold` exists, fails if the file `uv fails` or `pip fails` does, else installs
fake = '''
import os, sys, sysconfig, time
from pathlib import Path
name, here, args = Path(__file__).parent.name, Path(os.environ['FAKE']), sys.argv[1:]
if args==['config', 'list']: sys.exit(print((here/'config').read_text()) if (here/'config').exists() else 0)
with open(here/'calls', 'a') as f: f.write(' '.join([name, *args]).replace(sys.executable, 'PYTHON')+chr(10))
while (here/'hold').exists(): time.sleep(.02)
if (here/f'{name} fails').exists() and args[-1]!='uv': sys.exit(f'no such package for {name}')
(here/'env').write_text('\\n'.join(f'{k}={v}' for k,v in os.environ.items()))
info = Path(sysconfig.get_path('purelib'), 'gpubench_kit-0.0.0.dist-info'); info.mkdir(exist_ok=True)
(info/'METADATA').write_text('Metadata-Version: 2.1\\nName: gpubench-kit\\nVersion: 0.0.0\\n')
'''
fake_venv = '''
import importlib.util, sys, sysconfig
spec = importlib.util.spec_from_file_location('real', sysconfig.get_path('stdlib')+'/venv/__init__.py')
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
real.EnvBuilder(clear=True, symlinks=True).create(sys.argv[-1])
'''
get_uv, by_uv = 'pip install -c constraints.txt uv', 'uv pip install --python PYTHON -b constraints.txt '


class Checkout:
    "What set-up reads of a checkout, in a folder of its own"
    def __init__(self, folder):
        self.tree, self.fake, self.venv = folder/'tree', folder/'fake', folder/'tree'/'.venv'
        (self.tree/'tools').mkdir(parents=True)
        for o in ('settings.ini', 'constraints.txt', 'Makefile', 'tools/set_up.py', 'tools/find-python'): shutil.copy(root/o, self.tree/o)
        for o in ('pip', 'uv'):
            (self.fake/'path'/o).mkdir(parents=True)
            (self.fake/'path'/o/'__main__.py').write_text(fake)
            (self.fake/'path'/o/'__init__.py').touch()
        (self.fake/'path'/'venv.py').write_text(fake_venv)
        (self.fake/'calls').touch()
        drop = 'PYTHON', 'VENV', 'MAKEFLAGS', 'MAKELEVEL', 'MFLAGS', 'ARGS', 'SSL_CERT_FILE', 'UV_SYSTEM_CERTS', 'UV_DEFAULT_INDEX'
        self.env = {k: v for k,v in os.environ.items() if k not in drop}
        self.env |= dict(PYTHONPATH=str(self.fake/'path'), FAKE=str(self.fake), PATH=f'{Path(sys.executable).parent}:{os.environ["PATH"]}')
    def command(self, *args): return [sys.executable, self.tree/'tools'/'set_up.py', *args]
    def set_up(self, *args, **env):
        return subprocess.run(self.command(*(args or ['plain'])), env=self.env | env, capture_output=True, text=True, timeout=wait_s)
    def start(self):
        return subprocess.Popen(self.command('plain'), env=self.env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    def wait_for_call(self):
        end = time.monotonic()+wait_s
        while not self.calls:
            if time.monotonic() > end: raise TimeoutError('nothing was installed')
            time.sleep(.02)
    @property
    def calls(self): return (self.fake/'calls').read_text().splitlines()
    @property
    def installed(self): return [o.split(' -e ')[1].split()[0] for o in self.calls if ' -e ' in o]

@pytest.fixture
def checkout(tmp_path): return Checkout(tmp_path)


# ---- the environment

up_to_date = '.venv is up to date.\n'

def test_second_call_does_nothing(checkout):
    first = checkout.set_up()
    assert first.returncode==0, first.stderr
    assert re.fullmatch(r'Setting up \.venv: .*Details: (\S+)\n  environment: \d+ s\n  uv: \d+ s\n  packages: \d+ s\n  first import: .*\n', first.stdout)
    assert checkout.calls==[get_uv, by_uv+'-e . -c constraints.txt']
    second = checkout.set_up()
    assert (second.returncode, second.stdout, second.stderr)==(0, up_to_date, '') and len(checkout.calls)==2

def test_killed_while_installing(checkout):
    "As a closed terminal or a lost power cord does it: no chance to tidy up"
    (checkout.fake/'hold').touch()
    process = checkout.start()
    checkout.wait_for_call()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=wait_s)
    (checkout.fake/'hold').unlink()
    (checkout.venv/'left-behind').touch()
    assert 'Starting over' in checkout.set_up().stdout and not (checkout.venv/'left-behind').exists()
    assert checkout.set_up().stdout==up_to_date

def test_failed_update_starts_over(checkout):
    checkout.set_up()
    for o in ('uv fails', 'pip fails'): (checkout.fake/o).touch()
    res = checkout.set_up('lab')
    assert res.returncode==1 and 'no such package for pip' in res.stderr and 'Traceback' not in res.stderr
    [log] = set(re.findall(r'\S+\.log', res.stderr))
    assert 'no such package for uv' in Path(log).read_text()
    for o in ('uv fails', 'pip fails'): (checkout.fake/o).unlink()
    assert 'Starting over' in checkout.set_up().stdout       # half of `lab` may lie there

def test_pip_installs_where_uv_fails(checkout):
    (checkout.fake/'uv fails').touch()
    res = checkout.set_up('lab')
    assert res.returncode==0 and 'packages: 0 s, failed' in res.stdout and 'uv could not install' in res.stdout
    assert checkout.calls[1:]==[by_uv+'-e .[lab] -c constraints.txt', 'pip install -e .[lab] -c constraints.txt']
    assert checkout.set_up('lab').stdout==up_to_date

def test_uv_reaches_what_pip_reaches(checkout):
    (checkout.fake/'config').write_text(":env:.cert='/mine.pem'\n:env:.index-url='https://a.example'\nglobal.index-url='https://b.example'\n")
    checkout.set_up()
    got = (checkout.fake/'env').read_text().splitlines()
    assert {'UV_DEFAULT_INDEX=https://a.example', 'SSL_CERT_FILE=/mine.pem', 'UV_SYSTEM_CERTS=1', 'PIP_USER=0'} <= set(got)
    shutil.rmtree(checkout.venv)
    checkout.set_up(UV_DEFAULT_INDEX='https://c.example', UV_SYSTEM_CERTS='0')
    assert {'UV_DEFAULT_INDEX=https://c.example', 'UV_SYSTEM_CERTS=0'} <= set((checkout.fake/'env').read_text().splitlines())

def test_an_update_keeps_what_is_there(checkout):
    for o in ('lab', 'plain', 'int8', 'dev', 'lab'): checkout.set_up(o)
    assert checkout.installed==['.[lab]', '.[lab,int8]', '.[dev]'] and '--compile-bytecode' in checkout.calls[-1]
    ini, lock = checkout.tree/'settings.ini', checkout.tree/'constraints.txt'
    ini.write_text('# only a comment\n'+ini.read_text())
    assert checkout.set_up().stdout==up_to_date
    ini.write_text(ini.read_text().replace('\nrequirements =\n', '\nrequirements = another\n'))
    assert 'Updating' in checkout.set_up().stdout
    lock.write_text(lock.read_text()+'another==1.0\n')
    assert 'Updating' in checkout.set_up().stdout
    assert checkout.installed[3:]==['.[dev]', '.[dev]']

def test_damage_is_noticed(checkout):
    checkout.set_up()
    moved = checkout.tree.with_name('moved')
    checkout.tree.rename(moved)
    checkout.tree, checkout.venv = moved, moved/'.venv'
    assert 'Starting over' in checkout.set_up().stdout                       # moved: its scripts name the old folder
    for o in (checkout.venv/'bin').glob('python*'): o.unlink()
    (checkout.venv/'bin'/'python').symlink_to('/nonexistent/python3')        # its Python was removed
    assert 'Starting over' in checkout.set_up().stdout
    shutil.rmtree(next(checkout.venv.glob('lib/python*/site-packages/gpubench_kit-*')))
    assert 'Starting over' in checkout.set_up().stdout                       # the library was removed
    (checkout.venv/'gpubench-stamp.json').write_text('{"extra": "pl')        # a torn stamp
    assert 'Starting over' in checkout.set_up().stdout
    assert checkout.set_up().stdout==up_to_date

def test_two_at_once(checkout):
    (checkout.fake/'hold').touch()
    first = checkout.start()
    checkout.wait_for_call()
    second = checkout.start()
    assert 'waiting for it' in second.stdout.readline()
    (checkout.fake/'hold').unlink()
    assert first.communicate(timeout=wait_s) and second.communicate(timeout=wait_s)==(up_to_date, None)
    assert (first.returncode, second.returncode, checkout.installed)==(0, 0, ['.'])

def test_the_environment_of_an_image(checkout):
    "It is ready for everything, and never touched: what is outdated or broken there wants a new image"
    checkout.set_up('dev')
    assert checkout.set_up('image', '--venv', '.venv').returncode==0
    n_calls, lock = len(checkout.calls), checkout.tree/'constraints.txt'
    for o in ('plain', 'lab', 'dev'): assert (checkout.set_up(o).returncode, checkout.set_up(o).stderr)==(0, '')
    versions = lock.read_text()
    lock.write_text(versions.replace('fastai==', 'fastai==99.'))
    outdated = checkout.set_up()
    lock.write_text(versions)
    for o in (checkout.venv/'bin').glob('python*'): o.unlink()
    for res in (outdated, checkout.set_up()):
        assert res.returncode==1 and 'Rebuild Container' in res.stderr and 'docker compose -f docker-compose.cpu.yml build' in res.stderr
    assert len(checkout.calls)==n_calls

def test_a_folder_that_cannot_be_written(checkout):
    (checkout.tree/'file').touch()
    res = checkout.set_up('plain', '--venv', 'file/venv')
    assert res.returncode==1 and 'VENV=' in res.stderr and 'Traceback' not in res.stderr

# ---- the lock

def pins(python, platform):
    "Version by name, for one kind of machine"
    here = dict(python_version=python, python_full_version=python+'.9', sys_platform=platform, platform_system=platform.title(),
                platform_machine='x86_64', os_name='nt' if platform=='win32' else 'posix', platform_python_implementation='CPython',
                implementation_name='cpython')
    found = [Requirement(o) for o in text('constraints.txt').splitlines() if not o.startswith('#')]
    found = [o for o in found if not o.marker or o.marker.evaluate(here)]
    assert len({o.name for o in found})==len(found)          # no package has two versions on one machine
    return {o.name: str(o.specifier).removeprefix('==') for o in found}

@pytest.mark.parametrize('platform,own', [('linux', 'uvloop'), ('win32', 'pywinpty'), ('darwin', 'appnope')])
@pytest.mark.parametrize('python', pythons())
def test_the_lock_serves_every_machine(python, platform, own):
    found = pins(python, platform)
    for extra in ('', 'lab', 'int8', 'dev'):
        for o in needed(extra): assert o.specifier.contains(found[o.name.replace('_', '-')]), o
    assert own in found
    assert [o for o in found if re.match('nvidia|cuda|triton', o)]==['nvidia-ml-py']     # torch brings its own, other ones for another CUDA

# ---- find-python and make

@pytest.fixture
def tools_only(tmp_path):
    "A PATH with what the script calls, and no Python"
    folder = tmp_path/'bin'
    folder.mkdir()
    for o in ('sed', 'dirname'): (folder/o).symlink_to(shutil.which(o))
    return folder

def find_python(checkout, path, **env):
    return subprocess.run(['/bin/sh', checkout.tree/'tools'/'find-python'], cwd=checkout.tree, capture_output=True, text=True, env=dict(PATH=str(path), **env))

def pretend(folder, name, state, version):
    "A Python that answers the probe as one of that version would"
    (folder/name).write_text(f'#!/bin/sh\necho {state} {version}\n')
    (folder/name).chmod(0o755)

def test_find_python(checkout, tools_only):
    def find(**env): return find_python(checkout, tools_only, **env)
    res = find()
    assert res.returncode==1 and 'no python3 runs on this machine' in res.stderr and res.stdout==''
    pretend(tools_only, 'python3', 'old', '3.9.2')
    res = find()
    assert res.returncode==1 and 'needs Python 3.11 or newer, and this machine has python3 3.9.2' in res.stderr
    assert 'PYTHON=' in res.stderr and len(res.stderr.splitlines())==1
    pretend(tools_only, 'python3.12', 'bare', '3.12.4')
    assert 'sudo apt install python3.12-venv' in find().stderr
    pretend(tools_only, 'python3.11', 'good', '3.11.9')
    assert find().stdout.strip()==str(tools_only/'python3.11')               # python3 is too old, another one will do
    assert 'has python3 3.9.2' in find(PYTHON='python3').stderr              # asked for by name: no other in its place
    assert 'is not a Python that runs here' in find(PYTHON='/no/such/python').stderr

def test_the_probe_is_true_of_this_python(checkout):
    res = find_python(checkout, os.environ['PATH'], PYTHON=sys.executable)
    assert res.stdout.strip()==sys.executable, res.stderr
    file = checkout.tree/'settings.ini'
    file.write_text(file.read_text().replace('python_versions = 3.11', 'python_versions = 9.9'))
    res = find_python(checkout, os.environ['PATH'], PYTHON=sys.executable)
    assert res.returncode==1 and 'needs Python 9.9 or newer' in res.stderr

def test_make_bench_runs_the_main_job(checkout):
    "The whole chain of `make bench`: find Python, set up, run; the second call installs nothing"
    checkout.set_up()
    (checkout.venv/'bin'/'gpubench').write_text('#!/bin/sh\necho "ran: $*"\n')
    (checkout.venv/'bin'/'gpubench').chmod(0o755)
    res = subprocess.run(['make', 'bench', 'ARGS=--profile quick'], cwd=checkout.tree, env=checkout.env, capture_output=True, text=True)
    assert res.stdout.strip()==up_to_date+'ran: run --wait 01_cpu_vs_gpu 02_batch_size --profile quick', res.stderr
    assert checkout.installed==['.']
