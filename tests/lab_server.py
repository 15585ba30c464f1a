"""`make lab` as a student starts it, for the tests that need a running server"""
import os, re, signal, socket, subprocess, sys
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread, Timer

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
        if found := re.search(r'http://127\.0\.0\.1:(\d+)(/lab/tree/nbs/labs)\?token=(\w{20,})', line): return int(found[1]), found[3]
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
