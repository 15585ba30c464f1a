"""How long a user waits before anything happens: `import gpubench` and `gpubench --help`, beside a bare Python

    startup.py [--n 15]      JSON to standard output, with the machine; committed as results/startup_*.json

Each time is that of a fresh process, in rounds so that a slow moment of the machine hits all three alike."""
import argparse, json, subprocess, sys
from statistics import median
from time import perf_counter

from gpubench.core import describe_machine

commands = dict(bare_python=['-c', 'pass'], import_gpubench=['-c', 'import gpubench'],
                gpubench_help=['-c', 'import sys; sys.argv = ["gpubench", "--help"]; from gpubench.cli import main; main()'])

def seconds(args):
    "Wall time of one fresh process"
    start = perf_counter()
    subprocess.run([sys.executable, *args], check=True, stdout=subprocess.DEVNULL)
    return perf_counter()-start

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--n', type=int, default=15, help='rounds')
    n = parser.parse_args().n
    for args in commands.values(): seconds(args)     # once unmeasured: files into the page cache, byte code written
    rounds = [{k: seconds(args) for k,args in commands.items()} for _ in range(n)]
    times = {f'{k}_s': [round(o[k], 4) for o in rounds] for k in commands}
    medians = {k: round(median(v), 4) for k,v in times.items()}
    print(json.dumps(dict(machine=describe_machine(), n=n, median=medians, runs=times), indent=1))

if __name__=='__main__': main()
