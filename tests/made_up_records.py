"""Records that are made up for the tests: none of the numbers was measured"""
import numpy as np

from gpubench.ground.record import append_record

MEASURED = ('n_images n_steps n_dropped epoch_s step_ms images_per_s first_batch_ms loss accuracy '
            'peak_allocated_mib peak_reserved_mib device_used_mib').split()
NOT_MEASURED = dict.fromkeys(MEASURED)
HOSTILE = '<script>alert(1)</script>"\'><img src=x onerror=alert(2)> $\\bad{$ {{ 7*7 }} _x'


def visit(bs=64, device='cpu', n=0, n_train=1437, **kw):
    "One made-up visit in the form of a record"
    rng = np.random.default_rng([bs, len(device), n])
    n_steps, step_ms = n_train//bs, (1.5+.12*bs if device=='cpu' else max(3., 1+.006*bs))*rng.normal(1, .01)
    memory = dict(peak_allocated_mib=40+.5*bs, peak_reserved_mib=60+.6*bs, device_used_mib=600+.6*bs)
    asked = dict(dataset='made-up images', model='made-up net', bs=bs, device=device, loader='memory', n_workers=0,
                 precision='fp32', size=None, n_epoch=1, lr=.001, seed=0)
    work = dict(n_train=n_train, n_valid=360, n_steps=n_steps, n_images=n_steps*bs, n_dropped=n_train-n_steps*bs,
                n_params=54_528, loss=.1, accuracy=.9)
    times = dict(epoch_s=n_steps*step_ms/1e3, step_ms=step_ms, images_per_s=1e3*bs/step_ms, first_batch_ms=1.)
    machine = dict(machine='madeup01', cpu='Made-up CPU', n_cores=4, gpu='Made-up GPU', gpu_memory_gib=8., torch='0.0',
                   fastai='0.0')
    about = dict(trial_id='madeup', status='ok', error=None, visit=n, time_utc=f'2000-01-01T00:{n:02d}:00+00:00')
    return about | asked | work | times | machine | (memory if device=='cuda' else {}) | kw


def visits(sizes=(16, 64), devices=('cpu', 'cuda'), n=3, **kw):
    return [visit(bs, d, v, **kw) for v in range(n) for bs in sizes for d in devices]


def failed(status='oom', bs=64, n=0, **kw): return visit(bs, 'cuda', n, **NOT_MEASURED | dict(status=status) | kw)


def folder_of(path, rows):
    for row in rows: append_record(path, row)
    return path


PARTS = dict(wait_ms=5., copy_ms=.5, forward_ms=3., loss_ms=.5, backward_ms=4., optimizer_ms=1.5, other_ms=.5)
