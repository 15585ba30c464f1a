"""`find_best_bs` against the long way: three whole epochs of every batch size over 50,000 images

    best_bs.py --device cuda --model resnet18 --size 32 --n-channels 3 --out best_bs_gpu.json

Both count the seconds for which the device was held: the long way the epochs alone, without their validation or any
set-up; the race everything that its visits did, loading and warm-up included. The answer is right if its true speed,
that of the whole epochs, is within 5 % of the best."""
from dataclasses import asdict

from gpubench.run.race import find_best_bs
from gpubench.run.sweep import sweep
from gpubench.run.trial import Trial

from common import device_of, device_parser, write_json

SIZES = [16, 32, 64, 128, 256, 512, 1024]

def main():
    parser = device_parser(__doc__)
    parser.add_argument('--model', default='resnet18')
    parser.add_argument('--size', type=int, default=32)
    parser.add_argument('--n-channels', type=int, default=3)
    parser.add_argument('--loader', default='resident')
    parser.add_argument('--max-images', type=int, default=62_500, help='four fifths of them are trained')
    args = parser.parse_args()
    device = device_of(args)
    trial = Trial(dataset='synthetic', model=args.model, size=args.size, n_channels=args.n_channels, loader=args.loader,
                  max_images=args.max_images, device=device)
    race = find_best_bs(trial, SIZES)
    race_s = float(race.records.visit_s.sum())
    print(race.reason, f'{race_s:.1f} s')
    plan = [Trial(**asdict(trial) | dict(bs=o, n_epoch=3)) for o in SIZES]
    full = sweep(plan, repeats=1, twin=None, half_width=.9, max_s=0.)
    speed = (full.n_images/full.epoch_whole_s).set_axis(full.bs).sort_index()
    full_s = float((3*full.epoch_whole_s).sum())
    print(speed.round(0).to_string())
    chosen = race.choice.option
    print(f'best {speed.idxmax()}; the race chose {chosen}: {speed[chosen]/speed.max():.4f} of the best; '
          f'{race_s:.1f} of {full_s:.1f} s: {race_s/full_s:.3f}')
    columns = ['round', 'bs', 'images_per_s', 'step_ms', 'status', 'visit_s']
    write_json(args.out, device, device=device, trial=asdict(trial), full_s=full_s, race_s=race_s,
               share=race_s/full_s, chosen=chosen, missing=race.choice.missing, reason=race.reason,
               true_share_of_best=float(speed[chosen]/speed.max()),
               images_per_s={int(k): float(v) for k,v in speed.items()},
               race=race.records[columns].to_dict('records'))

if __name__=='__main__': main()
