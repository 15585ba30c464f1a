"""`make lab` for real: JupyterLab answers on 127.0.0.1 alone, opens the labs, and only to whoever has its token"""
from time import monotonic, sleep
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import psutil

from lab_server import lab_server, wait_s


def status(url):
    "HTTP status; the address is printed a moment before the server listens, so a refused connection is tried again"
    end = monotonic()+wait_s
    while True:
        try: return urlopen(url, timeout=wait_s).status
        except HTTPError as e: return e.code
        except URLError:
            if monotonic() > end: raise
            sleep(.1)

def test_make_lab(repo, tmp_path):
    with lab_server(repo, tmp_path) as server:
        labs = f'{server.base}/api/contents/nbs/labs'
        assert server.said_port==server.port
        assert status(labs)==403
        assert status(f'{labs}?token=wrong')==403
        assert status(f'{labs}?token={server.token}')==200
        bound = {o.laddr.ip for p in [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
                 for o in p.net_connections('inet') if o.status==psutil.CONN_LISTEN}
        assert bound=={'127.0.0.1'}
