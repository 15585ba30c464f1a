"""VS Code opens the labs with the right kernel: its settings are known ones, and no lab asks for a kernel that is not there"""
import json, re

import nbformat
import pytest

from helpers import root

# setting → the extension whose package.json has it under contributes.configuration ('' for VS Code itself), read in November 2026
known = {'jupyter.notebookFileRoot': 'ms-toolsai.jupyter', 'jupyter.kernels.excludePythonEnvironments': 'ms-toolsai.jupyter',
         'jupyter.widgetScriptSources': 'ms-toolsai.jupyter', 'python.defaultInterpreterPath': 'ms-python.python',
         'files.watcherExclude': '', 'files.eol': ''}
kernel = dict(display_name='python3', language='python', name='python3')     # nbdev-clean makes the two names one


def read_jsonc(text):
    "JSON with comments, as VS Code reads it"
    return json.loads(re.sub(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', lambda m: m[1] or '', text, flags=re.S))

def read(path): return read_jsonc(path.read_text(encoding='utf-8'))

def wrong_settings(settings, recommended):
    "Settings that nobody reads, or only an extension that is not recommended"
    return [o for o in settings if known.get(o) is None or known[o] and known[o] not in recommended]

def overridden(settings, container):
    "Settings of a dev container that the folder's own would replace"
    return sorted(set(settings) & set(container.get('settings', {})))

def wrong_kernels(paths):
    "Notebooks that ask for another kernel"
    return [o.name for o in paths if nbformat.read(o, 4).metadata.get('kernelspec')!=kernel]

def recommended(): return read(root/'.vscode'/'extensions.json')['recommendations']

def test_settings(): assert wrong_settings(read(root/'.vscode'/'settings.json'), recommended())==[]

@pytest.mark.parametrize('path', sorted(root.glob('.devcontainer/**/devcontainer.json')), ids=lambda o: o.parent.name)
def test_dev_containers(path):
    container = read(path)['customizations']['vscode']
    assert set(container['extensions']) <= set(recommended())
    assert wrong_settings(container.get('settings', {}), container['extensions'])==[]
    assert overridden(read(root/'.vscode'/'settings.json'), container)==[]

def test_kernels(): assert wrong_kernels(sorted((root/'nbs').rglob('[!.]*.ipynb')))==[]

def test_the_kernel_is_there():
    from jupyter_client.kernelspec import KernelSpecManager
    assert kernel['name'] in KernelSpecManager().find_kernel_specs()

def test_faults(tmp_path):
    text = '{\n // a\n "jupyter.notebookFileRoot": "http://x", /* b\n */ "jupyter.notebookRoot": "a\\"//b", "python.defaultInterpreterPath": "p"}'
    settings = read_jsonc(text)
    assert settings=={'jupyter.notebookFileRoot': 'http://x', 'jupyter.notebookRoot': 'a"//b', 'python.defaultInterpreterPath': 'p'}
    assert wrong_settings(settings, ['ms-toolsai.jupyter'])==['jupyter.notebookRoot', 'python.defaultInterpreterPath']
    assert overridden(settings, dict(settings={'python.defaultInterpreterPath': 'q'}))==['python.defaultInterpreterPath']
    for name,meta in dict(good=kernel, other=kernel | dict(name='.venv'), none={}).items():
        nb = nbformat.v4.new_notebook(metadata=dict(kernelspec=meta) if meta else {})
        nbformat.write(nb, tmp_path/f'{name}.ipynb')
    assert wrong_kernels(sorted(tmp_path.glob('*.ipynb')))==['none.ipynb', 'other.ipynb']
