"""How good are the predictions of `gain`? Learners of whole_fit.py, and some with planted faults: predicted against got

    gain.py --out gain.json [--rows photos_4 sleeping] [--device cuda] [--quick]

For each Learner, in a process of its own: `gain`, then twice in turn a stock fit and one with what `apply()` does.
Prints the predicted and the real seconds, if the sign of the advice was right, and what was named first; then how many
predictions came true, and how much fits of the same Learner vary. What came is the mean of the stock fits, and the
fit that follows `apply()`, as in `gain`'s third column."""
import json, re, subprocess, sys, tempfile
from datetime import date
from functools import partial
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
import pandas as pd
from fastai.callback.core import Callback
from fastai.torch_core import default_device, set_seed
from fastai.vision.augment import Resize, aug_transforms
from fastai.vision.data import ImageDataLoaders
from gpubench.ground.core import wait_for
from gpubench.show.gain import gain

from common import device_of, device_parser, write_json
from whole_fit_rows import ROWS, Row, photos, resident, resnet_18, small_cnn, tiny

class SleepingCallback(Callback):
    "Sleeps for 30 ms after each batch"
    def after_batch(self): sleep(.03)

class ReadingCallback(Callback):
    "Reads the loss and the size of each gradient in each step"
    def after_backward(self): self.norms = [p.grad.norm().item() for p in self.model.parameters() if p.grad is not None]

def grain(x):
    "A transform of the user's own that works on the host for some 8 ms"
    start_s = perf_counter()
    while perf_counter()-start_s<.008: pass
    return x

def with_cb(learner, cb, dls):
    learn = learner(dls)
    learn.add_cb(cb())
    return learn

def reading_loss(dls): # where no step waits for images, so that the loss matters
    learn = small_cnn(dls)
    inner = learn.loss_func
    def loss(pred, *targets):
        found = inner(pred, *targets)
        if found.item()>1e9: raise ValueError('The loss is too large.')
        return found
    learn.loss_func = loss
    return learn

def grainy(path, **kwargs):
    return ImageDataLoaders.from_folder(path, valid_pct=.2, seed=42, bs=64, item_tfms=[Resize(224), grain],
                                        batch_tfms=aug_transforms(), **kwargs)

FEW = ('photos', 2000)
FAULTS = dict( # row, what the first sentence has to name
    sleeping=(Row('a callback that sleeps', *FEW, photos, partial(with_cb, resnet_18, SleepingCallback), 4), 'SleepingCallback'),
    host_tfm=(Row('a transform on the host', *FEW, grainy, resnet_18, 4), 'grain'),
    zero_workers=(Row('0 workers', *FEW, photos, resnet_18, 3, loaders=dict(num_workers=0)), 'workers'),
    loss_read=(Row('a callback that reads each gradient', *FEW, photos, partial(with_cb, resnet_18, ReadingCallback), 4), 'ReadingCallback'),
    tiny_batch=(Row('batches of 4', *FEW, partial(tiny, bs=4), small_cnn, 3), None), # a row of the table answers it
    item_in_loss=(Row('a loss that is read', *FEW, partial(resident, size=64), reading_loss, 20), '.item('))

def run_row(name, device, quick):
    "Predicted and got, of one Learner in this process"
    row, named = FAULTS.get(name) or (ROWS[name], None)
    default_device(device=='cuda')
    set_seed(0)
    folder, epochs = row.folder(quick), min(row.epochs, 2) if quick else row.epochs
    make = lambda: row.learner(row.dls(folder, **row.loaders))
    learn, start_s = make(), perf_counter()
    found = gain(learn, epochs, row.fit)
    out = dict(row=name, gain_s=perf_counter()-start_s, reason=found.reason(), named=named)
    def timed(learn):
        start_s = perf_counter()
        with learn.no_bar(), learn.no_logging(): getattr(learn, row.fit)(epochs)
        wait_for(device)
        return perf_counter()-start_s
    got, done = dict(stock=[], applied=[]), found.apply(learn)
    for i in range(2):
        got['stock'].append(timed(make()))
        if i:
            learn = make()
            if found.applied: done = found.applied.change(learn)
        got['applied'].append(timed(learn))
        if done: done.undo()                        # what it keeps would be in the next one's way
    out |= {f'{k}_got_s': o for k,o in got.items()} | dict(applied=found.applied and found.applied.name)
    for k,o in (('stock', found.stock), ('applied', found.applied or found.stock)):
        i = found.predicted(o)
        out |= {f'{k}_s': i.mid, f'{k}_lo': i.lo, f'{k}_hi': i.hi}
    return out | dict(record=found.as_dict(), table=str(found))

def is_first(row): # Is the planted fault in the first sentence? True if none was planted
    return row['named'] is None or row['named'] in re.split(r'\. (?=[A-Z`])', row['reason'])[0]

def table(rows):
    "Predicted against got, and what `gain` named first"
    df = pd.DataFrame(rows)
    df['stock_got_s'], df['applied_got_s'] = df.stock_got_s.map(np.mean), df.applied_got_s.str[0]
    for k in ('stock', 'applied'): df[f'{k}_off'] = df[f'{k}_s']/df[f'{k}_got_s']-1
    df['sign_right'] = (df.applied_got_s<df.stock_got_s).where(df.applied.notna())  # None: no advice
    df['holds'] = [o.applied_lo<=o.applied_got_s<=o.applied_hi for o in df.itertuples()]
    df['named_first'] = [is_first(o) for o in rows]
    return df[['row', 'gain_s', 'stock_s', 'stock_got_s', 'stock_off', 'applied_s', 'applied_got_s', 'applied_off', 'holds',
               'sign_right', 'named_first']]

def apart(rows, k):
    "How much fits of the same Learner vary: the standard deviation of one, as a fraction"
    return np.sqrt(np.mean([np.var(np.log(o[f'{k}_got_s']), ddof=1) for o in rows]))

def came_true(rows):
    "How many predictions did, as sentences"
    df, named = table(rows), [is_first(o) for o in rows if o['named']]
    def near(k, frac): return f"{(df[f'{k}_off'].abs()<=frac).sum()} within {frac:.0%}"
    return (f"Of {len(df)} Learners, stock: {near('stock', .1)}, {near('stock', .25)}; applied: {near('applied', .1)}, "
            f"{near('applied', .25)}, {df.holds.sum()} within the interval; the sign was right in {df.sign_right.sum()} "
            f"of {df.sign_right.count()}, the fault named first in {sum(named)} of {len(named)}. Fits of the same Learner "
            f"vary by {apart(rows, 'stock'):.0%} (stock) and {apart(rows, 'applied'):.0%} (applied), one standard deviation.")

def main():
    p = device_parser(__doc__)
    p.add_argument('--rows', nargs='+', default=[*ROWS, *FAULTS], choices=[*ROWS, *FAULTS])
    p.add_argument('--quick', action='store_true', help='few images and two epochs')
    p.add_argument('--one', help='run this row here, and write it to --out')
    args = p.parse_args()
    device, rows = device_of(args), []
    if args.one: return Path(args.out).write_text(json.dumps(run_row(args.one, device, args.quick)))
    for name in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, '--one', name, '--out', f'{folder}/row.json', '--device', device]
            done = subprocess.run(command+['--quick']*args.quick, capture_output=True, text=True)
            if done.returncode:
                print(f'{name}: {done.stderr[-2000:]}', flush=True)
                continue
            rows.append(json.loads(Path(f'{folder}/row.json').read_text()))
        print(table(rows[-1:]).round(3).to_string(index=False, header=len(rows)==1), rows[-1]['reason'], sep='\n  ', flush=True)
        write_json(args.out, device, date=str(date.today()), rows=rows)
    print(came_true(rows))

if __name__=='__main__': main()
