"A sweep as jobs of a real Slurm with one node, which this file starts"
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip('submitit', reason='submitit is not installed: pip install submitit')
from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from gpubench import read_records, sweep
from helpers import free_port

PROGRAMS = 'munged', 'slurmctld', 'slurmd', 'sbatch', 'srun', 'squeue', 'scontrol', 'scancel'
os.environ['PATH'] += ':/usr/sbin'
has_slurm = sys.platform=='linux' and all(map(shutil.which, PROGRAMS)) and os.getuid()==0
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_slurm, reason=
    "a Slurm of its own needs root and Debian's packages: apt-get install slurmctld slurmd slurm-client munge")]

CONF = '''ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ctld}
SlurmdPort={d}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={dir}/munge.sock,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=300
KillWait=2
MinJobAge=600
SchedulerParameters=sched_interval=2
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP
'''

# submitit asks sacct how a job without a result ended; a Slurm without a database has only squeue
SACCT = """#!/bin/sh
echo 'JobID|State|NodeList'
squeue --noheader --array --states=all --format='%i|%T|%N'
"""

def wait_until(true, seconds=90):
    end = time.monotonic()+seconds
    while not true():
        assert time.monotonic()<end, 'it never came to that'
        time.sleep(.2)

@pytest.fixture(scope='module')
def slurm(tmp_path_factory):
    "A Slurm with this machine as its only node"
    d, host, started = tmp_path_factory.mktemp('slurm'), socket.gethostname().split('.')[0], []
    for o in ('state', 'spool'): (d/o).mkdir()
    (d/'key').write_bytes(os.urandom(1024))
    (d/'key').chmod(0o400)
    for o in (d, *d.parents[:-2]): o.chmod(o.stat().st_mode | 0o711)       # munged wants a path that others may pass
    (d/'slurm.conf').write_text(CONF.format(host=host, ctld=free_port(), d=free_port(), user=getpass.getuser(), dir=d))
    (d/'bin').mkdir()
    (d/'bin'/'sacct').write_text(SACCT)
    (d/'bin'/'sacct').chmod(0o755)
    os.environ.update(SLURM_CONF=str(d/'slurm.conf'), PATH=f"{d/'bin'}:{os.environ['PATH']}")
    def start(*cmd):
        started.append(subprocess.Popen(cmd, stdout=(d/'out').open('a'), stderr=subprocess.STDOUT, start_new_session=True))
        return started[-1]
    def start_node(): return start('slurmd', '-D')
    start('munged', '--foreground', '--force', f'--key-file={d}/key', f'--socket={d}/munge.sock', f'--pid-file={d}/munged.pid',
          f'--log-file={d}/munged.log', f'--seed-file={d}/seed')
    wait_until((d/'munge.sock').exists)
    start('slurmctld', '-D', '-c')
    node = start_node()
    def state(): return subprocess.run(['sinfo', '--noheader', '--format=%t'], capture_output=True, text=True).stdout.strip()
    try:
        try: wait_until(lambda: state()=='idle')
        except AssertionError: pytest.skip(f"Slurm doesn't start here: {(d/'out').read_text()[-300:]}")
        yield dict(dir=d, host=host, node=node, start_node=start_node, state=state)
    finally:
        subprocess.run(['scancel', '--user', getpass.getuser()])
        for o in reversed(started): o.poll() is None and os.killpg(o.pid, signal.SIGKILL)
        for o in started: o.wait()

def slow(x, folder):
    "Waits at x=1 in the first run of a job until the test lets it go on, so that the test can interfere"
    folder, again = Path(folder), int(os.environ.get('SLURM_RESTART_COUNT') or 0)
    (folder/f'x{x}_run{again}').touch()
    end = time.monotonic()+60
    while x and again<2 and not (folder/'open').exists() and time.monotonic()<end: time.sleep(.1)
    return dict(y=2*x)

def slurm_cmd(*cmd): return subprocess.run(cmd, check=True, capture_output=True, text=True).stdout

def go(out, notes, **kwargs):
    return sweep(dict(x=[0, 1], folder=[str(notes)]), 2, out, run=slow, seed=1, twin=None, on='slurm', slurm=dict(time=5), **kwargs)

def visits(out):
    df = read_records(out)
    return sorted(zip(df['round'], df.x, df.status))

def test_jobs_preempted_and_cancelled(slurm, tmp_path, monkeypatch):
    """A job that Slurm starts anew goes on after its last visit; one that it ends is named, and the same call runs what is missing

    A visit that Slurm ended is no result: it has no record."""
    monkeypatch.setattr(SlurmJob, 'watcher', SlurmInfoWatcher(delay_s=5)) # else it asks ever more seldom
    out, notes, fault = tmp_path/'shared', tmp_path/'notes', []
    notes.mkdir()
    def beginning():
        try: go(out, notes, progress=False)
        except RuntimeError as e: fault.append(str(e))
    thread = threading.Thread(target=beginning)
    thread.start()
    wait_until((notes/'x1_run0').exists)                              # the second job waits for the node
    first, second = sorted(slurm_cmd('squeue', '--noheader', '--array', '--format=%i').split())
    slurm_cmd('scancel', second)
    slurm_cmd('sbatch', '--partition=urgent', '--exclusive', '--output=none', f'--wrap=touch {notes}/urgent; sleep 1')
    wait_until((notes/'urgent').exists)                               # which took the node from the first job
    wait_until((notes/'x1_run1').exists)                              # and gave it back
    assert visits(out)==[(0, 0, 'ok')] and not (notes/'x0_run1').exists()
    slurm_cmd('scancel', first)
    thread.join(180)
    assert '3 of 4 visits are missing.' in fault[0] and 'The same call again runs them.' in fault[0]
    for o in (first, second): assert f'Job {o} ended as CANCELLED' in fault[0]
    (notes/'open').touch()
    assert len(go(out, notes))==4 and visits(out)==[(r, x, 'ok') for r in (0, 1) for x in (0, 1)]

def test_an_option_that_slurm_refuses(slurm, tmp_path):
    with pytest.raises(RuntimeError, match='(?s)Slurm refused the jobs.*sinfo'):
        sweep(dict(x=[0], folder=['']), 1, tmp_path, run=slow, on='slurm', slurm=dict(partition='none'))
