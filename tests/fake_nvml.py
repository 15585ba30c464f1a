"""A faked NVML, below pynvml, whose own code runs unchanged: it stands in for the C library `libnvidia-ml.so.1`.

    from fake_nvml import FakeGPU, FakeNVML, GPU_IS_LOST, NOT_SUPPORTED, wsl2

    gpu = FakeGPU(power_w=300, errors=dict(nvmlDeviceGetPowerUsage=NOT_SUPPORTED))
    with FakeNVML([gpu, FakeGPU()]).installed() as nvml:     # this process: `pynvml`, whoever calls ctypes.CDLL
        ...
        gpu.lost = True                                      # everything about a GPU may change while it runs
        subprocess.run(cmd, env=os.environ)                  # processes started meanwhile see the same machine
    subprocess.run(cmd, env=os.environ | FakeNVML([FakeGPU()]).child_env())   # or only another process, as it starts

FakeNVML(library=False)                             no such library
FakeNVML(init_error=LIB_RM_VERSION_MISMATCH)        nvmlInit fails: 18; DRIVER_NOT_LOADED 9, NO_PERMISSION 4, UNKNOWN 999 …
FakeNVML(errors={function: code})                   on every GPU; FakeGPU(errors=…) on one. Names without _v2, _v3
FakeNVML(missing=['nvmlDeviceGetTemperatureV'])     an older library, which lacks these functions
FakeGPU(lost_after=n, lost_after_s=s, lost=True)    GPU_IS_LOST after n queries of it, after s seconds, from now on
FakeGPU(mig=[FakeMig()])                            MIG mode: utilisation is not supported, instances have memory alone
wsl2()                                              a GPU with the gaps that WSL2 has
FakeNVML(query_s=.01)                               how long each query takes
FakeNVML(slow={function: s})                        how long one takes, on every GPU; FakeGPU(slow=…) on one: a question that hangs
fake_nvml.playing                                   in another process: what it plays, to be changed as it runs
nvml.calls                                          Counter of the functions that were called; nvml.n_inits: inits less shutdowns"""
import ctypes, json, os, re, sys, tempfile, time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, INSUFFICIENT_SIZE = 1, 2, 3, 4, 6, 7
DRIVER_NOT_LOADED, TIMEOUT, GPU_IS_LOST, LIB_RM_VERSION_MISMATCH, UNKNOWN = 9, 10, 15, 18, 999
NOT_AVAILABLE = 2**64-1                      # NVML_VALUE_NOT_AVAILABLE
MIB = 2**20
ENERGY_TICK_S = .1                           # so often the energy counter moves
ENV = 'GPUBENCH_FAKE_NVML'                   # where a child process finds the fake it is to play


@dataclass
class FakeMig:
    "One instance of a GPU in MIG mode"
    uuid: str = 'MIG-11111111-2222-3333-4444-555555555555'
    name: str = 'NVIDIA H200 MIG 1g.18gb'
    memory_total_mib: float = 16384
    memory_used_mib: float = 500


@dataclass
class FakeGPU:
    name: str = 'NVIDIA H200'
    uuid: str = ''                           # made from the index where empty
    memory_total_mib: float = 143771
    memory_used_mib: float = 2048
    power_w: float = 300
    power_limit_w: float = 700              # that in force
    default_limit_w: float = 700
    temperature_c: int = 55
    sm_clock_mhz: int = 1980
    mem_clock_mhz: int = 3201
    throttle_reasons: int = 0                # bit mask
    util_gpu_percent: int = 90
    util_mem_percent: int = 40
    energy_j: float = 1e6                    # when the library is loaded; grows by power_w, a tick at a time
    processes: list = field(default_factory=list)   # those that compute: [pid, MiB or None], …
    drawing: list = field(default_factory=list)     # those that draw; Windows lists most in both
    mig: list = field(default_factory=list)  # `FakeMig`, …: MIG mode is on
    errors: dict = field(default_factory=dict)
    slow: dict = field(default_factory=dict) # function -> seconds that it takes
    lost: bool = False
    lost_after: int | None = None            # queries of this GPU
    lost_after_s: float | None = None        # seconds after the library is loaded


def wsl2(**kwargs):
    "A GPU with the gaps that WSL2 has"
    gaps = dict(nvmlDeviceGetTotalEnergyConsumption=NOT_SUPPORTED, nvmlDeviceGetUtilizationRates=UNKNOWN,
                nvmlDeviceGetCurrentClocksEventReasons=NOT_SUPPORTED, nvmlDeviceGetCurrentClocksThrottleReasons=NOT_SUPPORTED,
                nvmlDeviceGetComputeRunningProcesses=NOT_SUPPORTED, nvmlDeviceGetGraphicsRunningProcesses=NOT_SUPPORTED)
    return FakeGPU(**dict(name='NVIDIA GeForce RTX 3060 Ti', memory_total_mib=8192, errors=gaps) | kwargs)


def _target(arg): return getattr(arg, '_obj', arg)          # what byref() refers to
def _value(arg): return getattr(arg, 'value', arg)
def _put(arg, value): _target(arg).value = value
def _put_handle(arg, address): ctypes.c_void_p.from_buffer(_target(arg)).value = address
def _address(handle): return ctypes.cast(_target(handle), ctypes.c_void_p).value
def _pause(s): s and time.sleep(s)                          # sleeping for 0 s gives way to others, which takes a while
def _base(name): return re.sub(r'(_v\d+|(?<=Temperature)V)$', '', name)


class _Library:
    "What `ctypes.CDLL('libnvidia-ml.so.1')` gives: functions that take ctypes arguments and return an error code"
    def __init__(self, fake): self._fake, self._functions = fake, {}
    def __getattr__(self, name):
        if name.startswith('__') or {name, _base(name)} & set(self._fake.missing) or not hasattr(self._fake, '_'+_base(name)):
            raise AttributeError(f'undefined symbol: {name}')
        if name not in self._functions:
            def function(*args): return self._fake.call(name, args)     # a plain function takes `restype`, as ctypes' own do
            self._functions[name] = function
        return self._functions[name]


class FakeNVML:
    "A machine as NVML shows it; see the head of this file"
    def __init__(self, gpus=(), driver='580.95.05', nvml='13.580.95.05', cuda_version=13000, library=True, init_error=0, errors=None,
                 missing=(), query_s=0., slow=None, clock=time.monotonic):
        self.gpus = list(gpus)
        for i,o in enumerate(self.gpus): o.uuid = o.uuid or f'GPU-{i:08x}-1111-2222-3333-444444444444'
        self.driver, self.nvml, self.cuda_version, self.library, self.init_error = driver, nvml, cuda_version, library, init_error
        self.errors, self.missing, self.query_s, self.clock = dict(errors or {}), list(missing), query_s, clock
        self.slow = dict(slow or {})
        self.calls, self.n_inits, self.start_s = Counter(), 0, clock()
        self.queries, self.ticked_s = Counter(), {}
        self.lib = _Library(self)

    # ---- where it is put

    def cdll(self, real):
        "`ctypes.CDLL` that gives this library for NVML's name"
        fake = self
        class CDLL(real):
            def __new__(cls, name=None, *args, **kwargs):
                if not re.search(r'nvidia-ml|nvml\.dll', str(name)): return real(name, *args, **kwargs)
                if fake.library: return fake.lib
                raise OSError(f'{name}: cannot open shared object file: No such file or directory')
        return CDLL

    @contextmanager
    def installed(self):
        "Played in this process and in those that it starts, until left"
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(mock.patch('ctypes.CDLL', self.cdll(ctypes.CDLL)))
            enter(mock.patch.dict(os.environ, self.child_env(stack)))
            _fresh(enter)
            yield self

    def child_env(self, stack=None):
        "Environment variables with which another Python starts on this machine, as it is now; the folder goes with `stack`, or with this object"
        folder = tempfile.TemporaryDirectory(prefix='fake-nvml-')
        if stack is None: self._folder = folder
        else: stack.enter_context(folder)
        path = Path(folder.name)
        (path/'sitecustomize.py').write_text(_SITECUSTOMIZE.format(here=str(Path(__file__).resolve())))
        return {ENV: self.as_json(), 'PYTHONPATH': os.pathsep.join(o for o in (str(path), os.environ.get('PYTHONPATH')) if o)}

    def as_json(self):
        names = 'driver nvml cuda_version library init_error errors missing query_s slow'.split()
        return json.dumps({o: getattr(self, o) for o in names} | dict(gpus=[asdict(o) for o in self.gpus]))

    @classmethod
    def from_json(cls, text):
        said = json.loads(text)
        gpus = [FakeGPU(**o | dict(mig=[FakeMig(**m) for m in o['mig']])) for o in said.pop('gpus')]
        return cls(gpus, **said)

    # ---- a call

    def call(self, name, args):
        base = _base(name)
        self.calls[base] += 1
        _pause(self.query_s+self.slow.get(base, 0))
        if base.startswith('nvmlInit'): return self._start()
        if base=='nvmlErrorString': return self._nvmlErrorString(*args)
        if not self.n_inits: return UNINITIALIZED
        if base in self.errors: return self.errors[base]
        return getattr(self, '_'+base)(*args) or 0

    def _start(self):
        if not self.init_error: self.n_inits += 1
        return self.init_error

    def _nvmlInit(self): pass
    def _nvmlInitWithFlags(self, flags): pass
    def _nvmlShutdown(self): self.n_inits -= 1

    def _nvmlErrorString(self, code):
        words = {UNINITIALIZED: 'Uninitialized', INVALID_ARGUMENT: 'Invalid Argument', NOT_SUPPORTED: 'Not Supported', 4: 'Insufficient Permissions',
                 NOT_FOUND: 'Not Found', DRIVER_NOT_LOADED: 'Driver Not Loaded', TIMEOUT: 'Timeout', GPU_IS_LOST: 'GPU is lost',
                 LIB_RM_VERSION_MISMATCH: 'Driver/library version mismatch'}
        return words.get(_value(code), 'Unknown Error').encode()

    # ---- the system

    def _nvmlSystemGetDriverVersion(self, text, size): _put(text, self.driver.encode())
    def _nvmlSystemGetNVMLVersion(self, text, size): _put(text, self.nvml.encode())
    def _nvmlSystemGetCudaDriverVersion(self, out): _put(out, self.cuda_version)
    def _nvmlDeviceGetCount(self, out): _put(out, len(self.gpus))

    # ---- handles: 0x1000 times the GPU's index and one, plus the number of the MIG instance from 1

    def _find(self, handle):
        "GPU, its index, MIG instance or None"
        at = _address(handle) or 0
        i, m = at//0x1000-1, at%0x1000
        if not 0<=i<len(self.gpus): return None, i, None
        return self.gpus[i], i, self.gpus[i].mig[m-1] if m else None

    def _is_lost(self, gpu, i):
        self.queries[i] += 1
        if gpu.lost_after is not None and self.queries[i]>gpu.lost_after: gpu.lost = True
        if gpu.lost_after_s is not None and self.clock()-self.start_s>gpu.lost_after_s: gpu.lost = True
        return gpu.lost

    def _hand(self, i, out, m=0):
        if self.gpus[i].lost: return GPU_IS_LOST
        _put_handle(out, 0x1000*(i+1)+m)

    def _nvmlDeviceGetHandleByIndex(self, index, out):
        i = _value(index)
        return self._hand(i, out) if 0<=i<len(self.gpus) else INVALID_ARGUMENT

    def _nvmlDeviceGetHandleByUUID(self, uuid, out):
        name = _value(uuid).decode()
        for i,o in enumerate(self.gpus):
            for m,uid in enumerate([o.uuid, *[p.uuid for p in o.mig]]):
                if uid==name: return self._hand(i, out, m)
        return NOT_FOUND


def _query(name, mig=NOT_SUPPORTED, whole=0):
    """A query of a GPU: `f(nvml, gpu, i, part, *out)` fills what it is given.
    `mig` is the code for an instance (0: it answers), `whole` that for a GPU in MIG mode"""
    def made(f):
        def query(self, handle, *out):
            gpu, i, part = self._find(handle)
            if gpu is None: return INVALID_ARGUMENT
            _pause(gpu.slow.get(name, 0))
            if self._is_lost(gpu, i): return GPU_IS_LOST
            code = gpu.errors.get(name) or (mig if part else whole if gpu.mig else 0)
            return code or f(self, gpu, i, part, *out)
        setattr(FakeNVML, '_'+name, query)
        return f
    return made

@_query('nvmlDeviceGetName', mig=0)
def _(nvml, gpu, i, part, out, size): _put(out, (part or gpu).name.encode())

@_query('nvmlDeviceGetUUID', mig=0)
def _(nvml, gpu, i, part, out, size): _put(out, (part or gpu).uuid.encode())

@_query('nvmlDeviceGetMemoryInfo', mig=0)
def _(nvml, gpu, i, part, out):
    o, at = part or gpu, _target(out)
    at.total, at.used = int(o.memory_total_mib*MIB), int(o.memory_used_mib*MIB)
    at.free = at.total-at.used

@_query('nvmlDeviceGetUtilizationRates', whole=NOT_SUPPORTED)
def _(nvml, gpu, i, part, out): _target(out).gpu, _target(out).memory = gpu.util_gpu_percent, gpu.util_mem_percent

@_query('nvmlDeviceGetTemperature', mig=INVALID_ARGUMENT)
def _(nvml, gpu, i, part, *args):
    if len(args)==1: _target(args[0]).temperature = gpu.temperature_c             # nvmlDeviceGetTemperatureV
    else: _put(args[1], gpu.temperature_c)

@_query('nvmlDeviceGetPowerUsage')
def _(nvml, gpu, i, part, out): _put(out, int(1e3*gpu.power_w))

@_query('nvmlDeviceGetEnforcedPowerLimit')
def _(nvml, gpu, i, part, out): _put(out, int(1e3*gpu.power_limit_w))

@_query('nvmlDeviceGetPowerManagementDefaultLimit')
def _(nvml, gpu, i, part, out): _put(out, int(1e3*gpu.default_limit_w))

@_query('nvmlDeviceGetClockInfo')
def _(nvml, gpu, i, part, kind, out): _put(out, gpu.mem_clock_mhz if _value(kind)==2 else gpu.sm_clock_mhz)

@_query('nvmlDeviceGetCurrentClocksEventReasons')
def _(nvml, gpu, i, part, out): _put(out, gpu.throttle_reasons)

@_query('nvmlDeviceGetCurrentClocksThrottleReasons')
def _(nvml, gpu, i, part, out): _put(out, gpu.throttle_reasons)

@_query('nvmlDeviceGetTotalEnergyConsumption')
def _(nvml, gpu, i, part, out):
    last_s = nvml.ticked_s.setdefault(i, nvml.start_s)
    ticks = int((nvml.clock()-last_s)/ENERGY_TICK_S+1e-9)
    nvml.ticked_s[i] = last_s + ticks*ENERGY_TICK_S
    gpu.energy_j += ticks*ENERGY_TICK_S*gpu.power_w
    _put(out, round(1e3*gpu.energy_j))

@_query('nvmlDeviceGetMigMode')
def _(nvml, gpu, i, part, now, pending): _put(now, int(bool(gpu.mig))), _put(pending, int(bool(gpu.mig)))

@_query('nvmlDeviceGetComputeRunningProcesses')
def _(nvml, gpu, i, part, count, found): return _list(gpu.processes, count, found)

def _list(processes, count, found):
    n = _target(count).value
    _put(count, len(processes))
    if not processes: return 0
    if found is None or n<len(processes): return INSUFFICIENT_SIZE
    for at,(pid,mib) in zip(found, processes):
        at.pid, at.usedGpuMemory = pid, NOT_AVAILABLE if mib is None else int(mib*MIB)
        if hasattr(at, 'gpuInstanceId'): at.gpuInstanceId = at.computeInstanceId = 2**32-1

@_query('nvmlDeviceGetGraphicsRunningProcesses')
def _(nvml, gpu, i, part, count, found): return _list(gpu.drawing, count, found)


# ---- what pynvml remembers is put aside while the fake is played

def _fresh(enter):
    "pynvml as if it had just been imported"
    try: import pynvml
    except ImportError: return
    enter(mock.patch.multiple(pynvml, CDLL=ctypes.CDLL, nvmlLib=None, _nvmlLib_refcount=0, _nvmlGetFunctionPointer_cache={}))


# ---- another process: Python imports `sitecustomize` as it starts, from a folder on PYTHONPATH

_SITECUSTOMIZE = '''"""Plays a faked NVML in this process: see tests/fake_nvml.py"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location('fake_nvml', {here!r})
sys.modules['fake_nvml'] = fake_nvml = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake_nvml)
fake_nvml.play()
'''

playing = None

def play():
    "Play what the environment says, for the rest of this process"
    global playing
    playing = FakeNVML.from_json(os.environ[ENV])
    ctypes.CDLL = playing.cdll(ctypes.CDLL)
    return playing
