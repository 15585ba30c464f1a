"""`make lab` for real: JupyterLab answers on 127.0.0.1 alone, opens the labs, and only to whoever has its token"""
import os, re, signal, socket, subprocess, sys
from pathlib import Path
from threading import Timer
from time import monotonic, sleep
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import psutil

root = Path(__file__).resolve().parent.parent
wait_s = 90                                          # until the server says where it is


def free_port():
    "A port that nobody uses now"
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

def status(url):
    "HTTP status; the address is printed a moment before the server listens, so a refused connection is tried again"
    end = monotonic()+wait_s
    while True:
        try: return urlopen(url, timeout=wait_s).status
        except HTTPError as e: return e.code
        except URLError:
            if monotonic() > end: raise
            sleep(.1)

def test_make_lab(tmp_path):
    port = free_port()
    env = {k: v for k,v in os.environ.items() if not k.startswith(('JUPYTER', 'MAKE', 'MFLAGS', 'ARGS'))}
    env |= dict(JUPYTER_CONFIG_DIR=str(tmp_path), JUPYTER_RUNTIME_DIR=str(tmp_path), JUPYTER_DATA_DIR=str(tmp_path))
    # `-o`: this test's own environment is ready as it is
    server = subprocess.Popen(['make', '-o', 'set-up-lab', 'lab', f'VENV={sys.prefix}', f'ARGS=--no-browser --port={port}'], cwd=root, env=env,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    stop = Timer(wait_s, os.killpg, (server.pid, signal.SIGKILL))
    stop.start()
    try:
        said = []
        for line in server.stdout:                   # ends at the latest when the timer kills the server
            said.append(line)
            if found := re.search(r'http://127\.0\.0\.1:(\d+)(/lab/tree/nbs/labs)\?token=(\w{20,})', line): break
        else: raise AssertionError('no address with a token:\n' + ''.join(said))
        base, token = f'http://127.0.0.1:{port}', found[3]
        assert int(found[1])==port
        assert status(f'{base}/api/contents/nbs/labs')==403
        assert status(f'{base}/api/contents/nbs/labs?token=wrong')==403
        assert status(f'{base}/api/contents/nbs/labs?token={token}')==200
        bound = {o.laddr.ip for p in [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
                 for o in p.net_connections('inet') if o.status==psutil.CONN_LISTEN}
        assert bound=={'127.0.0.1'}
    finally:
        stop.cancel()
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
