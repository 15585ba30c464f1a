"""ResNet-18 at batch 16 … 1024 on images shaped like CIFAR-10, decoded from PNG files by fastai's own loader, on every device asked for.

    python benchmarks/batch_sweep.py --out benchmarks/results/resnet18_files --device cpu,cuda --max-images 12500
    python benchmarks/batch_sweep.py --out benchmarks/results/resnet18_files_full --device cuda --max-images 62500 --n-workers 16

The images are random, since CIFAR-10 cannot be downloaded everywhere: the same number, shape and file format, so the time is that of CIFAR-10
and the accuracy means nothing. A fifth is held out: 12,500 images train 10,000, and 62,500 train 50,000 as CIFAR-10 does.
"""
import click

from gpubench.findings import recommend, summary_table
from gpubench.report import write_report
from gpubench.sweep import sweep


def listed(kind): return lambda ctx, param, text: [kind(o) for o in text.split(',')]


@click.command(help=__doc__)
@click.option('--out', required=True, help='Folder for records, figures and report')
@click.option('--device', default='cpu,cuda', callback=listed(str), help='Devices, with commas between')
@click.option('--bs', default='16,32,64,128,256,512,1024', callback=listed(int), help='Batch sizes, with commas between')
@click.option('--model', default='resnet18')
@click.option('--max-images', default=12_500, help='How many to make; four fifths are trained')
@click.option('--n-workers', default=8, help='Processes that decode')
@click.option('--n-epoch', default=1, help='Timed epochs a visit')
@click.option('--repeats', default=3, help='Visits of each')
def main(out, device, bs, model, max_images, n_workers, n_epoch, repeats):
    plan = dict(dataset='synthetic', size=32, n_channels=3, max_images=max_images, loader='files', n_workers=n_workers,
                model=model, device=device, bs=bs, n_epoch=n_epoch)
    df = sweep(plan, repeats=repeats, out=out)
    print(summary_table(df).to_string())
    for line in recommend(df): print('*', line)
    print('report:', write_report(out))


if __name__=='__main__': main()
