"""One training of whole_fit.py in this process, from the first call after the imports to the last metric"""
import os, tempfile, traceback
from contextlib import contextmanager
from time import perf_counter

import torch
from fastai.callback.core import Callback
from fastai.torch_core import default_device, set_seed
from gpubench.ground.core import wait_for
from gpubench.step.fast import speed_up

from whole_fit_rows import OURS, ROWS

class EpochClockCallback(Callback):
    "Seconds of each epoch's two parts, to when the device has finished them"
    order, graph_safe = 1e9, 'counts'
    def __init__(self, device): self.device, self.seconds = device, dict(train_s=[], valid_s=[])
    def begin(self):
        wait_for(self.device)
        self.start_s = perf_counter()
    def end(self, part):
        wait_for(self.device)
        self.seconds[part].append(perf_counter()-self.start_s)
    def before_train(self): self.begin()
    def after_train(self): self.end('train_s')
    def before_validate(self): self.begin()
    def after_validate(self): self.end('valid_s')

class Laps:
    "Seconds from one `lap` to the next, in `found`"
    def __init__(self, found): self.found, self.start_s, self.last_s = found, perf_counter(), perf_counter()
    def lap(self, name):
        now_s = perf_counter()
        self.found[name], self.last_s = now_s-self.last_s, now_s
    def end(self): self.found['total_s'] = perf_counter()-self.start_s

@contextmanager
def empty_compiler_cache():
    "Each run compiles as if it were the first"
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=f'{folder}/triton')
        yield

def images(dls): return dict(n_train=len(dls.train)*dls.train.bs, n_valid=len(dls.valid.dataset))

def train(row, variant, seed, folder, device, epochs, found):
    "The training; `found` gets what is known of it, also if it raises"
    laps, clock = Laps(found), EpochClockCallback(device)
    found.update(clock.seconds)
    dls = row.dls(folder, **row.loaders)
    set_seed(seed)                      # fastai's splitter has set torch's to its own
    laps.lap('loaders_s')
    learn = row.learner(dls)
    laps.lap('learner_s')
    found.update(images(dls))
    if variant=='stock_bf16': learn.to_bf16()
    sped_up = speed_up(learn, **row.speed_up | OURS[variant]) if variant in OURS else None
    laps.lap('speed_up_s')
    learn.add_cb(clock)
    with learn.no_bar(), learn.no_logging(): getattr(learn, row.fit)(epochs)
    wait_for(device)
    laps.lap('fit_s')
    laps.end()
    found['metrics'] = dict(zip(learn.recorder.metric_names[1:], learn.recorder.values[-1]))
    if sped_up is not None: found['table'] = str(sped_up)

def peak_mib(device):
    if device!='cuda' or not torch.cuda.is_initialized(): return {}
    return dict(peak_reserved_mib=torch.cuda.max_memory_reserved()/2**20)

def run_once(name, variant, seed, device, quick=False):
    "A row's training in one way; returns its seconds by part, its metrics and what it raised"
    row, found = ROWS[name], {}
    folder = row.folder(quick)
    epochs = min(row.epochs, 2) if quick else row.epochs
    default_device(device=='cuda')
    set_seed(seed)
    with empty_compiler_cache():
        try: train(row, variant, seed, folder, device, epochs, found)
        except Exception: found['raised'] = traceback.format_exc()
    return found | peak_mib(device)
