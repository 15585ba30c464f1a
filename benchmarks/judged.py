"""Does a judgement hold what a long run says? Honest changes, judged with five seeds, then timed in many more rounds

    judged.py --out judged.json --cases speed_up [--rounds 20]               on a GPU
    CUDA_VISIBLE_DEVICES= judged.py --out judged_cpu.json --cases workers decoded_once

The photographs are tinted by class, so every training learns them, and only the time is in question. In a round of the long run each side is
visited once, as `judge` does it: a whole fit in a fresh process, in an order of its own."""
import colorsys, random
from functools import partial
from tempfile import TemporaryDirectory

from fastai.torch_core import set_seed
from gpubench import judge
from gpubench.data.images import FeedCallback
from gpubench.data.made import make_once
from gpubench.ground.core import pick_device
from gpubench.ground.stats import ratio_ci
from gpubench.run.process import pack, run_fresh
from gpubench.show.judge import visit
from gpubench.step.fast import speed_up
from PIL import Image

from common import out_parser, write_json
from whole_fit_rows import draw_photo, in_parallel, photos, resnet_18, small_cnn

EPOCHS, N_CLASSES = 3, 8

def save_tinted(folder, i):
    color = [int(255*o) for o in colorsys.hsv_to_rgb(i%N_CLASSES/N_CLASSES, .9, .9)]
    photo = draw_photo(i)
    tinted = Image.blend(photo, Image.new('RGB', photo.size, tuple(color)), .5)
    tinted.save(folder/f'c{i%N_CLASSES}'/f'{i}.jpg', quality=90)

def write_tinted(folder, n):
    for c in range(N_CLASSES): (folder/f'c{c}').mkdir()
    in_parallel(partial(save_tinted, folder), n)
    return n

def files(n): return make_once(f'judged_{n}', lambda folder: write_tinted(folder, n), f'Making {n:,} photographs, once.')

def make(learner, seed, n, size, **kwargs):
    dls = photos(files(n), size=size, **kwargs)
    set_seed(seed)
    return learner(dls)

def stock(seed): return make(resnet_18, seed, 2000, 160)
def fast(seed):
    learn = stock(seed)
    speed_up(learn)
    return learn

def no_workers(seed): return make(small_cnn, seed, 800, 64, num_workers=0)
def workers(seed): return make(small_cnn, seed, 800, 64, num_workers=4)
def decoded_once(seed):
    learn = workers(seed)
    learn.add_cb(FeedCallback())
    return learn

CASES = dict(speed_up=(stock, fast), workers=(no_workers, workers), decoded_once=(workers, decoded_once)) # before, after

def whole_fit_s(side, seed, folder):
    found = run_fresh(pack(visit, side, 'fit_one_cycle', EPOCHS, seed, f'{folder}/weights', False), 1800)
    if 'error' in found: raise RuntimeError(found['error'])
    return found['time of a whole fit, s']

def long_run(before, after, rounds): # Side -> seconds of each whole fit
    sides, found = dict(before=before, after=after), dict(before=[], after=[])
    with TemporaryDirectory() as folder:
        for i in range(rounds):
            for k in random.sample([*sides], 2): found[k].append(whole_fit_s(sides[k], i, folder))
    return found

def blocks(seconds, n=5): # The ratios of each `n` rounds in a row
    pairs = [*zip(seconds['before'], seconds['after'])]
    return [ratio_ci(*zip(*pairs[i:i+n]), paired=True) for i in range(0, len(pairs)-n+1, n)]

def main():
    p = out_parser(__doc__)
    p.add_argument('--cases', nargs='+', required=True, choices=CASES)
    p.add_argument('--rounds', type=int, default=20, help='of the long run')
    args, rows = p.parse_args(), []
    for n in (2000, 800): files(n)
    for name in args.cases:
        sides = [f'{__file__}:{o.__name__}' for o in CASES[name]]
        found, seconds = judge(*sides, epochs=EPOCHS), long_run(*sides, args.rounds)
        long, parts = ratio_ci(seconds['before'], seconds['after'], paired=True), blocks(seconds)
        n_hold = sum(o.lo<=long.mid<=o.hi for o in parts)
        print(name, found.sentence, f'The long run: {long}; {n_hold} of {len(parts)} blocks of five hold it.',
              sep='\n  ', flush=True)
        rows.append(dict(case=name, judged=found.as_dict(), seconds=seconds, times_as_fast=[long.mid, long.lo, long.hi]))
        write_json(args.out, pick_device('auto'), rows=rows)

if __name__=='__main__': main()
