"The badges and the install cell that every lab has for Colab and Kaggle"
import importlib.metadata, importlib.util, subprocess, sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

root = Path(__file__).resolve().parent.parent
labs = sorted((root/'nbs'/'labs').glob('[0-9]*.ipynb'))


@pytest.fixture(scope='module')
def hosted():
    spec = spec_from_file_location('hosted', root/'tools'/'hosted.py')
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def parts(nb): return [(o.cell_type, o.source, o.metadata.get('tags')) for o in nb.cells]

@pytest.mark.parametrize('path', labs, ids=lambda o: o.stem)
def test_every_lab_has_both(path, hosted):
    nb = nbformat.read(path, 4)
    before = parts(nb)
    assert parts(hosted.make_hosted(nb, path.stem))==before, 'run `python tools/hosted.py`'

def test_a_lab_without_them_gets_them_once(hosted):
    cells = [new_markdown_cell('# 01 · Why?\n\nWords.\n\n| a |'), new_code_cell('n: int = 3', metadata=dict(tags=['parameters'])), new_code_cell('import gpubench')]
    nb = hosted.make_hosted(new_notebook(cells=cells), '01_a')
    assert [o.metadata.get('tags') for o in nb.cells]==[None, ['parameters'], ['install'], None]
    lines = nb.cells[0].source.splitlines()
    assert (lines[0], lines[1], lines[3:])==('# 01 · Why?', '', ['', 'Words.', '', '| a |'])
    assert '(https://colab.research.google.com/github/gpubench/gpubench/blob/main/nbs/labs/01_a.ipynb)' in lines[2]
    assert '(https://kaggle.com/kernels/welcome?src=https://github.com/gpubench/gpubench/blob/main/nbs/labs/01_a.ipynb)' in lines[2]
    once = parts(nb)
    assert parts(hosted.make_hosted(nb, '01_a'))==once
    nb.cells[2].source, nb.cells[0].source = '!pip install gpubench', nb.cells[0].source.replace('01_a', '01_b')
    assert parts(hosted.make_hosted(nb, '01_a'))==once

@pytest.fixture
def installed(hosted, monkeypatch):
    "What the cell would install on a host with these packages"
    def run(host, **packages):
        calls = []
        for o in ('COLAB_RELEASE_TAG', 'KAGGLE_KERNEL_RUN_TYPE'): monkeypatch.delenv(o, raising=False)
        if host: monkeypatch.setenv(host, 'x')
        monkeypatch.setattr(importlib.util, 'find_spec', lambda o: o if o in packages else None)
        monkeypatch.setattr(importlib.metadata, 'version', packages.__getitem__)
        monkeypatch.setattr(subprocess, 'run', lambda cmd, check: calls.append((cmd, check)))
        exec(hosted.install, {})
        return calls
    return run

def test_the_hosts_torch_stays(installed):
    [(cmd, check)] = installed('COLAB_RELEASE_TAG', torch='2.8.0+cu126', torchvision='0.23.0+cu126', numpy='2.0.2', pandas='2.2.2')
    assert cmd[:4]==[sys.executable, '-m', 'pip', 'install'] and check and not {'-U', '--upgrade'} & set(cmd)
    assert cmd[-4:]==['gpubench @ git+https://github.com/gpubench/gpubench', 'torch==2.8.0+cu126', 'torchvision==0.23.0+cu126', 'numpy==2.0.2']

def test_only_there_and_only_once(installed):
    assert installed('', torch='2.8.0')==[]                                    # somebody's own machine, with another kernel
    assert installed('KAGGLE_KERNEL_RUN_TYPE', gpubench='0.1.0')==[]
    [(cmd, _)] = installed('KAGGLE_KERNEL_RUN_TYPE', numpy='1.26.4')
    assert cmd[-1]=='numpy==1.26.4' and not any('torch' in o for o in cmd)
