"GPUs that exist only as numbers in CUDA_VISIBLE_DEVICES, also in the jobs of a sweep: there, importing this module fakes them"
import os
import time
from pathlib import Path
from types import SimpleNamespace

import torch

COUNT = 'FAKE_GPUS' # environment variable

def visible():
    "The numbers of the GPUs that this process sees"
    all_gpus = ','.join(map(str, range(int(os.environ[COUNT]))))
    return [o for o in os.environ.get('CUDA_VISIBLE_DEVICES', all_gpus).split(',') if o]

def properties(device=0):
    return SimpleNamespace(name='Made-up GPU', total_memory=2**33, major=9, minor=0, uuid=visible()[getattr(device, 'index', device) or 0])

def fake(setattr):
    setattr(torch.cuda, 'is_available', lambda: True)
    setattr(torch.cuda, 'device_count', lambda: len(visible()))
    setattr(torch.cuda, 'get_device_properties', properties)

if COUNT in os.environ: fake(setattr)

def witness(x, folder, device, n_beside=1, stay=''):
    "Where and when this visit was. It waits for a minute at most until `n_beside` visits have begun, and while the file `stay` is there"
    folder, end = Path(folder), time.monotonic()+60
    (folder/f'{time.time_ns()}_{os.getpid()}').touch()
    while len([*folder.iterdir()])<n_beside and time.monotonic()<end: time.sleep(.05)
    while stay and Path(stay).exists() and time.monotonic()<end: time.sleep(.05)
    return dict(y=2*x, gpu_seen=os.environ['CUDA_VISIBLE_DEVICES'], cpus=sorted(os.sched_getaffinity(0)))
