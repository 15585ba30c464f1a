"""What a device does during minutes of training: a rest, ResNet-50 at 224 px, a rest; every sample as JSON, and the
figure

    monitor_timeline.py --device cuda --seconds 270 --out timeline.json --figure timeline.png"""
from time import sleep

from gpubench.ground.core import describe_machine
from gpubench.watch.monitor import Monitor, MonitorCallback
from gpubench.show.plot import plot_monitor
from gpubench.run.trial import Trial, make_learner, resolve

from common import device_of, device_parser, write_json
from fits import UntilCallback

def timeline(device, fields, seconds, rest_s):
    "Samples of the whole time, and the parts of the fit in seconds of the same clock"
    learn = make_learner(resolve(Trial(device=device, dataset='synthetic', n_channels=3, loader='resident', **fields)))
    learn.remove_cb(learn.seen)
    cb = MonitorCallback(devices=[])                                   # for the epochs; the GPU is sampled by the other one
    with Monitor(devices=[device] if device!='cpu' else []) as monitor:
        sleep(rest_s)
        with learn.no_bar(), learn.no_logging(): learn.fit(10**6, cbs=[cb, UntilCallback(seconds, validate=True)])
        sleep(rest_s)
    begun_s = cb.fits[0].start_s-monitor.fits[0].start_s
    parts = cb.epochs_df()
    return monitor, parts.assign(start_s=parts.start_s+begun_s, end_s=parts.end_s+begun_s)

def main():
    parser = device_parser(__doc__)
    parser.add_argument('--model', default='resnet50')
    parser.add_argument('--size', type=int, default=224)
    parser.add_argument('--bs', type=int, default=64)
    parser.add_argument('--max-images', type=int, default=5120, help='four fifths of them are trained')
    parser.add_argument('--seconds', type=float, default=270., help='of the training')
    parser.add_argument('--rest', type=float, default=15., help='seconds before and after it')
    parser.add_argument('--figure', required=True, help='the PNG file to write')
    args = parser.parse_args()
    device = device_of(args)
    fields = dict(model=args.model, size=args.size, bs=args.bs, max_images=args.max_images)
    monitor, parts = timeline(device, fields, args.seconds, args.rest)
    df, machine = monitor.to_df(), describe_machine(device) | dict(device=device)
    axes = plot_monitor(df, parts, machine=machine,
                        title=f'Rest, {args.model} at {args.size} px, batch {args.bs}, rest')
    axes[-1].set_xlabel('time since the first sample (s)')          # before the fit
    axes[0].figure.savefig(args.figure, dpi=100)
    samples = df.round(4).astype(object).where(df.notna(), None).dropna(axis=1, how='all').to_dict('list')
    write_json(args.out, machine, indent=None, trial=fields, summary=monitor.summary(),
               parts=parts.to_dict('list'), samples=samples)
    print({k: v for k,v in monitor.summary().items() if v is not None and k!='monitor_note'})

if __name__=='__main__': main()
