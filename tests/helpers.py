"""What several test files use"""
import os, re, shutil, signal, socket, subprocess, sys
from configparser import ConfigParser
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Thread, Timer
from time import monotonic, sleep
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

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


# ---- `make lab` as a student starts it

wait_s = 90                                          # until the server says where it is
# variables of whoever runs the tests, and of pytest, that would reach make, the server or its kernels
not_a_student_s = ('JUPYTER', 'MAKE', 'MFLAGS', 'ARGS', 'MPLBACKEND', 'PYTEST', 'IN_TEST')


@dataclass
class LabServer:
    "A JupyterLab that runs"
    pid: int       # of the make that started it, and of its process group
    port: int      # as asked for
    said_port: int # as it says itself
    token: str     # who has it may work here
    @property
    def base(self): return f'http://127.0.0.1:{self.port}'

def free_port():
    "A port that nobody uses now"
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

def first_address(server):
    "Port and token of the address that the server prints, as soon as it does"
    said = []
    for line in server.stdout:                       # ends at the latest when a timer kills the server
        said.append(line)
        if found := re.search(r'http://127\.0\.0\.1:(\d+)(/lab/tree/(?:runs|nbs)/labs)\?token=(\w{20,})', line): return int(found[1]), found[3]
    raise AssertionError('no address with a token:\n' + ''.join(said))

def keep_reading(server):
    "The server must not wait until somebody reads its log"
    Thread(target=server.stdout.read, daemon=True).start()

@contextmanager
def lab_server(tree, config, **env):
    "`make lab` in a checkout, with settings of nobody (`config` is an empty folder); everything it started ends with it"
    port = free_port()
    env = {k: v for k,v in os.environ.items() if not k.startswith(not_a_student_s)} | env
    env |= dict(JUPYTER_CONFIG_DIR=str(config), JUPYTER_RUNTIME_DIR=str(config), JUPYTER_DATA_DIR=str(config))
    # `-o`: this test's own environment is ready as it is
    server = subprocess.Popen(['make', '-o', 'set-up-lab', 'lab', f'VENV={sys.prefix}', f'ARGS=--no-browser --port={port}'], cwd=tree,
                              env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    stop = Timer(wait_s, os.killpg, (server.pid, signal.SIGKILL))
    stop.start()
    try:
        said_port, token = first_address(server)
        stop.cancel()
        keep_reading(server)
        yield LabServer(server.pid, port, said_port, token)
    finally:
        stop.cancel()
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()

def status(url):
    "HTTP status; the address is printed a moment before the server listens, so a refused connection is tried again"
    end = monotonic()+wait_s
    while True:
        try: return urlopen(url, timeout=wait_s).status
        except HTTPError as e: return e.code
        except URLError:
            if monotonic() > end: raise
            sleep(.1)

browsers = ['chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable']
flags = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-background-networking']

def find_browser(names, asked=None):
    "Path of the browser `asked` for, else of the first of `names` that says its version; None if there is none"
    for name in [asked] if asked else names:
        path = shutil.which(name)
        if path and subprocess.run([path, '--version'], capture_output=True, timeout=60).returncode==0: return path
    if asked: raise RuntimeError(f'GPUBENCH_BROWSER names {asked!r}, which does not run here. Name a Chromium or Chrome that does.')
