"""`make lab` for real: JupyterLab answers on 127.0.0.1 alone, opens the labs, and only to whoever has its token"""
import psutil
import pytest

from helpers import lab_server, status

pytestmark = pytest.mark.slow

def test_make_lab(repo, tmp_path):
    with lab_server(repo, tmp_path) as server:
        labs = f'{server.base}/api/contents/runs/labs'
        assert server.said_port==server.port
        assert status(labs)==403
        assert status(f'{labs}?token=wrong')==403
        assert status(f'{labs}?token={server.token}')==200
        pids = {server.pid, *(o.pid for o in psutil.Process(server.pid).children(recursive=True))}   # some end meanwhile
        bound = {o.laddr.ip for o in psutil.net_connections('inet') if o.pid in pids and o.status==psutil.CONN_LISTEN}
        assert bound=={'127.0.0.1'}
