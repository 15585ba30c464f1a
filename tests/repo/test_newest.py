"""The runner of `make test-newest`: it runs what nbdev_test runs, and a failure is a failure"""
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

sys.path.insert(0, str(Path(__file__).parent))
import newest


def write(path, *sources, first=None):
    cells = ([new_markdown_cell(first)] if first else []) + [new_code_cell(o) for o in sources]
    nbformat.write(new_notebook(cells=cells), path)
    return path

@pytest.mark.parametrize('source,tested', [
    ('x = 1', True), ('#| export\nx = 1', True), ('#| eval: true\nx = 1', True), ('#| eval: false\n1/0', False), ('#|eval:False\n1/0', False),
    ('#| slow\n1/0', False), ('#| hide\nimport nbdev; nbdev.nbdev_export()', False), ('# eval: false\nx = 1', True)])
def test_which_cells(source, tested): assert newest.is_tested(new_code_cell(source), {'slow'})==tested

@pytest.mark.parametrize('source,names', [
    ('import nbdev.test, os.path as p', ['nbdev', 'os']), ('from nbdev import *', ['nbdev']), ('def f():\n    from nbdev.x import y', ['nbdev']),
    ('%matplotlib inline\n!ls\nfrom .core import x', []), ('x = "import nbdev"', [])])
def test_what_a_cell_imports(source, names): assert [o for o in newest.imports_of(source) if o not in ('IPython',)]==names

def test_a_notebook(tmp_path):
    error, n, _ = newest.test_notebook(write(tmp_path/'a.ipynb', 'x = 2', '#| eval: false\n1/0', 'assert x==2'))
    assert (error, n)==('', 2)
    error, n, _ = newest.test_notebook(write(tmp_path/'b.ipynb', '1/0', first='---\nskip_exec: true\n---'))
    assert (error, n)==('', 0)

@pytest.mark.parametrize('source,word', [
    ('1/0', 'ZeroDivisionError'), ('import nbdev', 'imports nbdev'), ('__import__("nbdev")', 'import of nbdev'),
    ('import os; os._exit(1)', 'died')])
def test_a_notebook_fault(tmp_path, source, word):
    error, *_ = newest.test_notebook(write(tmp_path/'a.ipynb', 'x = 2', source))
    assert word in error and '\x1b' not in error

def test_exit_status(tmp_path, monkeypatch, capsys):
    def status(*names, fastcore='2.2.0'):
        monkeypatch.setattr(sys, 'argv', ['newest.py', *[str(tmp_path/o) for o in names]])
        monkeypatch.setattr(newest, 'version', lambda o: fastcore)
        with pytest.raises(SystemExit) as e: newest.main()
        return e.value.code
    write(tmp_path/'good.ipynb', 'x = 1'), write(tmp_path/'bad.ipynb', '1/0')
    monkeypatch.setenv('IN_TEST', '0')               # put back afterwards: the runner sets it
    assert not status('good.ipynb') and 'all 1 notebooks passed' in capsys.readouterr().out
    assert status('good.ipynb', 'bad.ipynb')==1
    out = capsys.readouterr().out
    assert 'PASS  good' in out and 'FAIL  bad' in out and '1 of 2 notebooks failed' in out
    assert 'make test-newest' in status('good.ipynb', fastcore='1.14.5')
