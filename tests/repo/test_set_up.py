"""Set-up: at once when it is done, mended when it was not, a sentence when it cannot be done. No network: a stand-in for pip"""
import errno, json, os, shutil, signal, subprocess, sys, time
from pathlib import Path

import pytest

# what `python -m pip install …` becomes: notes the call, waits for as long as `hold` exists, installs the library's name
fake_pip = '''
import os, sys, sysconfig, time
from pathlib import Path
here = Path(os.environ['FAKE_PIP'])
with open(here/'calls', 'a') as f: f.write(' '.join(sys.argv[1:])+chr(10))
while (here/'hold').exists(): time.sleep(.02)
if (here/'fail').exists(): sys.exit('no such package')
info = Path(sysconfig.get_path('purelib'), 'gpubench-0.0.0.dist-info'); info.mkdir(exist_ok=True)
(info/'METADATA').write_text('Metadata-Version: 2.1\\nName: gpubench\\nVersion: 0.0.0\\n')
'''
wait_s = 60                                          # far more than any step here takes


class Checkout:
    "A copy of what set-up reads, with a pip that does nothing"
    def __init__(self, tree, folder):
        self.tree, self.fake, self.venv = tree, folder, tree/'.venv'
        (folder/'path'/'pip').mkdir(parents=True)
        (folder/'path'/'pip'/'__main__.py').write_text(fake_pip)
        (folder/'path'/'pip'/'__init__.py').touch()
        self.env = {k: v for k,v in os.environ.items() if k not in ('PYTHON', 'VENV', 'MAKEFLAGS', 'MAKELEVEL', 'MFLAGS', 'ARGS')}
        self.env |= dict(PYTHONPATH=str(folder/'path'), FAKE_PIP=str(folder), PATH=f'{Path(sys.executable).parent}:{os.environ["PATH"]}')
        (folder/'calls').touch()
    def command(self, extra): return [sys.executable, self.tree/'tools'/'set_up.py', extra]
    def set_up(self, extra='plain'):
        return subprocess.run(self.command(extra), env=self.env, capture_output=True, text=True, timeout=wait_s)
    def start(self, extra='plain'):
        return subprocess.Popen(self.command(extra), env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                start_new_session=True)
    def kill(self, process):
        "As a closed terminal or a lost power cord does it: no chance to tidy up"
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=wait_s)
    def wait_for(self, path):
        end = time.monotonic()+wait_s
        while not path.exists() or not path.stat().st_size:
            if time.monotonic() > end: raise TimeoutError(f'{path} did not come')
            time.sleep(.02)
    @property
    def calls(self): return (self.fake/'calls').read_text().splitlines()
    @property
    def stamp(self):
        file = self.venv/'gpubench-stamp.json'
        return json.loads(file.read_text()) if file.exists() else None

@pytest.fixture
def checkout(tree, tmp_path): return Checkout(tree, tmp_path/'fake')


def test_second_call_does_nothing(checkout):
    first = checkout.set_up()
    assert first.returncode==0, first.stderr
    assert 'Setting up .venv' in first.stdout
    assert checkout.calls==['install -e .']
    second = checkout.set_up()
    assert (second.returncode, second.stdout, second.stderr)==(0, '', '')
    assert checkout.calls==['install -e .']

def test_killed_while_installing(checkout):
    (checkout.fake/'hold').touch()
    process = checkout.start()
    checkout.wait_for(checkout.fake/'calls')
    checkout.kill(process)
    assert checkout.stamp is None
    (checkout.fake/'hold').unlink()
    (checkout.venv/'left-behind').touch()
    res = checkout.set_up()
    assert res.returncode==0, res.stderr
    assert 'starting it over' in res.stdout and checkout.stamp['extra']=='plain'
    assert not (checkout.venv/'left-behind').exists()

def test_killed_while_making_the_environment(checkout):
    process = checkout.start()
    checkout.wait_for(checkout.venv/'pyvenv.cfg')
    checkout.kill(process)
    assert checkout.stamp is None and checkout.calls==[]
    assert checkout.set_up().returncode==0
    assert checkout.stamp['extra']=='plain'

def test_failed_install_then_mended(checkout):
    (checkout.fake/'fail').touch()
    res = checkout.set_up()
    assert res.returncode==1 and 'The set-up failed' in res.stderr and 'Traceback' not in res.stderr
    (checkout.fake/'fail').unlink()
    assert checkout.set_up().returncode==0

def test_interrupted_update_starts_over(checkout):
    assert checkout.set_up().returncode==0
    (checkout.fake/'fail').touch()
    assert checkout.set_up('lab').returncode==1
    assert checkout.stamp is None                    # half of `lab` may lie there
    (checkout.fake/'fail').unlink()
    assert 'starting it over' in checkout.set_up().stdout

def test_a_larger_extra_serves_a_smaller_one(checkout):
    checkout.set_up('lab')
    checkout.set_up('plain')
    assert checkout.calls==['install -e .[lab]']
    checkout.set_up('dev')
    assert checkout.calls[1:]==['install -e .[dev]']
    checkout.set_up('int8')
    assert len(checkout.calls)==2
    settings = checkout.tree/'settings.ini'
    settings.write_text(settings.read_text()+'\n# changed\n')
    assert 'up to date' in checkout.set_up('plain').stdout
    assert checkout.calls[2:]==['install -e .[dev]'] # keeps what it was made for

def test_int8_is_added_to_what_lab_has(checkout):
    checkout.set_up('lab')
    res = checkout.set_up('int8')
    assert res.returncode==0 and 'up to date' in res.stdout
    assert checkout.calls==['install -e .[lab]', 'install -e .[lab,int8]'] and checkout.stamp['extra']=='int8'

def test_damage_is_noticed(checkout):
    checkout.set_up()
    moved = checkout.tree.with_name('moved')
    checkout.tree.rename(moved)
    checkout.tree, checkout.venv = moved, moved/'.venv'
    assert 'starting it over' in checkout.set_up().stdout                    # moved: its scripts name the old folder
    for o in (checkout.venv/'bin').glob('python*'): o.unlink()
    (checkout.venv/'bin'/'python').symlink_to('/nonexistent/python3')        # its Python was removed
    assert 'starting it over' in checkout.set_up().stdout
    shutil.rmtree(next(checkout.venv.glob('lib/python*/site-packages/gpubench-*')))
    assert 'starting it over' in checkout.set_up().stdout                    # the library was taken out
    (checkout.venv/'gpubench-stamp.json').write_text('{"extra": "pl')        # a torn stamp
    assert 'starting it over' in checkout.set_up().stdout
    assert checkout.set_up().stdout==''

def test_two_at_once(checkout):
    (checkout.fake/'hold').touch()
    first = checkout.start()
    checkout.wait_for(checkout.fake/'calls')
    second = checkout.start()
    assert 'waiting for it' in second.stdout.readline()
    (checkout.fake/'hold').unlink()
    assert first.wait(wait_s)==0 and second.wait(wait_s)==0
    first.communicate(), second.communicate()
    assert checkout.calls==['install -e .']

def test_the_environment_of_an_image(checkout):
    "It is ready as it is, and is never started over: what is stale or broken there is mended by building the image again"
    checkout.set_up('dev')
    shutil.rmtree(checkout.fake/'path'/'pip')        # no stand-in any more: a call of pip would fail
    (checkout.venv/'gpubench-stamp.json').unlink()
    image = [sys.executable, checkout.tree/'tools'/'image.py']
    subprocess.run([*image, 'stamp', '--venv', checkout.venv], check=True)
    assert checkout.stamp['extra']=='dev' and checkout.stamp['image']
    for o in ('plain', 'lab', 'dev'): assert (checkout.set_up(o).returncode, checkout.set_up(o).stderr)==(0, '')
    settings, versions, before = checkout.tree/'settings.ini', checkout.tree/'tools'/'image_constraints.txt', sorted(checkout.venv.rglob('*'))
    settings.write_text(settings.read_text()+'\n# changed\n')                 # nothing that an image holds
    assert checkout.set_up('dev').returncode==0
    stale = []
    for file,old,new in [(settings, 'image_torch = ', 'image_torch = torch==1.0 '), (versions, 'fastai==', 'fastai==99.')]:
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        stale.append(checkout.set_up())
        file.write_text(text)
    assert checkout.set_up().returncode==0
    for o in (checkout.venv/'bin').glob('python*'): o.unlink()
    for res in (*stale, checkout.set_up()):
        assert res.returncode==1 and 'Rebuild Container' in res.stderr and 'docker compose -f docker-compose.cpu.yml build' in res.stderr
        assert len(res.stderr.splitlines())==1
    assert len(sorted(checkout.venv.rglob('*')))==len([o for o in before if not o.name.startswith('python') or o.parent.name!='bin'])

def test_a_folder_that_may_not_be_written(checkout, monkeypatch):
    "As in a container, whose environment belongs to root; root itself may write anywhere, so the refusal is planted"
    sys.path.insert(0, str(checkout.tree/'tools'))
    monkeypatch.delitem(sys.modules, 'set_up', raising=False)
    try:
        import set_up
        def refuse(code):
            def raises(venv): raise OSError(code, 'no', f'{venv}.lock')
            return raises
        monkeypatch.setattr(sys, 'argv', ['set_up.py', 'plain'])
        for code in (errno.EACCES, errno.EROFS):
            monkeypatch.setattr(set_up, 'only_one', refuse(code))
            with pytest.raises(SystemExit, match=r'\.venv\.lock may not be written by this user'): set_up.main()
        monkeypatch.setattr(set_up, 'only_one', refuse(errno.ENOSPC))
        with pytest.raises(OSError, match='no'): set_up.main()
    finally:
        sys.path.pop(0)
        sys.modules.pop('set_up', None)

def find_python(checkout, folder, **env):
    return subprocess.run(['/bin/sh', checkout.tree/'tools'/'find-python'], cwd=checkout.tree, capture_output=True, text=True,
                          env=dict(PATH=f'{folder}:/nowhere' if folder else '/nowhere', **env))

def pretend(folder, name, state, version):
    "A Python that answers the probe as one of that version would"
    folder.mkdir(exist_ok=True)
    (folder/name).write_text(f'#!/bin/sh\necho {state} {version}\n')
    (folder/name).chmod(0o755)

@pytest.fixture
def tools_only(tmp_path):
    "A PATH with what the script calls, and no Python"
    folder = tmp_path/'bin'
    folder.mkdir()
    for o in ('sed', 'dirname'): (folder/o).symlink_to(shutil.which(o))
    return folder

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
    assert find().stdout.strip()==str(tools_only/'python3.11')               # python3 is too old, another one serves
    assert 'has python3 3.9.2' in find(PYTHON='python3').stderr              # asked for by name: no other in its place
    assert 'is not a Python that runs here' in find(PYTHON='/no/such/python').stderr

def test_the_probe_is_true_of_this_python(checkout):
    res = subprocess.run(['/bin/sh', checkout.tree/'tools'/'find-python'], capture_output=True, text=True, cwd=checkout.tree,
                         env=dict(os.environ, PYTHON=sys.executable))
    assert res.stdout.strip()==sys.executable, res.stderr
    settings = checkout.tree/'settings.ini'
    settings.write_text(settings.read_text().replace('min_python = 3.11', 'min_python = 9.9'))
    res = subprocess.run(['/bin/sh', checkout.tree/'tools'/'find-python'], capture_output=True, text=True, cwd=checkout.tree,
                         env=dict(os.environ, PYTHON=sys.executable))
    assert res.returncode==1 and 'needs Python 9.9 or newer' in res.stderr

def test_make_bench_runs_the_main_job(checkout):
    "The whole chain of `make bench`: find Python, set up, run; the second call installs nothing"
    assert checkout.set_up().returncode==0
    (checkout.venv/'bin'/'gpubench').write_text('#!/bin/sh\necho "ran: $*"\n')
    (checkout.venv/'bin'/'gpubench').chmod(0o755)
    res = subprocess.run(['make', 'bench', 'ARGS=--profile quick'], cwd=checkout.tree, env=checkout.env, capture_output=True, text=True)
    assert res.stdout.strip()=='ran: run 01_cpu_vs_gpu 02_batch_size --profile quick', res.stderr
    assert len(checkout.calls)==1
