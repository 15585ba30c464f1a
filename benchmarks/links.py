"""What it takes to reach memory, files, other processes and GPUs: the time of 4 bytes, and the bandwidth of many

    links.py --out links.json [--device cuda] [--rounds 12]

Each round measures every link once, in an order of its own, and the first round is warm-up; medians of the rounds with
their 95 % intervals. Many bytes are 256 MB, in messages and files 64 MB. A copy to or from a GPU counts until its bytes
have arrived. `memory` and `GPU memory` count each byte twice, read and written. A message counts until the other process
has answered it, with nothing. The file is in the system's memory, and its 4 bytes include opening it.

With two or more GPUs, also a copy from the first to the second, and NCCL's all-reduce over all of them, one process
each: of many bytes, gigabytes of gradients per second."""
import json, multiprocessing, tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter

import pandas as pd
import torch
from fastcore.basics import noop
from gpubench.ground.core import open_nvml
from gpubench.ground.stats import median_ci
from gpubench.watch.nvml import attempt, find_gpu
from torch import distributed as dist

from common import alternate, device_of, device_parser, write_json

FEW, MANY, MANY_PIPED = 4, 256_000_000, 64_000_000    # bytes
TWICE = 'memory', 'GPU memory'                        # read and written in the same place
PIPED = 'message to a process', 'cached file'

def seconds(act, n, wait=noop):
    "Of one of n calls in a row, with one wait for all of them"
    wait()
    start = perf_counter()
    for _ in range(n): act()
    wait()
    return (perf_counter()-start)/n

def both(few, many, n, wait=noop):
    "A link's two measurements: of few bytes, waited for each time, and of many"
    def one():
        few()
        wait()
    return partial(seconds, one, n, wait), partial(seconds, many, 1, wait)

def tensor(n_bytes, device='cpu', pinned=False):
    "Ones, so that its pages exist"
    x = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    return x.pin_memory() if pinned else x

def copies(src, to, n=50, wait=noop):
    few, many = (partial(tensor(o, **to).copy_, tensor(o, **src)) for o in (FEW, MANY))
    return both(few, many, n, wait)

def echo(pipe):
    "The other process: answers each message with an empty one, and ends with an empty one"
    while pipe.recv_bytes(): pipe.send_bytes(b'')

@contextmanager
def other_process():
    "The end of a pipe to a process that answers"
    context = multiprocessing.get_context('spawn')
    here, there = context.Pipe()
    child = context.Process(target=echo, args=(there,), daemon=True)
    child.start()
    there.close()
    try: yield here
    finally:
        here.send_bytes(b'')
        child.join()

def cpu_links(pipe, file):
    "Link -> its two measurements"
    few, many = bytearray(FEW), bytearray(MANY_PIPED)
    def send(message):
        pipe.send_bytes(message)
        pipe.recv_bytes()
    def read(to):
        with open(file, 'rb', buffering=0) as f: f.readinto(to)
    return {'memory': copies({}, {}, 1000)} | {
        k: both(partial(act, few), partial(act, many), 200) for k,act in zip(PIPED, (send, read))}

def gpu_links(device):
    wait, gpu, pinned = partial(torch.cuda.synchronize, device), dict(device=device), dict(pinned=True)
    launch, copy = partial(tensor(FEW, device).add_, 1), partial(tensor(MANY, device).copy_, tensor(MANY, device))
    return {'kernel, issued': (partial(seconds, launch, 200), None),    # too few to fill the queue
            'kernel, issued and waited for': (both(launch, None, 200, wait)[0], None),
            'wait for an idle GPU': (partial(seconds, wait, 200), None),
            'host to GPU, pageable': copies({}, gpu, wait=wait), 'host to GPU, pinned': copies(pinned, gpu, wait=wait),
            'GPU to host, pageable': copies(gpu, {}, wait=wait), 'GPU to host, pinned': copies(gpu, pinned, wait=wait),
            'GPU memory': (None, partial(seconds, copy, 20, wait))}

def peer_links():
    def wait():
        for i in range(2): torch.cuda.synchronize(i)
    return {'GPU to GPU': copies(dict(device='cuda:0'), dict(device='cuda:1'), wait=wait)}

def reduce_apart(rank, n, rounds, folder):
    "In the process of one GPU; the first one writes the seconds of each round"
    device = torch.device('cuda', rank)
    torch.cuda.set_device(device)
    dist.init_process_group('nccl', f'file://{folder}/store', rank=rank, world_size=n, device_id=device)
    few, many = (partial(dist.all_reduce, torch.ones(o//4, device=device), dist.ReduceOp.AVG) for o in (FEW, MANY))
    ways = both(few, many, 50, partial(torch.cuda.synchronize, device))
    found = alternate(dict(enumerate(ways)), rounds, lambda act: act())
    if rank==0: Path(folder, 'found.json').write_text(json.dumps([*found.values()]))
    dist.destroy_process_group()

def all_reduce(n, rounds):
    "Link -> seconds of few and of many bytes, each round"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(reduce_apart, (n, rounds, folder), n)
        return {f'all-reduce of {n} GPUs': json.loads(Path(folder, 'found.json').read_text())}

def measure(device, n_gpus, rounds):
    "Link -> seconds of few and of many bytes, each round; None where there is no such measurement"
    with other_process() as pipe, tempfile.NamedTemporaryFile() as file:
        file.write(bytes(MANY_PIPED))
        file.flush()
        links = cpu_links(pipe, file.name) | (gpu_links(device) if n_gpus else {}) | (peer_links() if n_gpus>1 else {})
        acts = {(k,i): act for k,pair in links.items() for i,act in enumerate(pair) if act}
        found = alternate(acts, rounds, lambda act: act())
    found = {k: [found.get((k,i)) for i in range(2)] for k in links}
    return found | (all_reduce(n_gpus, rounds) if n_gpus>1 else {})

def row(link, few_s, many_s):
    "Microseconds of few bytes and gigabytes per second of many, with their intervals"
    n_bytes = MANY_PIPED if link in PIPED else MANY*(1+(link in TWICE))
    values = dict(us=[1e6*s for s in few_s or []], gb_per_s=[n_bytes/s/1e9 for s in many_s or []])
    ends = {k: median_ci(v) for k,v in values.items()}
    return dict(link=link) | {f'{k}{end}': getattr(i, o) for k,i in ends.items()
                              for end,o in (('', 'mid'), ('_lo', 'lo'), ('_hi', 'hi'))}

def shown(o, name):
    mid, lo, hi = (o[name+end] for end in ('', '_lo', '_hi'))
    return '' if mid!=mid else f'{mid:.3g} ({lo:.3g} to {hi:.3g})'

def bus():
    "What joins the first GPU to the host and to others, as the driver knows it; None where it doesn't"
    try:
        nvml = open_nvml()
        gpu = find_gpu(nvml, 'cuda:0')
    except Exception: return {}                       # NVML's errors, and whatever a broken package raises
    def ask(name, *args): return attempt(lambda: getattr(nvml, name)(gpu, *args), name, {})
    return dict(pcie_generation=ask('nvmlDeviceGetMaxPcieLinkGeneration'), pcie_lanes=ask('nvmlDeviceGetMaxPcieLinkWidth'),
                nvlinks=sum(ask('nvmlDeviceGetNvLinkState', i)==1 for i in range(nvml.NVML_NVLINK_MAX_LINKS)))

def main():
    p = device_parser(__doc__)
    p.add_argument('--rounds', type=int, default=12)
    args = p.parse_args()
    start_s, device = perf_counter(), torch.device(device_of(args))
    n_gpus = torch.cuda.device_count() if device.type=='cuda' else 0
    runs = measure(device, n_gpus, args.rounds)
    links, joined = [row(k, *o) for k,o in runs.items()], bus() if n_gpus else {}
    table = {o['link']: {'4 bytes, µs': shown(o, 'us'), 'many bytes, GB/s': shown(o, 'gb_per_s')} for o in links}
    print(pd.DataFrame(table).T.to_string(), *[f'{k}: {v}' for k,v in joined.items()], sep='\n')
    write_json(args.out, str(device), device=str(device), rounds=args.rounds, bus=joined,
               took_s=round(perf_counter()-start_s, 1), links=links,
               runs_s={k: dict(zip(('few', 'many'), o)) for k,o in runs.items()})

if __name__=='__main__': main()
