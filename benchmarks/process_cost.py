"""What a fresh process costs a visit: the same small visit of a sweep in this process and in fresh ones

    process_cost.py --out process.json [--device cpu] [--n 10]

`visit_s` is the whole visit as the sweep sees it. On a GPU a fresh process also makes its context and loads its kernels, inside the visit: what that costs is the
difference of the `visit_s`."""
from statistics import median
from time import perf_counter

import pandas as pd
from gpubench.run import process
from gpubench.run.sweep import sweep

from common import device_of, device_parser, write_json

ways = list(dict.fromkeys(['here', 'spawn', process.START_METHOD]))
columns = 'context_s', 'work_s', 'visit_s'

def first_network(device):
    "As little as uses the device: one step of a small network"
    import torch
    from torch import nn
    start = perf_counter()
    torch.zeros(1, device=device)
    context_s = perf_counter()-start
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8*26*26, 10)).to(device)
    net(torch.zeros(64, 1, 28, 28, device=device)).sum().backward()
    if torch.device(device).type=='cuda': torch.cuda.synchronize(device)
    return dict(context_s=context_s, work_s=perf_counter()-start)

def times(df):
    return {o: [None if v is None else round(v, 4) for v in df[o].tolist()] for o in columns}

def measure(way, device, n):
    "n visits of one way, after an unmeasured one, which loads the server, or the files into the page cache"
    if way!='here': process.START_METHOD = way
    df = sweep([dict(device=device)], repeats=n+1, run=first_network, progress=False, isolate=way!='here')
    if set(df.status)!={'ok'}: raise RuntimeError(df.error.dropna().iloc[0])
    return times(df[1:])

def main():
    p = device_parser(__doc__, device='cpu')
    p.add_argument('--n', type=int, default=10, help='visits of each way')
    args = p.parse_args()
    device, start = device_of(args), perf_counter()
    process.start_server()
    measure(process.START_METHOD, device, 1)
    server_s = perf_counter()-start
    runs = {o: measure(o, device, args.n) for o in ways}
    medians = {k: {o: round(median(v), 4) for o,v in r.items() if v[0] is not None} for k,r in runs.items()}
    print(f'first visit, with the start of the server: {server_s:.1f} s')
    print(f'medians of {args.n} visits on {device}, in seconds')
    print(pd.DataFrame(medians, columns).T.round(3).to_string())
    write_json(args.out, device=device, n=args.n, server_s=round(server_s, 2), median=medians, runs=runs)

if __name__=='__main__': main()
