"""What the MonitorCallback costs: milliseconds a step of the same training with and without it, four samples a second.

Runs alternate in shuffled rounds, each of `--seconds` at least and on the same Learner, so that a drift of the machine
meets both alike. 'every sample' asks for as many samples as a GPU's sensors can tell apart (six a second). The ratio to
a training without is the median of the rounds' own ratios, with its order-statistic interval. Where runs differ by more
than the monitor costs, a second figure bounds it: the CPU time of its thread while the fit ran.

    monitor_cost.py --device cuda --out monitor_cost.json [--case resnet18_32px] [--rounds 20]"""
from functools import partial

from gpubench.watch.monitor import MonitorCallback

from common import alternate, device_of, device_parser, write_json
from fits import CASES, UntilCallback, ratios_to_none, ready_learner, step_line

VARIANTS = {'none': None, 'monitor': partial(MonitorCallback, interval_s=.25),
            'every sample': partial(MonitorCallback, interval_s=1/6)}

def run(learn, make, seconds):
    "Milliseconds a step of one fit, and what the monitor says of itself"
    cb, steps = make and make(), UntilCallback(seconds)
    with learn.no_bar(), learn.no_logging(), learn.added_cbs([steps] + [cb]*bool(cb)): learn.fit(10**6)
    fits = cb.fits if cb else []
    return 1e3*steps.took_s/steps.n, dict(cb.summary(), n_samples=fits[0].n,
                                          sample_cpu_ms=1e3*fits[0].cpu_s/max(1, fits[0].n-2),
                                          notes=cb.notes) if cb else None

def measure(device, fields, seconds, rounds):
    "Milliseconds a step of each run of each variant, and what the last monitor said; batch 64, data on the device already"
    learn = ready_learner(device=device, bs=64, loader='resident',
                          max_images=64*40 if device=='cpu' else 64*800, **fields)
    runs = alternate(VARIANTS, rounds, lambda make: run(learn, make, seconds))
    return {k: [ms for ms,_ in v] for k,v in runs.items()}, {k: v[-1][1] for k,v in runs.items()}

def its_own_cost(s):
    "What the monitor said of itself, in words"
    if not s: return ''
    return (f"   {s['n_samples']} samples, {s['sample_cpu_ms']:.2f} ms CPU each, "
            f"CPU share {100*s['monitor_cost_frac']:.2f} %")

def main():
    parser = device_parser(__doc__)
    parser.add_argument('--rounds', type=int, default=20)
    parser.add_argument('--seconds', type=float, default=2., help='of each run')
    parser.add_argument('--case', choices=list(CASES), help='this one only')
    args = parser.parse_args()
    device, results = device_of(args), []
    for name,fields in [o for o in CASES.items() if args.case in (None, o[0])]:
        times, said = measure(device, fields, args.seconds, args.rounds)
        ratios = ratios_to_none(times)
        results.append(dict(case=name, rounds=args.rounds, seconds=args.seconds, step_ms=times,
                            ratios=ratios, said=said))
        print(f'{name} on {device}, {args.rounds} runs of {args.seconds:g} s each')
        for k,v in times.items(): print(step_line(k, v, ratios.get(k), 14)+its_own_cost(said[k]))
        for o in said['monitor']['notes']: print('  note:', o)
        write_json(args.out, device, device=device, results=results)

if __name__=='__main__': main()
