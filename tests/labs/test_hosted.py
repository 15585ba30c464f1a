"What the install cell does on Colab and Kaggle, and what pip makes of it"
import importlib.metadata, importlib.util, json, os, subprocess, sys
from zipfile import ZipFile

import pytest

from helpers import as_module, needed, root

@pytest.fixture(scope='module')
def hosted(): return as_module(root/'tools'/'hosted.py')

@pytest.fixture
def installed(hosted, monkeypatch):
    "What the cell would install on a host with these packages: the commands of pip, and what the cell says"
    def run(host, code=0, **packages):
        calls, said = [], []
        for o in ('COLAB_RELEASE_TAG', 'KAGGLE_KERNEL_RUN_TYPE'): monkeypatch.delenv(o, raising=False)
        if host: monkeypatch.setenv(host, 'x')
        monkeypatch.setattr(importlib.util, 'find_spec', lambda o: o if o in packages else None)
        monkeypatch.setattr(importlib.metadata, 'version', packages.__getitem__)
        monkeypatch.setattr(subprocess, 'run', lambda cmd: calls.append(cmd) or subprocess.CompletedProcess(cmd, code))
        try: exec(hosted.install, dict(print=lambda *o: said.append(' '.join(o))))
        finally: monkeypatch.undo()
        return calls, said
    return run

def test_the_hosts_torch_stays(installed):
    [cmd], [said] = installed('COLAB_RELEASE_TAG', torch='2.8.0+cu126', torchvision='0.23.0+cu126', numpy='2.0.2')
    assert cmd[:4]==[sys.executable, '-m', 'pip', 'install'] and not {'-U', '--upgrade', '--no-deps', '--force-reinstall'} & set(cmd)
    assert cmd[-3:]==['gpubench-kit @ git+https://github.com/gpubench/gpubench', 'torch==2.8.0+cu126', 'torchvision==0.23.0+cu126']
    assert said.startswith('Installing gpubench') and said.endswith('torch==2.8.0+cu126, torchvision==0.23.0+cu126')

def test_only_there_and_only_once(installed):
    assert installed('', torch='2.8.0')==([], [])                              # somebody's own machine, with another kernel
    assert installed('KAGGLE_KERNEL_RUN_TYPE', gpubench='0.1.0')==([], [])
    [cmd], _ = installed('KAGGLE_KERNEL_RUN_TYPE', numpy='1.26.4')
    assert cmd[-1].startswith('gpubench-kit @')

def test_a_refusal_is_told(installed):
    with pytest.raises(RuntimeError, match='See the message from pip above'):
        installed('KAGGLE_KERNEL_RUN_TYPE', code=1, torch='2.6.0')

# ---- what pip makes of it

def metadata(name, version, needs=()):
    return '\n'.join(['Metadata-Version: 2.1', f'Name: {name}', f'Version: {version}', *(f'Requires-Dist: {o}' for o in needs), ''])

def put_wheel(folder, name, version, needs=()):
    "A stand-in that pip can choose and nobody can use"
    info = f'{name}-{version}.dist-info'
    with ZipFile(folder/f'{name}-{version}-py3-none-any.whl', 'w') as f:
        f.writestr(f'{info}/METADATA', metadata(name, version, needs))
        f.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
        f.writestr(f'{info}/RECORD', '')

def put_installed(site, name, version, needs=()):
    info = site/f'{name}-{version}.dist-info'
    info.mkdir(parents=True)
    (info/'METADATA').write_text(metadata(name, version, needs))
    (info/'INSTALLER').write_text('pip\n')

@pytest.fixture
def pip(tmp_path):
    "What real pip would install for a command, from an index of stand-ins, on a host with these packages; None where it refuses"
    if not importlib.util.find_spec('pip'): pytest.skip('this environment has no pip')
    wheels, site, report = tmp_path/'wheels', tmp_path/'site', tmp_path/'report.json'
    wheels.mkdir()
    ours = [str(o) for o in needed() if o.name.startswith(('torch', *kernel))] + ['nbclient>=0.10']   # as papermill needs it
    put_wheel(wheels, 'stand_in', '0.1.0', ours)                            # since gpubench itself may be installed here
    for torch,vision in (('2.8.0', '0.23.0'), ('2.9.0', '0.24.0')):
        put_wheel(wheels, 'torch', torch)
        put_wheel(wheels, 'torchvision', vision, [f'torch=={torch}'])
    for name,version in dict(ipykernel='7.4.0', jupyter_client='8.10.0', traitlets='5.16.1').items(): put_wheel(wheels, name, version)
    put_wheel(wheels, 'nbclient', '0.10.4', ['traitlets>=5.4'])
    put_wheel(wheels, 'nbclient', '0.11.0', ['traitlets>=5.13'])
    def run(cmd, **packages):
        for name,version in packages.items(): put_installed(site, name, version)
        cmd = ['stand_in' if o.startswith('gpubench-kit @') else o for o in cmd]
        env = os.environ | dict(PIP_NO_INDEX='1', PIP_FIND_LINKS=str(wheels), PIP_DRY_RUN='1', PIP_REPORT=str(report), PIP_CONFIG_FILE=os.devnull,
                                PIP_DISABLE_PIP_VERSION_CHECK='1', PYTHONPATH=str(site))
        done = subprocess.run(cmd, env=env, capture_output=True, text=True)
        if done.returncode: return None
        return {o['metadata']['name']: o['metadata']['version'] for o in json.loads(report.read_text())['install']}
    return run

kernel = dict(ipykernel='6.17.1', jupyter_client='7.4.9', traitlets='5.7.1')   # Colab's

def unpinned(cmd): return [o for o in cmd if '==' not in o]

def test_pip_lets_a_torch_that_fits_stay(installed, pip):
    "The newest torchvision would bring a torch of its own; the pin makes pip choose the one that fits"
    host = dict(torch='2.8.0+cu126')
    [cmd], _ = installed('COLAB_RELEASE_TAG', **host)
    assert pip(cmd, **host)=={'stand_in': '0.1.0', 'torchvision': '0.23.0'}
    assert pip(unpinned(cmd))['torch']=='2.9.0'                               # so the check can fail

def test_pip_gives_up_rather_than_replace_an_old_torch(installed, pip):
    host = dict(torch='2.6.0+cu124', torchvision='0.21.0+cu124')
    [cmd], _ = installed('KAGGLE_KERNEL_RUN_TYPE', **host)
    assert pip(cmd, **host) is None
    assert pip(unpinned(cmd))['torch']=='2.9.0'

def test_pip_lets_the_kernel_that_runs_the_cell_stay(installed, pip):
    "To replace it, the session would have to start again. The newest nbclient wants a newer traitlets; the pin makes pip choose the one before"
    host = dict(torch='2.9.0', torchvision='0.24.0') | kernel
    [cmd], _ = installed('COLAB_RELEASE_TAG', **host)
    assert cmd[-5:]==[f'{k}=={v}' for k,v in host.items()]
    assert pip(cmd, **host, nbclient='0.9.0')=={'stand_in': '0.1.0', 'nbclient': '0.10.4'}   # too old for us
    assert pip(unpinned(cmd))=={'stand_in': '0.1.0', 'nbclient': '0.11.0', 'traitlets': '5.16.1'}   # so the check can fail

# ---- the kernel
