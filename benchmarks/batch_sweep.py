"""ResNet-18 at batch 16 to 1024 on images shaped like CIFAR-10, decoded from PNG files by fastai's own loader, on every
device asked for

    batch_sweep.py --out resnet18_10k --device cpu,cuda --max-images 12500

The images are random, since CIFAR-10 cannot be downloaded everywhere: the same shape and file format, so the time is
that of CIFAR-10 and the accuracy means nothing. A fifth is held out: 12,500 images train 10,000, and 62,500 train
50,000 as CIFAR-10 does."""
from gpubench.show.findings import findings, summary
from gpubench.show.report import report
from gpubench.run.sweep import sweep

from common import listed, out_parser

SIZES = [16, 32, 64, 128, 256, 512, 1024]

def main():
    p = out_parser(__doc__, 'folder for records, figures and report')
    p.add_argument('--device', type=listed(), default=['cpu', 'cuda'], help='with commas between')
    p.add_argument('--bs', type=listed(int), default=SIZES, help='batch sizes, with commas between')
    p.add_argument('--model', default='resnet18')
    p.add_argument('--max-images', type=int, default=12_500, help='four fifths of them are trained')
    p.add_argument('--n-workers', type=int, default=8, help='processes that decode')
    p.add_argument('--n-epoch', type=int, default=1, help='timed epochs a visit')
    p.add_argument('--repeats', type=int, default=3, help='visits of each')
    args = vars(p.parse_args())
    out, repeats = args.pop('out'), args.pop('repeats')
    plan = dict(dataset='synthetic', size=32, n_channels=3, loader='files', **args)
    df = sweep(plan, repeats=repeats, out=out)
    print(summary(df).to_string())
    for line in findings(df): print('*', line)
    print('report:', report(out))

if __name__=='__main__': main()
