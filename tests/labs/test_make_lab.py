"`make lab`: a server for this machine alone"
import psutil
import pytest

from helpers import lab_server, status

pytestmark = pytest.mark.slow

def test_make_lab(shared_tree, tmp_path):
    "JupyterLab answers on 127.0.0.1 alone, opens the labs, and only to whoever has its token"
    with lab_server(shared_tree, tmp_path, PYTHONPATH=str(shared_tree)) as server:
        labs = f'{server.base}/api/contents/runs/labs'
        assert server.said_port==server.port
        assert [status(f'{labs}{o}') for o in ('', '?token=wrong', f'?token={server.token}')]==[403, 403, 200]
        pids = {server.pid, *(o.pid for o in psutil.Process(server.pid).children(recursive=True))}   # some end meanwhile
        listening = [o for o in psutil.net_connections('inet') if o.status==psutil.CONN_LISTEN]
        assert {o.laddr.ip for o in listening if o.pid in pids}=={'127.0.0.1'}
