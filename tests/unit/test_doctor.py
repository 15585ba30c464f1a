"""`gpubench doctor` on machines that are faked below everything of ours: the C library of NVML, packages on Python's path, a file system
with /proc, /sys and /dev, a kernel's folder. No function of gpubench is replaced"""
import json, os, shutil, subprocess, sys
from pathlib import Path

import pytest

import gpubench.watch.doctor                         # fills CODES
from fake_nvml import DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH, NO_PERMISSION, UNKNOWN, FakeGPU, FakeMig, FakeNVML, wsl2
from gpubench.watch.facts import CODES, LEVELS

RTX = dict(name='NVIDIA GeForce RTX 3060 Ti', memory_total_mib=8192, memory_used_mib=400, power_limit_w=200, default_limit_w=200,
           power_w=15, util_gpu_percent=3, throttle_reasons=0x1)

def rtx(**kwargs): return [FakeGPU(**RTX | kwargs)]

TORCH = '''
"Says of itself what the environment says, and raises what torch raises"
import json, os, warnings
said = json.loads(os.environ['FAKE_TORCH'])
__version__ = said['version']

class version: cuda = said['cuda']

class _Tensor:
    def sum(self): return self
    def item(self): return 36.

def ones(*shape, device='cpu'):
    gpu = cuda._of(int(device[5:]))
    if gpu.get('compute_error'): raise RuntimeError(gpu['compute_error'])
    return _Tensor()

class _Properties: pass

class nn:
    class functional:
        def conv2d(x, w): return x

class cuda:
    def _of(i): return said['gpus'][i]
    def is_available():
        if said.get('die'): os.abort()
        if said.get('error'): raise RuntimeError(said['error'])
        if said.get('warning'): warnings.warn('CUDA initialization: '+said['warning'])
        return bool(said['gpus'])
    def device_count(): return len(said['gpus'])
    def get_device_properties(i):
        p, o = _Properties(), cuda._of(i)
        p.name, p.uuid, p.total_memory = o['name'], o['uuid'], int(o['total_mib']*2**20)
        return p
    def mem_get_info(i): return [int(cuda._of(i)[o]*2**20) for o in ('free_mib', 'total_mib')]

class device:
    def __init__(self, name): self.type, _, index = name.partition(':'); self.index = int(index) if index else None

class backends:
    class cudnn:
        allow_tf32, benchmark = True, False
        def is_available(): return True
        def version(): return 91002
    class cuda:
        class matmul: allow_tf32 = False
'''
FASTAI = {'__init__': '__version__ = "2.8.12"', 'vision/__init__': '', 'vision/all': '', 'test_utils': '''
from contextlib import nullcontext
class synth_learner:
    def no_bar(self): return nullcontext()
    def no_logging(self): return nullcontext()
    def fit(self, n): pass
'''}


# what each look at the list of processes shows: pid, name, seconds of computing
PROCESSES = '''
class P:
    def __init__(self, pid, name, s):
        times = s and type('T', (), dict(user=s, system=0.))()           # None: another user's
        self.pid, self.info = pid, dict(pid=pid, name=name, cpu_times=times)
looks = iter({0!r} or [])
psutil.process_iter = lambda attrs=None: [P(*o) for o in next(looks, [])]
'''


def write(root, files):
    for name,text in files.items():
        (root/name).parent.mkdir(parents=True, exist_ok=True)
        (root/name).write_text(text)


def plant(site, name, v, code='', needs=()):
    "A package that is imported and listed as installed"
    about = [f'Metadata-Version: 2.1\nName: {name}\nVersion: {v}', *(f'Requires-Dist: {o}' for o in needs)]
    write(site, {f'{name}/__init__.py': code, f'{name}-{v}.dist-info/METADATA': '\n'.join(about)})


class Machine:
    "A faked machine; `look()` is the doctor's examination of it, in a process of its own"
    def __init__(self, folder):
        self.folder, self.site, self.root = folder, folder/'site', folder/'root'
        self.env, self.fake = dict(PATH=str(folder)), FakeNVML(library=False)         # a real nvidia-smi is not found
        for o in ('proc', 'sys/bus/pci/devices', 'dev/shm', 'home'): (self.root/o).mkdir(parents=True)
        plant(self.site, 'torchvision', '0.30.0', '__version__ = "0.30.0"')
        plant(self.site, 'fastai', '2.8.12')
        plant(self.site, 'fastcore', '2.2.38')
        write(self.site/'fastai', {f'{k}.py': v for k,v in FASTAI.items()})
        self.has_torch(cuda='13.0')
        self.has_kernel(sys.executable)

    def has_torch(self, version='2.15.0', cuda=None, gpus=(), **kwargs):
        for o in self.site.glob('torch-*'): shutil.rmtree(o)
        plant(self.site, 'torch', version, TORCH)
        self.torch = dict(version=version, cuda=cuda, gpus=list(gpus), **kwargs)

    def has_gpus(self, gpus, kernel='580.95.05', torch=True, **kwargs):
        "Cards on the bus, their driver, NVML, and a torch that computes on them"
        self.fake = FakeNVML(gpus, **kwargs)
        for i in range(len(gpus)): self.has_card(i)
        write(self.root, {f'dev/nvidia{i}': '' for i in range(len(gpus))} | {
            'proc/driver/nvidia/version': f'NVRM version: NVIDIA UNIX x86_64 Kernel Module  {kernel}  Sat Aug 19 01:15:15 UTC 2023\n'})
        if torch: self.has_torch(cuda='13.0', gpus=[dict(name=o.name, uuid=o.uuid.removeprefix('GPU-'), total_mib=o.memory_total_mib,
                                                         free_mib=o.memory_total_mib-o.memory_used_mib) for o in gpus])

    def has_card(self, i=0, driver='nvidia'):
        at = self.root/f'sys/bus/pci/devices/0000:0{i+1}:00.0'
        write(at, {'vendor': '0x10de\n', 'class': '0x030000\n'})
        (self.root/'drivers'/driver).mkdir(parents=True, exist_ok=True)
        if driver: (at/'driver').symlink_to(self.root/'drivers'/driver)

    def has_kernel(self, first):
        "A Jupyter kernel python3 that starts `first`"
        spec = dict(argv=[str(first), '-m', 'ipykernel_launcher'], display_name='x', language='python')
        write(self.folder, {'jupyter/kernels/python3/kernel.json': json.dumps(spec)})
        self.env['JUPYTER_PATH'] = str(self.folder/'jupyter')

    def is_wsl2(self): write(self.root, {'proc/sys/kernel/osrelease': '6.6.87.2-microsoft-standard-WSL2', 'dev/dxg': ''})
    def is_container(self): write(self.root, {'.dockerenv': ''})

    def run(self, code, busy_percent=3., processes=None):
        "`code` in a process of its own, on a CPU that other programs keep so busy: the operating system's counters, as psutil gives them"
        if busy_percent is not None: code = f'import psutil\npsutil.cpu_percent = lambda interval=None: {busy_percent}\n{PROCESSES.format(processes)}\n{code}'
        env = os.environ | self.fake.child_env() | dict(FAKE_TORCH=json.dumps(self.torch), FASTAI_HOME=str(self.root/'home')) | self.env
        path = [env['PYTHONPATH'].split(os.pathsep)[0], str(self.site), str(Path(gpubench.__file__).parent.parent)]
        for o in ('CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS', 'container', 'KUBERNETES_SERVICE_HOST'):
            if o not in self.env: env.pop(o, None)
        return subprocess.run([sys.executable, '-c', code], env=env | dict(PYTHONPATH=os.pathsep.join(path)), capture_output=True, text=True,
                              encoding='utf-8', timeout=120)

    def look(self, **kwargs):
        p = self.run(f'from gpubench.watch.doctor import as_json, examine; print(as_json(examine({str(self.root)!r})))', **kwargs)
        assert p.returncode==0 and p.stderr=='', p.stderr
        return Said(json.loads(p.stdout))


class Said:
    "What the doctor said, as a script reads it"
    def __init__(self, said):
        self.said, self.exit_code = said, said['exit_code']
        self.by_code = {o['code']: o for o in said['findings']}
        self.wrong = sorted(o['code'] for o in said['findings'] if o['level']!='ok')

    def one(self, code, *words, remedy=()):
        "The only thing that is wrong is `code`; these words are in its sentences, and those in its remedy"
        assert self.wrong==[code] and self.exit_code==LEVELS.index(CODES[code][0])
        return self.has(code, *words, remedy=remedy)

    def has(self, code, *words, remedy=()):
        o = self.by_code[code]
        assert [(o['level'], o['about']), [w for w in words if w not in o['what']], [w for w in remedy if w not in o['remedy']]
                ]==[CODES[code], [], []], o
        assert o['what'].endswith('.') and (not o['remedy'] or o['remedy'].endswith('.'))         # sentences
        assert o['level']=='ok' or o['remedy']
        return o


@pytest.fixture
def machine(tmp_path): return Machine(tmp_path)


# ---- machines on which all is well

def test_a_healthy_gpu_machine(machine):
    machine.has_gpus(rtx())
    said = machine.look()
    assert said.exit_code==0 and said.wrong==[]
    said.has('gpu_ok', 'torch computes on 1 GPU(s): NVIDIA GeForce RTX 3060 Ti (8.0 GiB)')
    said.has('gpu_memory_ok', 'GPU 0 has 7.6 of 8.0 GiB free')
    assert said.said['machine']['gpu']==RTX['name'] and said.said['machine']['driver']=='580.95.05'
    assert said.said['nvml']['gpus'][0]['power_limit_w']==200 and said.said['nvml']['cuda']=='13.0'


def test_a_laptop_without_a_gpu(machine):
    said = machine.look()
    assert said.exit_code==0 and said.wrong==[]
    said.has('gpu_none', 'Labs measure the CPU')
    said.has('cpu_ok', 'not limited by a quota')
    assert said.said['nvml']['code']==12 and not {o for o in said.by_code if o.startswith(('nvml', 'gpu_memory'))}


def test_wsl2_with_a_gpu_of_another_maker(machine):
    machine.is_wsl2()
    said = machine.look()
    assert said.wrong==[]
    said.has('gpu_unnamed', "doesn't identify it as NVIDIA's", remedy=['in Windows'])


def test_a_library_without_a_card_is_no_gpu(machine):
    machine.fake = FakeNVML(init_error=DRIVER_NOT_LOADED)
    assert machine.look().by_code['gpu_none']


def test_what_is_not_answered_is_neither_an_error_nor_zero(machine):
    machine.is_wsl2()
    machine.has_gpus([wsl2(default_limit_w=0)])                       # a limit of 0 W is no limit
    said = machine.look()
    assert said.exit_code==0
    gpu = said.said['nvml']['gpus'][0]
    assert [gpu[o] for o in ('gpu_util_frac', 'throttle_bits', 'processes', 'default_limit_w')]==[None]*4 and gpu['ok']
    assert ' 0 %' not in json.dumps(said.said) and ' 0 W' not in json.dumps(said.said)


def test_mig_is_no_error(machine):
    machine.has_gpus([FakeGPU(mig=[FakeMig()], memory_used_mib=143000, processes=[[1, 100]])])
    machine.torch['gpus'][0].update(name='NVIDIA H200 MIG 1g.18gb', uuid='MIG-1', total_mib=16384, free_mib=15000)
    said = machine.look()
    assert said.exit_code==0
    said.has('gpu_memory_ok', '14.6 of 16.0 GiB free')


# ---- one thing is wrong: what is planted, its code, words of its sentences, and words of its remedy

ONE_FINDING = {
    'gpu without a driver': (lambda m: m.has_card(driver='nouveau'),
        'driver_missing', [], ["Install NVIDIA's driver", 'ubuntu-drivers']),
    'driver that answers nothing': (lambda m: m.has_gpus(rtx(), torch=False, init_error=UNKNOWN),
        'driver_dead', ['NVML reports: Unknown Error'], ['Restart', 'reinstall it']),
    'container without gpu access': (lambda m: (m.has_gpus(rtx(), torch=False, library=False), (m.root/'dev/nvidia0').unlink(),
        m.is_container()),
        'gpu_invisible', ['no GPU is visible from here'], ['docker run --gpus all']),
    'an older driver has older names': (lambda m: m.has_gpus(rtx(throttle_reasons=0x40),
        missing=['nvmlDeviceGetCurrentClocksEventReasons']),
        'gpu_throttled', [], []),
    'torch for the cpu on a gpu machine': (lambda m: (m.has_gpus(rtx(throttle_reasons=0x40), torch=False), m.has_torch('2.15.0+cpu')),
        'torch_for_cpu', ['RTX 3060 Ti', 'torch (2.15.0+cpu) was built for the CPU only'], ['CUDA build', 'torchvision']),
    'driver older than the CUDA of torch': (lambda m: m.has_gpus(rtx(), torch=False, driver='535.104.05', cuda_version=12020),
        'driver_old', ['its driver 535.104.05 supports CUDA up to 12.2, and torch 2.15.0 (CUDA 13.0)'], ['newer NVIDIA driver']),
    'within a major version a driver is not called old': (lambda m: (m.has_gpus(rtx(), torch=False, cuda_version=12020),
        m.torch.update(cuda='12.8', warning='CUDA unknown error')),
        'cuda_dead', [], []),
    'busy with nobody listed': (lambda m: (m.has_gpus(rtx(util_gpu_percent=83)), m.is_container()),
        'gpu_busy', ['83%', "other users' can't be seen"], []),
    'too little memory is free': (lambda m: m.has_gpus(rtx(memory_used_mib=7000)),
        'gpu_memory_low', ['GPU 0 has 1.2 of 8.0 GiB free'], ['nvidia-smi']),
    'torchvision of another release': (lambda m: plant(m.site, 'torchvision', '0.30.0', '__version__ = "0.30.0"', needs=['torch==2.16.0']),
        'torchvision_wants', ['torch 2.15.0 (wanted: ==2.16.0)'], ['one command']),
    'fastai that does not train': (lambda m: write(m.site/'fastai', {'test_utils.py': 'def synth_learner(): raise TypeError("got an unexpected keyword")'}),
        'fastai_dead', ["fastai 2.8.12 with fastcore 2.2.38 can't train: TypeError: got an unexpected"], ['"fastcore<2"']),
    'no jupyter': (lambda m: plant(m.site, 'jupyter_client', '8', 'raise ImportError'),
        'jupyter_missing', [], ['pip install ipykernel']),
    'fastai is not blamed for a missing home': (lambda m: write(m.site/'fastai', {'vision/all.py': 'raise RuntimeError("Could not determine home directory.")'}),
        'fastai_dead', ['home directory.'], ['variable HOME'])}


@pytest.mark.parametrize('case', ONE_FINDING)
def test_the_only_finding(machine, case):
    plant_it, code, words, remedy = ONE_FINDING[case]
    plant_it(machine)
    machine.look().one(code, *words, remedy=remedy)


# ---- a GPU that is not used

def test_driver_is_not_loaded(machine):
    machine.has_card(driver='')
    machine.fake = FakeNVML(init_error=DRIVER_NOT_LOADED)
    machine.look().one('driver_asleep', 'NVML error 9', remedy=['Run `sudo modprobe nvidia`'])


@pytest.mark.skipif(os.name=='nt', reason='a shell script')
@pytest.mark.parametrize('smi,code,says', [
    ('GPU 0: RTX 3060 Ti (UUID: GPU-1)', 'cuda_dead', 'an NVIDIA GPU (RTX 3060 Ti)'),
    ('Failed to initialize NVML: Driver/library version mismatch', 'driver_mismatch', 'was updated while the machine was running'),
    ("NVIDIA-SMI couldn't communicate with the NVIDIA driver.", 'driver_dead', "nvidia-smi reports: NVIDIA-SMI couldn't communicate")])
def test_what_nvidia_smi_prints_where_nvml_has_no_library(machine, smi, code, says):
    machine.has_gpus(rtx(), torch=False, library=False)
    write(machine.folder, {'nvidia-smi': f'#!/bin/sh\necho "{smi}"\n'})
    (machine.folder/'nvidia-smi').chmod(0o755)
    machine.look().has(code, says)


@pytest.mark.skipif(os.name=='nt', reason='signals')
def test_a_process_that_cannot_be_ended_is_left_behind(machine):
    "One that waits in a driver outlives any signal: here the system's `kill` does nothing"
    machine.has_gpus(rtx(), query_s=15)
    code = """import os, time
os.kill = lambda pid, number: None
from gpubench.watch.facts import probe
start_s = time.monotonic()
print(probe(['nvml'], timeout_s=2)['nvml']['error'], time.monotonic()-start_s<10)"""
    p = machine.run(code)
    assert p.stdout=='no answer within 2 s True\n', p.stderr


def test_torch_is_mended_before_the_gpu(machine):
    machine.has_gpus(rtx())
    write(machine.site, {'torch/__init__.py': 'raise ImportError("libcudart.so.13: no such file")', 'fastai/__init__.py': 'import torch'})
    said = machine.look()
    said.one('torch_dead', 'libcudart.so.13', remedy=['one command'])
    assert said.exit_code==2 and not {'fastai', 'gpu'} & {o['about'] for o in said.said['findings']}


@pytest.mark.parametrize('place,remedy', [((), ['Restart the machine']), (('is_wsl2',), ['wsl --shutdown']),
                                          (('is_container',), ['Restart the host'])])
def test_driver_and_library_differ(machine, place, remedy):
    machine.has_gpus(rtx(), torch=False, init_error=LIB_RM_VERSION_MISMATCH, kernel='535.104.05')
    for o in place: getattr(machine, o)()
    machine.look().one('driver_mismatch', 'NVML error 18', "Memory isn't the cause", remedy=remedy)


def test_nvml_works_and_cuda_does_not(machine):
    machine.has_gpus(rtx(), torch=False)
    machine.torch['warning'] = 'CUDA unknown error - this may be due to an incorrectly set up environment'
    said = machine.look()
    said.one('cuda_dead', 'RTX 3060 Ti', 'NVML sees it', 'CUDA unknown error', remedy=['Restart', 'nvidia_uvm'])
    assert 'nvml_dead' not in said.by_code


@pytest.mark.parametrize('fake,place,remedy', [
    (dict(library=False), ['is_container'], 'NVIDIA_DRIVER_CAPABILITIES=compute,utility'),
    (dict(library=False), ['is_wsl2'], '/usr/lib/wsl/lib'), (dict(library=False), [], 'libnvidia-compute'),
    (dict(init_error=UNKNOWN), [], 'restart'), (dict(init_error=NO_PERMISSION), ['is_container'], 'administrator')])
def test_cuda_works_and_nvml_does_not(machine, fake, place, remedy):
    machine.has_gpus(rtx(), **fake)
    for o in place: getattr(machine, o)()
    said = machine.look()
    said.one('nvml_dead', "torch uses the GPU, but NVML doesn't answer", 'Times are measured', remedy=[remedy])
    said.has('gpu_ok', 'RTX 3060 Ti')
    said.has('gpu_memory_ok', '7.6 of 8.0 GiB')


@pytest.mark.parametrize('fake,words,remedy', [
    (dict(errors=dict(nvmlDeviceGetHandleByIndex=NO_PERMISSION)), 'Insufficient Permissions', 'administrator'),
    (dict(errors=dict(nvmlDeviceGetHandleByIndex=UNKNOWN)), 'Unknown Error', 'restart'),
    (dict(errors=dict(nvmlDeviceGetUtilizationRates=16)), 'GPU requires restart', 'has to be reset')])
def test_a_gpu_that_nvml_counts_and_cannot_read(machine, fake, words, remedy):
    machine.has_gpus(rtx(), **fake)
    said = machine.look()
    said.one('nvml_dead', f"NVML can't read GPU 0: ", words, 'Times are measured', remedy=[remedy])
    said.has('gpu_ok', 'RTX 3060 Ti')


def test_a_gpu_lost_between_two_questions(machine):
    machine.has_gpus(rtx(lost_after=3), torch=False)
    said = machine.look()
    assert said.wrong==['cuda_dead', 'nvml_dead'] and 'NVML sees it' not in json.dumps(said.said)
    said.has('nvml_dead', "NVML can't read GPU 0: GPU is lost. No sensor", remedy=['Xid'])


def test_a_lost_gpu_that_torch_does_not_use(machine):
    machine.has_gpus([FakeGPU(**RTX), FakeGPU(**RTX, lost=True)])
    machine.torch['gpus'].pop()
    assert machine.look().wrong==[]


def test_a_driver_that_hangs_in_a_query(machine):
    "The time-outs of `examine` are those of patience, so this looks at the same facts"
    machine.has_gpus(rtx(slow=dict(nvmlDeviceGetEnforcedPowerLimit=60)))
    p = machine.run("""from gpubench.watch.doctor import Facts, check_nvml, probe
print(*check_nvml(Facts(probe(['nvml'], timeout_s=3) | probe(['torch', 'cuda']))))""")
    assert "torch uses the GPU, but NVML doesn't answer: no answer within 3 s. Times are measured" in p.stdout and 'estart' in p.stdout


def test_an_nvml_that_ends_its_process(machine):
    machine.has_gpus(rtx())
    write(machine.site, {'pynvml.py': 'import os\nos.abort()'})
    machine.look().has('nvml_dead', 'it was ended by SIGABRT' if os.name=='posix' else 'exit code')


TORN = 'raise RuntimeError("torn while it was installed")'


@pytest.mark.parametrize('torch', [True, False])
def test_a_broken_pynvml(machine, torch):
    machine.has_gpus(rtx(), torch=torch)
    write(machine.site, {'pynvml.py': TORN})
    said = machine.look()
    assert said.wrong==(['nvml_dead'] if torch else ['cuda_dead', 'nvml_dead']) and said.exit_code==1
    said.has('nvml_dead', 'pynvml cannot be imported (RuntimeError: torn while', remedy=['pip install --force-reinstall nvidia-ml-py'])
    assert 'NVML reports' not in json.dumps(said.said)


def test_without_pynvml_nobody_knows_of_no_gpu(machine):
    write(machine.site, {'pynvml.py': TORN})
    said = machine.look()
    said.has('gpu_unknown', "NVML can't be queried", 'pynvml cannot be imported', remedy=['nvidia-ml-py'])
    assert said.wrong==[] and 'No NVIDIA GPU was found' not in json.dumps(said.said)


@pytest.mark.parametrize('error,code,remedy', [
    ('CUDA out of memory. Tried to allocate 2.00 MiB', 'gpu_full', 'nvidia-smi'),
    ('cuDNN error: CUDNN_STATUS_NOT_INITIALIZED', 'cudnn_dead', 'unset LD_LIBRARY_PATH')])
def test_a_gpu_that_is_listed_and_cannot_compute(machine, error, code, remedy):
    machine.has_gpus(rtx())
    machine.torch['gpus'][0]['compute_error'] = error
    machine.look().one(code, 'RTX 3060 Ti', error, remedy=[remedy])


def test_a_part_that_is_visible_by_its_uuid(machine):
    part = FakeMig()
    machine.has_gpus([FakeGPU(mig=[part, FakeMig('MIG-21111111-2222-3333-4444-555555555555')])])
    machine.torch['gpus'][0].update(name=part.name, uuid=part.uuid, total_mib=16384, free_mib=15000)
    machine.env['CUDA_VISIBLE_DEVICES'] = part.uuid
    said = machine.look()
    assert said.wrong==[] and 'hides' not in said.by_code['gpu_ok']['what']


def test_a_driver_that_ends_the_process_leaves_the_other_answers(machine):
    machine.has_gpus(rtx(), torch=False)
    machine.torch['die'] = True
    said = machine.look()
    said.one('cuda_dead', 'it was ended by SIGABRT' if os.name=='posix' else 'exit code')
    assert {'torch_ok', 'fastai_ok'} <= set(said.by_code) and said.said['machine']['torch']=='2.15.0'


# ---- a GPU on which not to measure now

def test_idle_and_power_cap_are_normal(machine):
    machine.has_gpus(rtx(throttle_reasons=0x1|0x2|0x4|0x10|0x100))
    assert machine.look().exit_code==0


def test_the_limit_is_raised_on_the_gpu_that_is_meant(machine):
    "torch's first is NVML's second, and `nvidia-smi -i` counts as NVML does"
    machine.has_gpus([FakeGPU(**RTX), FakeGPU(**RTX | dict(power_limit_w=120))])
    machine.torch['gpus'].pop(0)
    machine.env['CUDA_VISIBLE_DEVICES'] = '1'
    machine.look().one('power_limited', 'GPU 0 is limited to 120 W', remedy=['nvidia-smi -i 1 -pl 200'])


def test_another_process(machine):
    sleeper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])
    try:
        machine.has_gpus(rtx(processes=[[sleeper.pid, 1200], [2**22+1, None]]))
        o = machine.look().one('gpu_shared', f'(process {sleeper.pid}) with 1200 MiB, a process (process {2**22+1}).', remedy=['kernels'])
        assert 'python' in o['what']
    finally: sleeper.kill(); sleeper.wait()


def test_programs_with_a_window_are_no_computations(machine):
    "As Windows lists them: as computing and as drawing"
    machine.has_gpus(rtx(processes=[[11, None], [12, None]], drawing=[[11, None], [12, None]]))
    assert machine.look().wrong==[]
    machine.fake.gpus[0].processes.append([2**22+1, 900])
    o = machine.look().one('gpu_shared', f'a process (process {2**22+1}) with 900 MiB.')
    assert '(process 11)' not in o['what']


def test_another_process_in_a_container(machine):
    machine.has_gpus(rtx(processes=[[1, 1200]]))
    machine.is_container()
    o = machine.look().one('gpu_shared', 'a process with 1200 MiB')
    assert 'process 1' not in o['what']                                # a number of another system


def test_a_container_does_not_claim_to_be_alone(machine):
    machine.has_gpus(rtx())
    machine.is_container()
    said = machine.look()
    assert said.exit_code==0
    said.has('gpu_memory_ok', "can't be seen from inside a container")


def test_findings_are_about_the_gpu_that_torch_sees(machine):
    "torch counts by speed, NVML by place: the one that is visible is NVML's second"
    machine.has_gpus([FakeGPU(**RTX | dict(throttle_reasons=0x40, processes=[[1, 5]], power_limit_w=99)), FakeGPU(name='NVIDIA H200')])
    machine.torch['gpus'].pop(0)
    machine.env['CUDA_VISIBLE_DEVICES'] = '1'
    machine.fake.gpus[1].util_gpu_percent = 0
    said = machine.look()
    assert said.exit_code==0
    said.has('gpu_ok', 'H200', "CUDA_VISIBLE_DEVICES='1' hides 1 other(s)")


# ---- packages, the system, notebooks, data

def test_a_gpu_of_another_maker(machine):
    "ROCm's torch computes on it as `cuda`; there is no NVML to miss"
    machine.has_torch('2.15.0+rocm7.0', gpus=[dict(name='AMD Radeon RX 9070', uuid='', total_mib=16384, free_mib=16000)])
    said = machine.look()
    said.has('gpu_ok', 'AMD Radeon')
    assert said.wrong==[]


def test_a_package_that_prints_and_leaves_the_line_open(machine):
    with open(machine.site/'torchvision/__init__.py', 'a') as f: f.write('\nprint("loading ...", end="", flush=True)\n')
    assert machine.look().wrong==[]


def test_other_programs_compute(machine):
    before, after = [[1, 'init', 5.], [70, 'shell', 1.], [71, 'make_video', 40.], [72, 'hidden', None]], [
        [1, 'init', 5.], [70, 'shell', 1.01], [71, 'make_video', 40.53], [72, 'hidden', None]]
    said = machine.look(busy_percent=53., processes=[before, after])
    said.one('cpu_busy', 'use 53% of the CPU', 'make_video (process 71, 1.1 cores)', 'too long', remedy=['wait', 'run `gpubench doctor` again'])
    assert said.exit_code==1


def test_a_cpu_that_does_not_tell(machine):
    p = machine.run('def hidden(interval=None): raise PermissionError("/proc/stat")\npsutil.cpu_percent = hidden\n'
                    'from gpubench.watch.facts import cpu_load; print(cpu_load())')
    assert (p.stdout, p.stderr)==('None\n', '')
    plant(machine.site, 'psutil', '7', 'raise ImportError')
    p = machine.run('from gpubench.watch.doctor import Facts, check_load, cpu_load; print([*check_load(Facts({}, cpu_load()))])', busy_percent=None)
    assert p.stdout=='[]\n', p.stderr


@pytest.mark.parametrize('mib,free,code,container', [(64, 64, 'shared_memory_small', True), (64, 64, 'shared_memory_small', False),
                                                     (8192, 100, 'shared_memory_full', True), (8192, 8000, 'shared_memory_ok', True)])
def test_shared_memory(machine, mib, free, code, container):
    "The size of a file system, as the operating system tells Python"
    if container: machine.is_container()
    p = machine.run('import json, shutil, sys\nreal = shutil.disk_usage\n'
                    f'disk = type(real("/"))({mib*2**20}, {(mib-free)*2**20}, {free*2**20})\n'
                    f'shutil.disk_usage = lambda path: disk if str(path)=={str(machine.root/"dev/shm")!r} else real(path)\n'
                    f'from gpubench.watch.doctor import as_json, examine; print(as_json(examine({str(machine.root)!r})))')
    said = Said(json.loads(p.stdout))
    said.has(code)
    assert said.exit_code==(code!='shared_memory_ok')
    remedy = ['--shm-size'] if container else ['sudo mount -o remount', str(machine.root/'dev/shm')]
    if code=='shared_memory_small': said.one(code, '64 MiB', 'bus error', remedy=[*remedy, 'n_workers=0'])


@pytest.mark.skipif(not Path('/proc/self').exists(), reason='no file system that refuses what it allows')
def test_a_folder_that_only_says_that_it_may_be_written(machine):
    machine.env['FASTAI_HOME'] = '/proc/gpubench/fastai'
    machine.look().one('data_readonly', "can't write to /proc (", remedy=['FASTAI_HOME'])


# ---- a check that cannot be made

def failed(said): return [o['what'] for o in said.said['findings'] if o['code']=='check_failed']


@pytest.mark.skipif(os.name=='nt', reason='users of POSIX')
def test_a_user_without_a_home(machine):
    "What the operating system says of a number that `docker run --user` gave"
    machine.env['FASTAI_HOME'] = ''
    p = machine.run(f"""import os, pwd, sys
os.environ.pop('HOME')
def nobody(uid): raise KeyError(uid)
pwd.getpwuid = nobody
sys.argv = ['gpubench', 'doctor', '--json']
from gpubench.cli import main; main()""")
    said = Said(json.loads(p.stdout))
    assert p.returncode==said.exit_code==1 and p.stderr==''
    assert [o for o in ('check_kernel', 'check_data') if o not in ' '.join(failed(said))]==[]
    said.has('check_failed', 'RuntimeError: Could not determine home directory. ', remedy=['HOME'])
    assert {'torch_ok', 'fastai_ok', 'cpu_calm'} <= set(said.by_code)


def test_a_psutil_that_cannot_be_loaded(machine):
    plant(machine.site, 'psutil', '7', 'raise OSError("libpsutil.so: wrong ELF class")')
    said = machine.look(busy_percent=None)
    said.one('check_failed', '`check_load` failed: OSError: libpsutil.so: wrong ELF class. ', remedy=['run `gpubench doctor` again'])
    assert said.by_code['torch_ok'] and said.exit_code==1


def test_a_broken_psutil_does_not_hide_who_computes(machine):
    plant(machine.site, 'psutil', '7', 'raise OSError("libpsutil.so: wrong ELF class")')
    machine.has_gpus(rtx(processes=[[7, 1200]]))
    machine.look(busy_percent=None).has('gpu_shared', 'a process (process 7) with 1200 MiB')


def test_no_single_check_ends_the_run(machine):
    code = """import json, gpubench.watch.doctor as d
checks, kept = d.CHECKS, {}
d.probe = lambda names, **kwargs: {o: dict(ok=False, error='', code=None) for o in names}
def broken(facts): raise ValueError('x')
for i,check in enumerate(checks):
    d.CHECKS = (*checks[:i], broken, *checks[i+1:])
    found = [o.code for o in d.examine(ROOT)['findings']]
    print(found.count('check_failed'), len(found)>=len(checks)-3)
""".replace('ROOT', repr(str(machine.root)))
    p = machine.run(code)
    assert p.returncode==0 and set(p.stdout.splitlines())=={'1 True'} and len(p.stdout.splitlines())>=10, p.stdout+p.stderr


@pytest.mark.skipif(sys.platform!='linux', reason='a folder name that is no UTF-8')
def test_a_folder_whose_name_is_not_utf8(machine):
    folder = os.fsencode(machine.folder)+b'/caf\xe9'
    os.mkdir(folder)
    (machine.root/'proc/data').parent.mkdir(exist_ok=True)
    machine.env |= dict(FASTAI_HOME='/proc/caf\udce9', LC_ALL='C.UTF-8')
    p = machine.run(f"import os, sys; os.chdir({folder!r}); sys.argv = ['gpubench', 'doctor']\nfrom gpubench.cli import main; main()")
    machine.has_kernel('/gone/caf\udce9')
    assert (p.returncode, p.stderr)==(1, '') and 'The labs run' in p.stdout
    assert machine.look().has('kernel_other', 'caf')


# ---- what a script and a student get

def test_the_shape_for_scripts(machine):
    machine.has_gpus(rtx(throttle_reasons=0x40))
    said = machine.look().said
    assert set(said)=={'schema', 'level', 'exit_code', 'machine', 'nvml', 'findings'} and said['schema']==2
    assert [set(o) for o in said['findings']]==[{'level', 'about', 'code', 'what', 'remedy'}]*len(said['findings'])
    assert said['findings'][0]['code']=='gpu_throttled' and (said['level'], said['exit_code'])==('limit', 1)      # worst first


@pytest.mark.parametrize('args', [[], ['--json']])
def test_the_command_gives_the_exit_code(machine, args):
    machine.has_gpus(rtx())
    write(machine.site, {'torchvision/__init__.py': 'raise ImportError("broken")'})
    p = machine.run(f'import sys; sys.argv = ["gpubench", "doctor", *{args}]\nfrom gpubench.cli import main; main()')
    assert p.returncode==2 and p.stderr==''
    if args: assert json.loads(p.stdout)['exit_code']==2
    else: assert 'BROKEN' in p.stdout and p.stdout.rstrip().endswith('fix what is BROKEN above.')
    assert max(map(len, p.stdout.splitlines()))<=110 or args


def test_the_doctor_imports_little():
    "It must run where what the monitor imports does not"
    code = "import sys, gpubench.watch.doctor; print({'torch', 'fastai', 'psutil', 'pynvml'} & set(sys.modules))"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout=='set()\n'


def test_every_code_is_tested_here():
    "A finding that no test asks for may contain anything; the others are tested in the notebook"
    here = Path(__file__).read_text().partition('def test_every_code')[0]
    assert {o for o in CODES if f"'{o}'" not in here} <= {
        'packages_ok', 'packages_missing', 'packages_wrong', 'pynvml_unofficial', 'torch_ok', 'fastai_ok', 'gpu_full', 'gpu_hidden', 'gpu_too_old',
        'torchvision_build', 'torchvision_dead', 'cpu_quota', 'kernel_ok', 'kernel_missing', 'data_ok'}
