"What `gpubench doctor` finds, from facts as drivers, CUDA and the file system give them"
import json, os, subprocess, sys

import pytest

from gpubench.watch import doctor
from gpubench.watch.doctor import STEPS, Facts, exit_code, findings, look

from helpers import root

CARD = dict(index=0, name='NVIDIA GeForce RTX 3060 Ti', uuid='GPU-7', mig=None, processes=[], gpu_util_frac=.03, gpu_mem_free_mib=7800.,
            gpu_mem_total_mib=8192., throttle_bits=0x1, power_limit_w=200., default_limit_w=200.)
TORCH = dict(version='2.11.0+cu130', cuda='13.0')
USED = dict(gpus=[dict(name=CARD['name'], uuid='7')])

def machine(root, load=None, env=None, **found):
    "With these facts; a step that isn't named found nothing"
    return Facts({o: dict(warnings=[]) | found.get(o, {}) for o in STEPS}, load, root, env or {})

def codes(facts, *of):
    "The questions whose answer is a fault, of those asked about"
    return [o.code for o in findings(facts) if o.code in of]

def of_card(tmp_path, **values): return machine(tmp_path, torch=TORCH, cuda=USED, nvml=dict(gpus=[CARD | values]))

@pytest.fixture
def driver(tmp_path):
    "A machine whose kernel has loaded NVIDIA's driver"
    (tmp_path/'proc/driver/nvidia').mkdir(parents=True)
    (tmp_path/'proc/driver/nvidia/version').write_text('NVRM version: 580.126')
    return tmp_path

# ---- a GPU that can't be used

SAID = { # what CUDA or NVML says → what the remedy contains
    'CUDA initialization: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver combination': 'Restart',
    'CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)': 'newer NVIDIA driver',
    'RuntimeError: CUDA error: no kernel image is available for execution on the device': 'no code for a card',
    'RuntimeError: CUDA error: out of memory': 'end them',
    'RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED': 'LD_LIBRARY_PATH',
    'CUDA initialization: CUDA unknown error': 'docker run --gpus all'}

@pytest.mark.parametrize('said', SAID)
@pytest.mark.parametrize('how', ['warnings', 'error'])
def test_cuda_is_quoted_and_has_a_remedy(said, how, driver):
    [o] = [o for o in findings(machine(driver, torch=TORCH, cuda={how: [said] if how=='warnings' else said})) if o.code=='cuda']
    assert said in o.what and SAID[said] in o.remedy

@pytest.mark.parametrize('value,error,torch,remedy', [
    ('', '', TORCH, 'unset'), ('0,0', '', TORCH, 'unset'), (None, '', TORCH, 'docker run'), ('0', 'CUDA error 803', TORCH, 'Restart'),
    ('', '', dict(version='2.11.0+cpu', cuda=None), 'Reinstall torch')])
def test_a_gpu_that_a_variable_hides(value, error, torch, remedy, driver):
    "CUDA itself doesn't complain then; a torch for the CPU alone comes first"
    env = {} if value is None else dict(CUDA_VISIBLE_DEVICES=value)
    cuda = dict(error=error) if error else {}
    [o] = [o for o in findings(machine(driver, torch=torch, cuda=cuda, nvml=dict(gpus=[CARD]), env=env)) if o.code=='cuda']
    assert remedy in o.remedy

@pytest.mark.parametrize('traces,is_there', [
    ({}, False), ({'sys/bus/pci/devices/0/vendor': '0x10de', 'sys/bus/pci/devices/0/class': '0x030000'}, True),
    ({'sys/bus/pci/devices/0/vendor': '0x10de', 'sys/bus/pci/devices/0/class': '0x040300'}, False),          # the sound of its HDMI
    ({'usr/lib/wsl/lib/nvidia-smi': ''}, True)])
def test_what_shows_a_gpu(traces, is_there, tmp_path):
    "Without one, nothing is wrong"
    for path,words in traces.items():
        (tmp_path/path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path/path).write_text(words)
    assert codes(machine(tmp_path, torch=TORCH), 'cuda')==['cuda']*is_there

# ---- a GPU that is used

@pytest.mark.parametrize('code,values', [
    (None, {}), ('gpu_memory', dict(gpu_mem_free_mib=900.)), ('gpu_shared', dict(processes=[7])),
    ('gpu_shared', dict(gpu_util_frac=.6)), (None, dict(processes=[7], mig=True)), ('gpu_slowed', dict(throttle_bits=0x48)),
    ('gpu_slowed', dict(power_limit_w=100.)), (None, dict(power_limit_w=199.)),
    (None, dict.fromkeys(['gpu_mem_free_mib', 'processes', 'gpu_util_frac', 'throttle_bits', 'power_limit_w', 'mig']))])
def test_what_would_spoil_a_measurement(code, values, tmp_path):
    found = codes(of_card(tmp_path, **values), 'gpu_memory', 'gpu_shared', 'gpu_slowed', 'cuda', 'nvml')
    assert found==[code]*bool(code)

def test_only_the_gpu_that_torch_uses_counts(tmp_path):
    other = CARD | dict(index=1, uuid='GPU-8', gpu_mem_free_mib=100.)
    facts = machine(tmp_path, torch=TORCH, cuda=USED, nvml=dict(gpus=[CARD, other]))
    assert codes(facts, 'gpu_memory')==[] and facts.gpus==[CARD]
    [o] = [o for o in findings(machine(tmp_path, torch=TORCH, cuda=USED, nvml=dict(error='NVML error 4: Insufficient Permissions'))) if o.code=='nvml']
    assert 'error 4' in o.what and 'NVIDIA_DRIVER_CAPABILITIES' in o.remedy               # its sensors can't be read

# ---- packages

def test_an_import_error_is_quoted_and_comes_first(tmp_path):
    facts = machine(tmp_path, .9, torch=dict(error='ImportError: libcudart.so.12: cannot open shared object file'), fastai=dict(error='x'))
    assert [(o.code, o.level) for o in findings(facts) if o.code in ('training', 'cpu_busy')]==[('training', 'broken'), ('cpu_busy', 'limit')]
    assert 'libcudart.so.12' in findings(facts)[0].what and exit_code(findings(facts))==2
    assert codes(machine(tmp_path, training=dict(error='TypeError: x')), 'training')==['training']

@pytest.mark.parametrize('version,found', [('5.10.0', ''), ('1.0', 'psutil>=5.9 (installed: 1.0)'), (None, 'psutil>=5.9 (installed: none)')])
def test_packages_that_do_not_fit(version, found, monkeypatch):
    monkeypatch.setattr(doctor, 'requires', lambda name: ['psutil>=5.9', 'nbdev; extra=="dev"'])
    monkeypatch.setattr(doctor, 'package_version', lambda name: version)
    assert doctor.unmet(None)==found

# ---- the machine

@pytest.mark.parametrize('quota,threads,is_found', [(1.5, '', True), (1.5, '1', False), (1.5, '8', True),
                                                    (None, '', False), (9., '', False)])
def test_a_quota_below_the_cores(quota, threads, is_found, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, 'n_visible_cores', lambda: 8)
    monkeypatch.setattr(doctor, 'cpu_quota', lambda root: quota)
    assert codes(machine(tmp_path, env=dict(OMP_NUM_THREADS=threads)), 'cpu_quota')==['cpu_quota']*is_found

@pytest.mark.parametrize('total_mib,free_mib,is_small', [(64, 64, True), (8192, 8000, False), (8192, 100, True)])
def test_shared_memory(total_mib, free_mib, is_small, tmp_path, monkeypatch):
    (tmp_path/'dev/shm').mkdir(parents=True)
    monkeypatch.setattr(doctor.shutil, 'disk_usage', lambda path: (total_mib*2**20, 0, free_mib*2**20))
    assert codes(machine(tmp_path), 'shared_memory')==['shared_memory']*is_small

@pytest.mark.parametrize('python', [sys.executable, 'python3', '/nowhere/python'])
def test_the_kernel_of_another_python(python, tmp_path, monkeypatch):
    (tmp_path/'kernels/python3').mkdir(parents=True)
    (tmp_path/'kernels/python3/kernel.json').write_text(json.dumps(dict(argv=[python, '-m', 'ipykernel_launcher'], display_name='x', language='python')))
    monkeypatch.setenv('JUPYTER_PATH', str(tmp_path))
    assert codes(machine(tmp_path), 'kernel')==['kernel']*(python=='/nowhere/python')

# ---- the examination

def test_a_question_that_fails_is_told(tmp_path, monkeypatch):
    def broken(): raise OSError('libz.so: wrong ELF class')
    monkeypatch.setattr(doctor, 'n_visible_cores', broken)
    [o] = [o for o in findings(machine(tmp_path)) if o.code=='cpu_quota']
    assert 'wrong ELF class' in o.what and o.level=='limit'

@pytest.mark.parametrize('code,says', [("raise ImportError('no torch for you')", 'no torch for you'), ('import os; os.abort()', 'exit code -6')])
def test_a_package_that_ends_its_process(code, says, tmp_path, monkeypatch):
    "What was found before stays, and what follows wasn't tried"
    (tmp_path/'torch.py').write_text(code)
    monkeypatch.setenv('PYTHONPATH', f'{tmp_path}{os.pathsep}{root}')
    found = look()
    assert {*found}=={*STEPS} and says in found['torch']['error']
    assert (found['cuda']['error']=='not tried')==('abort' in code)

def test_the_doctor_needs_no_package():
    code = "import sys, gpubench.watch.doctor; print({'torch', 'fastai', 'psutil', 'pynvml'} & set(sys.modules))"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip()=='set()'
