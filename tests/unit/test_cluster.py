"A sweep as jobs of a real Slurm with one node, which this file starts: jobs cancelled, requeued and preempted, the node down"
import getpass, os, shutil, signal, socket, subprocess, sys, threading, time
from pathlib import Path

import pytest

pytest.importorskip('submitit', reason='submitit is not installed: pip install submitit')
from gpubench.run.cluster import JobsMissing, sweep_on
from gpubench.ground.record import record_rows
from helpers import free_port, root

PROGRAMS = 'munged', 'slurmctld', 'slurmd', 'sbatch', 'srun', 'squeue', 'scontrol', 'scancel'
os.environ['PATH'] += ':/usr/sbin'
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform!='linux' or not all(map(shutil.which, PROGRAMS)) or os.getuid()!=0, reason=
    'a Slurm of its own needs root and Debian\'s packages: apt-get install slurmctld slurmd slurm-client munge')]

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
MinJobAge=60
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
    os.environ.update(SLURM_CONF=str(d/'slurm.conf'), PYTHONPATH=os.pathsep.join([str(root), str(root/'tests/unit'), str(root/'tests'), os.environ.get('PYTHONPATH', '')]))
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

def beginning(function, notes):
    "Start a function in a thread and wait until its first job is in its midst; the thread, and what the function returns or raises"
    found = {}
    def call():
        try: found['value'] = function()
        except Exception as e: found['error'] = e
    thread = threading.Thread(target=call)
    thread.start()
    wait_until((notes/'x1_run0').exists)
    return thread, found

def visits(out): return sorted((o['x'], o['visit'], o['status']) for o in record_rows(out))

@pytest.fixture
def notes(tmp_path):
    "Where the jobs of `slow` leave a file for each visit they begin"
    (tmp_path/'notes').mkdir()
    return tmp_path/'notes'

def test_a_job_requeued_a_node_that_fails_and_a_job_cancelled(slurm, tmp_path, notes):
    "All visits are there once, or are listed as missing; the same call runs those"
    out = tmp_path/'shared'
    def go(): return sweep_on('slurm', dict(x=[0, 1], folder=[str(notes)]), out, 2, 'time=5', run=slow, twin=None, isolate=False, poll_s=.5)
    thread, found = beginning(go, notes)                              # the second job waits for the node
    first, second = sorted(slurm_cmd('squeue', '--noheader', '--array', '--format=%i').split())
    slurm_cmd('scancel', second)
    slurm_cmd('scontrol', 'requeue', first)
    wait_until((notes/'x1_run1').exists)
    os.kill(slurm['node'].pid, signal.SIGKILL)                        # its node fails
    slurm_cmd('scontrol', 'update', f"nodename={slurm['host']}", 'state=down', 'reason=test')
    slurm['start_node']()
    slurm_cmd('scontrol', 'update', f"nodename={slurm['host']}", 'state=resume')
    thread.join(120)
    assert isinstance(found['error'], JobsMissing)
    assert f'2 of 4 visits are missing: 2 of 2 of round 2, because its job {second} ended as CANCELLED' in str(found['error'])
    assert 'The same call again runs what is missing' in str(found['error'])
    assert visits(out)==[(0, 0, 'ok'), (1, 0, 'ok')]==sorted(zip(*(found['error'].records[o] for o in ('x', 'visit', 'status'))))
    (notes/'open').touch()
    go()
    assert visits(out)==[(0, 0, 'ok'), (0, 1, 'ok'), (1, 0, 'ok'), (1, 1, 'ok')]

def test_a_job_preempted_and_a_running_one_cancelled(slurm, tmp_path, notes):
    out = tmp_path/'shared'
    def go(): return sweep_on('slurm', dict(x=[0, 1], folder=[str(notes)]), out, 1, 'time=5', run=slow, seed=1, twin=None, isolate=False, poll_s=.5)
    thread, found = beginning(go, notes)
    slurm_cmd('sbatch', '--partition=urgent', '--exclusive', '--output=none', f'--wrap=touch {notes}/urgent; sleep 1')
    wait_until((notes/'urgent').exists)                               # which took the node from the sweep's job
    wait_until((notes/'x1_run1').exists)                              # and gave it back
    [job] = slurm_cmd('squeue', '--noheader', '--array', '--states=running', '--format=%i').split()
    slurm_cmd('scancel', job)
    thread.join(120)
    assert f'1 of 2 visits are missing: 1 of 2 of round 1, because its job {job} ended as CANCELLED' in str(found['error'])
    assert visits(out)==[(0, 0, 'ok')]                                # before the preemption, and not repeated
    (notes/'open').touch()
    go()
    assert visits(out)==[(0, 0, 'ok'), (1, 0, 'ok')] and not (notes/'x0_run1').exists()

def broken(x, folder):
    (Path(folder)/f'x{x}').touch()
    raise RuntimeError('no such file')

def test_no_visit_starts_once_the_first_failed_alike(slurm, tmp_path, notes, capsys):
    "The first round stops, and the queued ones are cancelled"
    df = sweep_on('slurm', dict(x=[*range(5)], folder=[str(notes)]), tmp_path/'shared', 6, 'time=5', run=broken, twin=None, isolate=False, poll_s=.5)
    assert 'of 30 visits, which all failed with the same error: RuntimeError: no such file' in capsys.readouterr().out
    assert 3<=len(df)<30 and {*df.status}=={'error'} and not slurm_cmd('squeue', '--noheader', '--states=pending,running')

def test_an_option_that_slurm_refuses(slurm, tmp_path):
    with pytest.raises(RuntimeError, match='(?s)Slurm refused the jobs.*sinfo'):
        sweep_on('slurm', dict(x=[0], folder=['']), tmp_path, 1, 'partition=none', run=slow, isolate=False)

def test_a_lab_is_a_job(slurm, tmp_path):
    "Executed on the node in a folder of its own; its records are gathered; done once"
    from gpubench.course.lab_jobs import run_labs_on
    from helpers import write_lab
    labs, out = tmp_path/'labs', tmp_path/'shared'
    write_lab(labs, '01_there', "import os\nfrom gpubench.ground.record import append_record\n"
              "append_record(out, dict(trial_id='a', machine='m', visit=0, seed=seed, job=os.environ['SLURM_JOB_ID']))")
    def go(): return run_labs_on('slurm', out=out, device='cpu', texts=dict(seed='5'), folder=labs, options='time=5', poll_s=.5)
    [first], [second] = go(), go()
    assert (first.status, first.error, second.status, second.before)==('ok', '', 'ok', True) and first.notebook.is_file()
    assert [(o['seed'], o['visit'], bool(o['job'])) for o in record_rows(out)]==[(5, 0, True)]
