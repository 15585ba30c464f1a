"""Does the MonitorCallback tell the truth on this GPU?

Energy is held against the card's own counter, read beside the monitor at the moment it ticks. One busy multiprocessor
is made with `torch.cuda._sleep`, a kernel of a single thread. Means need no other process on the GPU.

    monitor_truth.py --out monitor_truth.json"""
import json, os, threading, time

from gpubench.watch.monitor import Monitor, MonitorCallback, fit_energy
from gpubench.watch.nvml import GPU_COLUMNS
import torch
from fastai.callback.core import Callback

from common import out_parser, write_json
from fits import CASES, UntilCallback, ready_learner

class UntilEnoughCallback(UntilCallback):
    "Train for `seconds`, or until the monitor says that it has enough"
    def is_over(self): return self.learn.monitor.is_enough if self.seconds is None else super().is_over()

def ticked(read):
    "The counter (J) and the time (s) as it ticks"
    first = read()
    while (now := read())==first: time.sleep(.002)
    return now, time.perf_counter()

def fit(learn, cb, seconds=None):
    with learn.no_bar(), learn.no_logging(), learn.added_cbs([cb, UntilEnoughCallback(seconds)]): learn.fit(10**6)
    return cb

def counter(name):
    "The GPU's energy counter (J), read through pynvml without the monitor"
    import pynvml
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(name)
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)/1e3

def energy(learn, seconds):
    "The monitor's energy beside the counter's, and beside the integral of power"
    read = counter(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    a, start = ticked(read)
    cb = fit(learn, MonitorCallback(), seconds)
    b, end = ticked(read)
    s, df = cb.summary(), cb.to_df().query("device!='cpu'")
    idle_w, outside_s = float(df.power_w.iloc[0]), end-start-s['monitored_s']
    truth = b-a-idle_w*outside_s                                    # what lies between the ticks and the fit, at the power before it
    by_power = fit_energy(df.assign(energy_counter_j=float('nan')), s['monitored_s'], [])['energy_j']
    return dict(truth_j=truth, monitor_j=s['energy_j'], by_power_j=by_power, outside_s=outside_s), cb

def one_multiprocessor(seconds=5.):
    "What utilisation says of a kernel of one thread"
    stop, cycles = time.perf_counter()+seconds, int(2e8)            # about a tenth of a second each
    with Monitor(devices=0) as m:
        while time.perf_counter()<stop: torch.cuda._sleep(cycles), torch.cuda.synchronize()
    return m.summary()

class FailsCallback(Callback):
    def after_pred(self):
        if self.iter==3: raise ValueError('on purpose')

def after_an_error(learn):
    "Seconds until the thread is gone"
    cb = MonitorCallback()
    try:
        with learn.no_bar(), learn.no_logging(), learn.added_cbs([cb, FailsCallback()]): learn.fit(1)
    except ValueError: start = time.perf_counter()
    while any(o.name=='gpubench-monitor' for o in threading.enumerate()): time.sleep(.01)
    return time.perf_counter()-start

def query_ms(n=50):
    "Milliseconds of each query of the GPU"
    took = {}
    with Monitor(devices=0) as m:
        source = next(o for o in m.fits[0].sources if o.device!='cpu')
        for column in [o for o in GPU_COLUMNS if o!='throttle_words']:
            start = time.perf_counter()
            for _ in range(n): source(column)
            took[column] = 1e3*(time.perf_counter()-start)/n
    return took

def main():
    p = out_parser(__doc__)
    p.add_argument('--seconds', type=float, default=20., help='of the fit whose energy is measured')
    args = p.parse_args()
    learn = ready_learner(device='cuda', bs=256, loader='resident', max_images=256*100, **CASES['resnet18_32px'])
    start = time.perf_counter()
    cb = MonitorCallback()
    fit(learn, cb)                                                  # until `is_enough`
    first_s, files = time.perf_counter()-start, len(os.listdir('/proc/self/fd'))
    df, s = cb.to_df(), cb.summary()
    missing = [o for o in GPU_COLUMNS if df[df.device!='cpu'][o].isna().all()]
    e, later = energy(learn, args.seconds)
    one, gone_s, each_ms = one_multiprocessor(), after_an_error(learn), query_ms()
    sampling = later.fits[0]
    rows = [('columns that stay empty', ', '.join(missing) or 'none', None), ('notes', len(cb.notes), None),
        ('fit until three windows are full', f'{first_s:.2f} s', 3<first_s<8),
        ('energy, monitor / counter at its ticks',
         f"{e['monitor_j']:.1f} / {e['truth_j']:.1f} J = {e['monitor_j']/e['truth_j']:.4f}",
         abs(e['monitor_j']/e['truth_j']-1)<.02),
        ('energy, integral of power / counter', f"{e['by_power_j']/e['truth_j']:.4f}", None),
        ('utilisation of one busy multiprocessor', f"{one['gpu_util_mean_frac']}",
         (one['gpu_util_mean_frac'] or 0)>.95),
        ('power then, and in the fit', f"{one['power_mean_w']:.0f}, {later.summary()['power_mean_w']:.0f} W", None),
        ('real period, and asked for', f"{later.summary()['monitor_interval_s']:.3f}, .25 s", None),
        ('a sample: CPU', f"{1e3*sampling.cpu_s/(sampling.n-2):.2f} ms", None),
        ('CPU share of the monitor', f"{100*later.summary()['monitor_cost_frac']:.2f} %",
         later.summary()['monitor_cost_frac']<=.005),
        ('thread gone after an error in', f'{gone_s:.2f} s', gone_s<1),
        ('open files, before and after four fits', f"{files}, {len(os.listdir('/proc/self/fd'))}",
                                                                      abs(len(os.listdir('/proc/self/fd'))-files)<=2)]
    for name,value,ok in rows:
        print('    ' if ok is None else 'ok  ' if ok else 'BAD ', name.ljust(42), value)
    print('    queries (ms):', {k: round(v, 3) for k,v in each_ms.items()})
    for o in cb.notes: print('    note:', o)
    print(json.dumps({k: v for k,v in later.summary().items() if k!='monitor_note'}))
    write_json(args.out, 'cuda', energy=e, one_multiprocessor=one, fit=later.summary(), enough=s, gone_s=gone_s,
               query_ms=each_ms, sample_cpu_ms=1e3*sampling.cpu_s/(sampling.n-2), empty=missing)

if __name__=='__main__': main()
