"What the install cell does on Colab and Kaggle"
import importlib.metadata, importlib.util, subprocess, sys

import pytest

from helpers import as_module, root

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
