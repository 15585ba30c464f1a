"""How long 10,000 records take to read, to summarize and to report, and how much memory

    many_records.py --out many_records.json [--n 10000] [--runs 5]

The records are made up: 100 configurations of 2 devices, 10 batch sizes and 5 numbers of workers, visited 100 times
each. Every run is a fresh process, whose imports count as memory and in `cpu_s`, the processor's time of all of it, but
not in the other seconds."""
import json, resource, sys, tempfile
from itertools import product
from pathlib import Path
from time import perf_counter, process_time

from common import out_parser, run_apart, spread, write_json

root = Path(__file__).resolve().parent.parent

def make(folder, n):
    "A file of n records"
    sys.path.insert(0, str(root/'tests'))
    from made_up_records import visit
    from gpubench.ground.record import SCHEMA_VERSION, plain_record
    each = list(product(['cpu', 'cuda'], [2**o for o in range(1, 11)], [0, 1, 2, 4, 8]))
    rows = [visit(bs, device, v, n_workers=n_workers, model_source='madeup', measure=dict(half_width=.05), twin=False,
                  time_utc=f'2000-01-{1+v//1440:02d}T{v//60%24:02d}:{v%60:02d}:00+00:00',
                  trial_id=f'{device}{bs}{n_workers}')
            for v in range(-(-n//len(each))) for device,bs,n_workers in each][:n]
    lines = [json.dumps(plain_record(o) | dict(schema=SCHEMA_VERSION)) + '\n' for o in rows]
    (folder/'records.jsonl').write_text(''.join(lines))

def once(folder):
    "Seconds of each part, in this process"
    from gpubench.show.compare import load_records
    from gpubench.show.findings import summary_table
    from gpubench.ground.record import read_records
    from gpubench.show.report import write_report
    marks = [perf_counter()]
    df = read_records(folder)
    marks.append(perf_counter())
    summary_table(load_records(folder))
    marks.append(perf_counter())
    write_report(folder)
    marks.append(perf_counter())
    times = dict(zip(('read_s', 'summarize_s', 'report_s'), [b-a for a,b in zip(marks, marks[1:])]))
    return times | dict(peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1024, n=len(df),
                        cpu_s=process_time())

def main():
    p = out_parser(__doc__)
    p.add_argument('--n', type=int, default=10_000)
    p.add_argument('--runs', type=int, default=5)
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), args.n)
        mib = (Path(folder)/'records.jsonl').stat().st_size/2**20
        runs = [run_apart(sys.executable, __file__, 'one', folder) for _ in range(args.runs)]
    print(f'{args.n} records, {mib:.1f} MiB, {args.runs} runs: median (least to most)')
    for k in ('read_s', 'summarize_s', 'report_s', 'peak_mib', 'cpu_s'):
        print(f'  {k:12} {spread([o[k] for o in runs], ".2f")}')
    write_json(args.out, n=args.n, file_mib=round(mib, 2), runs=runs)

if __name__=='__main__':
    if sys.argv[1:2]==['one']: print(json.dumps(once(Path(sys.argv[2]))))
    else: main()
