"""How long a user waits before anything happens: `import gpubench` and `gpubench --help`, beside a bare Python

    startup.py --out startup.json [--n 15]

Each time is that of a fresh process, in rounds so that a slow moment of the machine hits all three alike."""
import subprocess, sys
from statistics import median
from time import perf_counter

from common import out_parser, write_json

commands = dict(bare_python=['-c', 'pass'], import_gpubench=['-c', 'import gpubench'],
                gpubench_help=['-c', 'import sys; sys.argv = ["gpubench", "--help"]; from gpubench.cli import main; main()'])

def seconds(args):
    "Wall time of one fresh process"
    start = perf_counter()
    subprocess.run([sys.executable, *args], check=True, stdout=subprocess.DEVNULL)
    return perf_counter()-start

def main():
    p = out_parser(__doc__)
    p.add_argument('--n', type=int, default=15, help='rounds')
    args = p.parse_args()
    for o in commands.values(): seconds(o)     # once unmeasured: files into the page cache, byte code written
    rounds = [{k: seconds(o) for k,o in commands.items()} for _ in range(args.n)]
    times = {f'{k}_s': [round(o[k], 4) for o in rounds] for k in commands}
    medians = {k: round(median(v), 4) for k,v in times.items()}
    write_json(args.out, n=args.n, median=medians, runs=times)
    for k,v in medians.items(): print(f'{k:18} {v:.3f}')

if __name__=='__main__': main()
