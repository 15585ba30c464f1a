"""What several test files use"""
import os, socket, subprocess, sys
from configparser import ConfigParser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import nbformat
from packaging.requirements import Requirement
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

root = Path(__file__).resolve().parent.parent

def read_settings():
    "What settings.ini says"
    ini = ConfigParser(interpolation=None)
    ini.read_string(text('settings.ini'))
    return ini.defaults()

def needed(extra=''):
    "The requirements of the library, or of an extra"
    settings = read_settings()
    found = settings[f'{extra}_requirements' if extra else 'requirements'].split()
    return [o for o in map(Requirement, found) if o.name!=settings['lib_name']]

def pythons():
    "The versions of Python that are tested, the oldest first"
    return read_settings()['python_versions'].split()

def run(*cmd, cwd=root, **env):
    "Run a command; its output where it succeeds, an error with its messages where not"
    env = {k: v for k,v in os.environ.items() if k!='IN_TEST'} | env      # nbdev does nothing under IN_TEST
    res = subprocess.run([str(o) for o in cmd], cwd=cwd, env=env, capture_output=True, text=True)
    if res.returncode: raise RuntimeError(f'{cmd[0]} ended with {res.returncode}:\n{res.stdout}\n{res.stderr}')
    return res.stdout

def tool(name): return Path(sys.executable).with_name(name)

def as_module(path):
    "A script of the checkout as a module"
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def text(name): return (root/name).read_text(encoding='utf-8')

PYTHON3 = dict(kernelspec=dict(name='python3', display_name='python3', language='python'))
STANDARD = "device: str = 'auto'  # where\nout: str = ''  # results\nseed: int = 0  # of the shuffling"

def write_lab(folder, name, *code, extra='', measures='every device it finds'):
    "A small lab with these cells; `extra` are parameters of its own"
    head = f'# 01 · Is {name} there?\n\nWords.\n\n| Minutes | Needs | Measures |\n|---|---|---|\n| 0.1 | any machine | {measures} |'
    parameters = new_code_cell('\n'.join(filter(None, (STANDARD, extra))), metadata=dict(tags=['parameters']))
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=[new_markdown_cell(head), parameters, *map(new_code_cell, code)], metadata=PYTHON3), folder/f'{name}.ipynb')
    return folder/f'{name}.ipynb'

def free_port():
    "A port that nobody uses now"
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]
