"""The tests of the notebooks on the fastai that is installed here, by nbclient: nbdev 2 cannot live beside fastcore 2

    newest.py [NOTEBOOK...] [--workers 2] [--timeout 900]

Runs what nbdev_test would run, in a kernel where nbdev cannot be imported. A line a notebook, exit status 1 if one fails."""
import argparse, ast, os, re, sys, time
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from importlib.metadata import version
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

root = Path(__file__).resolve().parents[2]
directive = re.compile(r'^\s*#\|\s*([\w-]+)\s*:?\s*(.*?)\s*$', re.M)
colour = re.compile(r'\x1b\[[0-9;]*m')
# the kernel is this interpreter, and whatever imports nbdev in it fails
first_cell = f"import sys; sys.modules['nbdev'] = None\nif sys.prefix != {sys.prefix!r}: raise SystemError(sys.prefix)"


def flags_to_skip():
    "The directives whose cells nbdev_test leaves out unless it is asked"
    parser = ConfigParser(delimiters=['='], interpolation=None)
    parser.read(root/'settings.ini', encoding='utf-8')
    return set(parser['DEFAULT']['tst_flags'].split())

def is_tested(cell, flags=()):
    "Whether nbdev_test would run this code cell"
    found = {k: v.lower() for k,v in directive.findall(cell.source)}
    return found.get('eval')!='false' and not found.keys() & set(flags) and 'nbdev_export(' not in cell.source

def is_skipped(nb):
    "Whether the front matter takes the whole notebook out of the tests"
    return any(re.search(r'^skip_exec:\s*true\s*$', o.source, re.M | re.I) for o in nb.cells if o.cell_type!='code')

def imports_of(source):
    "Names of the packages that a cell imports, magics aside"
    for node in ast.walk(ast.parse(TransformerManager().transform_cell(source))):
        if isinstance(node, ast.Import): yield from (o.name.split('.')[0] for o in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level: yield node.module.split('.')[0]

def test_notebook(path, flags=(), timeout=900):
    "What went wrong ('' if nothing did), how many cells ran, and in how many seconds"
    nb, start = nbformat.read(path, 4), time.perf_counter()
    cells = [] if is_skipped(nb) else [o for o in nb.cells if o.cell_type=='code' and is_tested(o, flags)]
    if any('nbdev' in imports_of(o.source) for o in cells): return 'a tested cell imports nbdev', 0, 0.
    nb.cells = [nbformat.v4.new_code_cell(first_cell)] + cells
    client = NotebookClient(nb, timeout=timeout, kernel_name='python3', resources=dict(metadata=dict(path=str(path.parent))),
                            extra_arguments=['--log-level=ERROR'])   # else each kernel warns that TCP is not encrypted
    error = ''
    try:
        if cells: client.execute()
    except (CellExecutionError, CellTimeoutError, RuntimeError) as e: error = colour.sub('', str(e))
    return error, len(cells), time.perf_counter()-start
test_notebook.__test__ = False   # a name that pytest would take for a test

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('notebooks', nargs='*', type=Path, help='all of nbs/ if none is named; labs have tests of their own')
    parser.add_argument('--workers', type=int, default=2)
    parser.add_argument('--timeout', type=int, default=900, help='seconds a cell')
    args = parser.parse_args()
    fastcore, notebooks = version('fastcore'), args.notebooks or sorted((root/'nbs').glob('*.ipynb'))
    if int(fastcore.split('.')[0]) < 2: sys.exit(f'This environment has fastcore {fastcore}: `make test-newest` uses one with 2 or later.')
    if not notebooks: sys.exit(f'No notebook under {root/"nbs"}')
    print(f"{len(notebooks)} notebooks on fastai {version('fastai')}, fastcore {fastcore}, torch {version('torch')}", flush=True)
    os.environ['IN_TEST'] = '1'                      # as nbdev_test has it
    n_failed = 0
    with ThreadPoolExecutor(args.workers) as pool:
        results = pool.map(lambda o: test_notebook(o.resolve(), flags_to_skip(), args.timeout), notebooks)
        for path,(error,n,seconds) in zip(notebooks, results):
            print(f"{'FAIL' if error else 'PASS'}  {path.stem:<16} {n:3} cells {seconds:6.1f} s", flush=True)
            if error: n_failed += 1; print(error, flush=True)
    print(f'{n_failed} of {len(notebooks)} notebooks failed' if n_failed else f'all {len(notebooks)} notebooks passed')
    sys.exit(n_failed>0)

if __name__=='__main__': main()
