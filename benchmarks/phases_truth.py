"""Are `StepTimerCallback`'s phases true? Forward, backward and optimiser beside the kernels that torch's profiler saw

    phases_truth.py --out phases_truth.json [--figure phases_truth.png]       needs an NVIDIA GPU

For each case two fits: one with the timer alone, one under the profiler with the timer on board. Of the second, each
kernel is put into the phase during which Python launched it; `busy_ms` is what its kernels took, `device_ms` the
time from the start of the phase on the device (its launch, or the end of what ran before it) to the end of its last
kernel. The difference is the device waiting for orders."""
import json, tempfile
from pathlib import Path

from gpubench.ground.core import describe_machine, machine_title, pick_device
from gpubench.watch.timing import StepTimerCallback
import numpy as np, pandas as pd, torch
from fastai.callback.core import Callback
from torch.profiler import ProfilerActivity, profile, record_function

from common import NoValidationCallback, out_parser, ready_learner, write_json

CASES = [(224, 64, 24), (224, 256, 12), (32, 64, 40)]                    # px, batch, steps of an epoch
SPANS = dict(forward_ms=[('before_batch', 'after_pred')], loss_ms=[('after_pred', 'after_loss')],
             backward_ms=[('before_backward', 'after_backward')],
             optimizer_ms=[('before_step', 'after_step'), ('after_step', 'after_batch')])

class OpenCallback(Callback):
    "Last at each event: opens the range of a phase"
    order = np.inf
    def __init__(self): self.range = None
    def __call__(self, event):
        name = next((k for k,v in SPANS.items() if event in [a for a,_ in v]), None)
        if name and self.learn.training: self.range = record_function(f'phase:{name}'); self.range.__enter__()

class CloseCallback(Callback):
    "First at each event: closes the range that is open"
    order = -np.inf
    def __call__(self, event):
        if self.learn.open.range: self.learn.open.range.__exit__(None, None, None); self.learn.open.range = None

def trace_events(prof):
    with tempfile.TemporaryDirectory() as d:
        prof.export_chrome_trace(str(Path(d)/'trace.json'))
        return json.loads((Path(d)/'trace.json').read_text())['traceEvents']

def truth(events): # one row a phase and step: busy_ms and device_ms, from the profiler alone
    ranges = sorted((o['ts'], o['ts']+o['dur'], o['name'].removeprefix('phase:')) for o in events
                    if o.get('cat')=='user_annotation' and o['name'].startswith('phase:'))
    launched = {o['args']['correlation']: o['ts']
                for o in events if o.get('cat') in ('cuda_runtime', 'cuda_driver') and 'correlation' in o.get('args', {})}
    work = sorted((o['ts'], o['ts']+o['dur'], launched.get(o['args']['correlation']))
                  for o in events if o.get('cat') in ('kernel', 'gpu_memcpy', 'gpu_memset'))
    starts, rows, ends = np.array([o[0] for o in ranges]), [[] for _ in ranges], np.array([o[1] for o in work])
    for a,b,at in work:
        i = -1 if at is None else int(np.searchsorted(starts, at, 'right'))-1
        if i>=0 and at<=ranges[i][1]: rows[i].append((a, b))
    out, step = [], -1
    for (t0,_,name),kernels in zip(ranges, rows):
        step += name=='forward_ms'
        if not kernels: continue
        first, last = kernels[0][0], max(b for _,b in kernels)
        before = max([t0, *ends[ends<=first+.001][-1:]])
        out.append(dict(step=step, phase=name, busy_ms=sum(b-a for a,b in kernels)/1e3,
                        device_ms=(last-before)/1e3, n_kernels=len(kernels)))
    return pd.DataFrame(out).groupby(['step', 'phase'], as_index=False).sum()

def fit(learn, under=None):
    "One epoch with a timer of its own; its steps without the first three"
    cbs = [CloseCallback(), StepTimerCallback(), OpenCallback()] if under else [StepTimerCallback()]
    with learn.no_bar(), learn.no_logging(), learn.added_cbs(cbs):
        if under:
            with under: learn.fit(1); torch.cuda.synchronize()
        else: learn.fit(1)
        return learn.step_timer.to_df(skip=3)

def compare(size, bs, n_steps):
    learn = ready_learner(dataset='synthetic', model='resnet18', size=size, n_channels=3, bs=bs,
                          loader='resident', max_images=bs*n_steps*5//4)
    learn.add_cb(NoValidationCallback())
    fit(learn)
    alone = fit(learn)
    prof = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    profiled = fit(learn, prof)
    seen = truth(trace_events(prof))
    seen = seen[seen.step>=3]
    rows = []
    for phase in ('forward_ms', 'backward_ms', 'optimizer_ms'):
        s = seen[seen.phase==phase]
        rows.append(dict(size=size, bs=bs, phase=phase, n_steps=len(alone),
                         timer_ms=alone[phase].median(), timer_profiled_ms=profiled[phase].median(),
            busy_ms=s.busy_ms.median(), device_ms=s.device_ms.median(), n_kernels=int(s.n_kernels.median()),
            timer_all_ms=alone[phase].round(4).tolist(), busy_all_ms=s.busy_ms.round(4).tolist(),
            device_all_ms=s.device_ms.round(4).tolist()))
    return rows, alone

def draw(df, title, path):
    import matplotlib.pyplot as plt
    cases = df.groupby(['size', 'bs'], sort=False)
    fig, axes = plt.subplots(1, len(cases), figsize=(4*len(cases), 3.2), layout='constrained')
    for ax,((size,bs),g) in zip(np.atleast_1d(axes), cases):
        y = np.arange(len(g))
        ax.barh(y, g.busy_ms, .5, color='#D55E00', label='kernels (profiler)')
        ax.barh(y, g.device_ms-g.busy_ms, .5, left=g.busy_ms, color='#D55E00', alpha=.3,
                label='between kernels (profiler)')
        ax.plot(g.timer_ms, y, 'D', color='#5B5B5B', label='step timer, without the profiler')
        ax.set(yticks=y, yticklabels=[o.removesuffix('_ms') for o in g.phase], xlabel='ms per step',
               title=f'{size} px, batch {bs}', xlim=(0, None))
        ax.invert_yaxis(); ax.spines[['top', 'right']].set_visible(False)
    fig.legend(*np.atleast_1d(axes)[0].get_legend_handles_labels(), loc='outside upper left', ncols=3,
               fontsize=8, frameon=False)
    fig.supxlabel(title, fontsize=8, x=.01, ha='left')
    fig.savefig(path, dpi=110)

def main():
    p = out_parser(__doc__)
    p.add_argument('--figure', help='a PNG to draw')
    args = p.parse_args()
    machine, rows = describe_machine(pick_device('cuda')), []
    for case in CASES:
        found, alone = compare(*case)
        rows += found
        print(f'{case[0]} px, batch {case[1]}: phases over step',
              f"{(alone.iloc[:, 4:-1].sum(axis=1)/alone.step_ms).min():.4f}")
    df = pd.DataFrame(rows)
    df['timer_over_busy'], df['timer_over_device'] = df.timer_ms/df.busy_ms, df.timer_profiled_ms/df.device_ms
    print(df[['size', 'bs', 'phase', 'timer_ms', 'timer_profiled_ms', 'busy_ms', 'device_ms', 'n_kernels',
              'timer_over_busy', 'timer_over_device']].round(3).to_string(index=False))
    write_json(args.out, machine, rows=df.to_dict('records'))
    if args.figure: draw(df, 'ResNet-18, '+machine_title(machine)+f'; medians of {df.n_steps.min()} steps or more', args.figure)

if __name__=='__main__': main()
