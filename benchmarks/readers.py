"""How many images a second the readers of `speed_up` bring, from files and from decoded images: processes against
threads of one process

    readers.py --out readers.json [--n 8 16] [--runs 3] [--device cuda]

6,000 made JPEGs of 500 × 375 px, `Resize(224)` that crops, batch 64, nothing trains. A pass over the training images
that decodes them (`cold`), and the one after it (`warm`); both begin with the pass, without starting the readers. The
ways alternate. The files are in the system's memory."""
from time import perf_counter

import gpubench.data.readers
import pandas as pd
from fastai.torch_core import default_device
from gpubench.ground.core import wait_for
from gpubench.data.feed import FeedCallback

from common import device_of, device_parser, write_json
from whole_fit_rows import ROWS

def images_per_s(feed, device):
    "Of one pass"
    n, start_s = 0, perf_counter()
    for b in feed: n += len(b[0])
    wait_for(device)
    return n/(perf_counter()-start_s)

def measure(row, device, kind, n):
    "One run: a new Learner's loader, decoded by `n` readers of this kind"
    learn, can_fork = row.learner(row.dls(row.folder())), gpubench.data.readers.can_fork
    learn.add_cb(cb := FeedCallback(n))
    learn.dl = learn.dls.train
    if kind=='threads': gpubench.data.readers.can_fork = lambda: False
    try: cb.take_over()
    finally: gpubench.data.readers.can_fork = can_fork
    learn.dl.is_bare = True                          # without the batch transforms
    found = {o: images_per_s(learn.dl, device) for o in ('cold', 'warm')}
    cb.release()
    return dict(kind=kind, n=n) | found

def main():
    p = device_parser(__doc__)
    p.add_argument('--n', type=int, nargs='+', default=[8, 16], help='readers')
    p.add_argument('--runs', type=int, default=3)
    p.add_argument('--row', choices=list(ROWS), default='photos_4', help='of whole_fit_rows.py')
    args = p.parse_args()
    device = device_of(args)
    default_device(device!='cpu')
    ways = [(kind, n) for _ in range(args.runs) for n in args.n for kind in ('processes', 'threads')]
    runs = [measure(ROWS[args.row], device, *o) for o in ways]
    write_json(args.out, device, row=ROWS[args.row].about(), runs=runs)
    by_way = pd.DataFrame(runs).groupby(['kind', 'n'], sort=False)
    print(by_way.agg(['median', 'min', 'max']).round().astype(int).to_string())

if __name__=='__main__': main()
