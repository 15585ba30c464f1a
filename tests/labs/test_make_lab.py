"`make lab`: a server for this machine alone"
import os, re, signal, subprocess, sys
from time import monotonic, sleep
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import psutil
import pytest

from helpers import free_port

# variables of whoever runs the tests that would reach make, the server or its kernels
not_a_student_s = 'JUPYTER', 'MAKE', 'MFLAGS', 'ARGS', 'MPLBACKEND', 'PYTEST', 'IN_TEST'

def soon(get, timeout_s=90):
    "What `get` returns, once it isn't None"
    end = monotonic()+timeout_s
    while (found := get()) is None:
        assert monotonic()<end, 'waited too long'
        sleep(.1)
    return found

def status(url):
    "HTTP status; None if nobody listens, as for a moment after the address was printed"
    try: return urlopen(url, timeout=90).status
    except HTTPError as e: return e.code
    except URLError: return None

@pytest.mark.slow
def test_make_lab(shared_tree, tmp_path):
    "JupyterLab answers on 127.0.0.1 alone, opens the labs, and only to whoever has its token"
    port, log = free_port(), tmp_path/'log'
    env = {k: v for k,v in os.environ.items() if not k.startswith(not_a_student_s)} | dict(PYTHONPATH=str(shared_tree))
    env |= dict.fromkeys(('JUPYTER_CONFIG_DIR', 'JUPYTER_RUNTIME_DIR', 'JUPYTER_DATA_DIR'), str(tmp_path))
    # `-o`: this test's own environment is ready as it is
    make = ['make', '-o', 'set-up-lab', 'lab', f'VENV={sys.prefix}', f'ARGS=--no-browser --port={port}']
    with open(log, 'w') as f:
        server = subprocess.Popen(make, cwd=shared_tree, env=env, stdout=f, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        address = re.compile(rf'http://127\.0\.0\.1:{port}/lab/tree/runs/labs\?token=(\w{{20,}})')
        token = soon(lambda: address.search(log.read_text()))[1]
        labs = f'http://127.0.0.1:{port}/api/contents/runs/labs'
        assert [soon(lambda: status(labs+o)) for o in ('', '?token=wrong', f'?token={token}')]==[403, 403, 200]
        pids = {server.pid, *(o.pid for o in psutil.Process(server.pid).children(recursive=True))}   # some end meanwhile
        listening = [o for o in psutil.net_connections('inet') if o.status==psutil.CONN_LISTEN]
        assert {o.laddr.ip for o in listening if o.pid in pids}=={'127.0.0.1'}
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
