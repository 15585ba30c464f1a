"""What `StepTimerCallback` costs: whole fits with it, without it, with a callback that does nothing, and with one that
waits for the device at each event, in alternating order

    timer_cost.py --device cuda --out timer_cost.json [--rounds 150] [--case resnet18_32px]

A run is a fit of one short epoch without validation; its time is the median step, from clock readings that a callback
takes after each step, the same one in all variants. fastai has waited for the device by then. In each round every
variant runs once, in an order of its own; a ratio is that of two runs of one round, and the figure is the median of the
rounds with its order-statistic interval, since a few runs are slower by half.

A second figure needs no comparison: the time that Python spends in the timer's own functions, for a step and, apart,
for what an epoch needs once. Where the device waits for Python's orders, a step grows by that and by nothing else;
where Python waits for the device, by less."""
from contextlib import contextmanager
from statistics import median
from time import perf_counter

from gpubench.watch import timing
from gpubench.ground.core import wait_for
from gpubench.ground.stats import median_ci
from gpubench.watch.timing import StepTimerCallback
from fastai.callback.core import Callback
import numpy as np

from common import NoValidationCallback, alternate, device_of, device_parser, ready_learner, write_json

class TicksCallback(Callback):
    "Reads the clock after each step, after all other callbacks"
    order = np.inf
    def before_fit(self): self.read_s = []
    def after_batch(self): self.read_s.append(perf_counter())

class EmptyCallback(Callback):
    "Has a method for no event"

class WaitAtEachEventCallback(Callback):
    "How one would time a step without events: the device has to be idle at each one"
    order = 100
    def __call__(self, event_name): wait_for(self.learn.dls.device)

VARIANTS = dict(none=[], empty=[EmptyCallback], step_timer=[StepTimerCallback],
                wait_at_each_event=[WaitAtEachEventCallback])

CASES = dict(resnet18_32px=dict(dataset='synthetic', model='resnet18', size=32, n_channels=3),
             mnist_cnn=dict(dataset='synthetic', model='lenet', size=28, n_channels=1))
N_STEPS = dict(resnet18_32px=(8, 10), mnist_cnn=(40, 20))   # of a run, on a CPU and on a GPU

def ratios_to_none(times):
    "Of each variant to 'none', the median of the rounds' own ratios with its interval"
    return {k: vars(median_ci(np.array(v)/times['none'])) for k,v in times.items() if k!='none'}

def step_line(name, times, ratio, width):
    "A variant's step, and by how much it is longer than without"
    more = f"   {100*(ratio['mid']-1):+6.2f} % ({100*(ratio['lo']-1):+.2f} to {100*(ratio['hi']-1):+.2f})" if ratio else ''
    return f'  {name:{width}} {median(times):8.3f} ms a step{more}'

def step_ms(learn, cbs):
    "Milliseconds of the median step of one fit"
    with learn.no_bar(), learn.no_logging(), learn.added_cbs([o() for o in cbs] + [TicksCallback()]):
        learn.fit(1)
        return 1e3*median(np.diff(learn.ticks.read_s))

def measure(device, fields, n_steps, rounds):
    "Milliseconds a step of each run of each variant, for a trial of batch 64 whose data is on the device already"
    learn = ready_learner(device=device, bs=64, loader='resident', max_images=64*n_steps*5//4, **fields)
    learn.add_cb(NoValidationCallback())
    times = alternate(VARIANTS, rounds, lambda cbs: step_ms(learn, cbs))
    return len(learn.dls.train), times, [own_us(learn) for _ in range(20)]

OWN = [(timing.StepTimerEdgeCallback, '__call__'), (timing.StepTimerCallback, '__call__'), (timing._StandIn, 'at')]   # the event comes first

WAITING = {'before_fit', 'after_train', 'after_fit'}   # there it may wait for the device
OF_A_STEP = {'before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward',
             'before_step', 'after_step', 'after_batch'}

@contextmanager
def own_time():
    "Add up the seconds that pass in the timer's functions, those of a step and those that an epoch needs once"
    total, inside, before = dict(step=0., epoch=0.), [False], [vars(c)[k] for c,k in OWN]
    def clocked(f, is_event):
        def g(o, event, *args):
            if inside[0] or event in WAITING: return f(o, event, *args)
            inside[0], start = True, perf_counter()
            try: return f(o, event, *args)
            finally:
                total['epoch' if is_event and event not in OF_A_STEP else 'step'] += perf_counter()-start
                inside[0] = False
        return g
    for (c,k),f in zip(OWN, before): setattr(c, k, clocked(f, k=='__call__'))
    try: yield total
    finally:
        for (c,k),f in zip(OWN, before): setattr(c, k, f)

N_EPOCH = 10

def own_us(learn):
    "Microseconds that the timer's functions take for a step and for an epoch; reading the events is part of it, waiting at an epoch's end is not"
    with own_time() as total, learn.no_bar(), learn.no_logging(), learn.added_cbs(StepTimerCallback()): learn.fit(N_EPOCH)
    return dict(step=1e6*total['step']/(N_EPOCH*len(learn.dls.train)), epoch=1e6*total['epoch']/N_EPOCH)

def main():
    parser = device_parser(__doc__)
    parser.add_argument('--rounds', type=int, default=150)
    parser.add_argument('--case', choices=list(CASES), help='this one only')
    args = parser.parse_args()
    device, results = device_of(args), []
    for name,fields in [o for o in CASES.items() if args.case in (None, o[0])]:
        n, times, own = measure(device, fields, N_STEPS[name][device!='cpu'], args.rounds)
        ratios = ratios_to_none(times)
        results.append(dict(case=name, n_steps=n, rounds=args.rounds, step_ms=times, ratios=ratios, own_us=own))
        print(f'{name} on {device}, {args.rounds} runs of {n} steps each')
        for k,v in times.items(): print(step_line(k, v, ratios.get(k), 20))
        us = {k: sorted(o[k] for o in own) for k in own[0]}
        print(f"  the timer's own functions: {median(us['step']):.0f} µs a step ({us['step'][0]:.0f} to {us['step'][-1]:.0f}), "
              f"{median(us['step'])/10/median(times['none']):.2f} %, and {median(us['epoch']):.0f} µs an epoch")
        write_json(args.out, device, device=device, results=results)

if __name__=='__main__': main()
