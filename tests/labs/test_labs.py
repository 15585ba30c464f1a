"""Each lab from end to end, once, by one of its three routes in turn; GPUBENCH_ROUTES=all runs every lab by every route"""
import ast, json, os, re, subprocess, sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from gpubench.checks import check_guess
from gpubench.stats import Interval

from helpers import root

labs = sorted((root/'nbs'/'labs').glob('[0-9]*.ipynb'))   # as `find_labs`: a notebook without a number is no lab
timeout_s = 600                                      # a cell; a lab's own promise is two minutes
# what a kernel prints when a package warns: 'FutureWarning: …', '[IPKernelApp] WARNING | …'
warning = re.compile(r'\w*Warning:|\bWARNING |\bdeprecated\b')


def environment(tmp_path):
    "As a student has it: no nbdev, the checkout's library"
    (tmp_path/'no_nbdev').mkdir(exist_ok=True)
    (tmp_path/'no_nbdev'/'nbdev.py').write_text("raise ImportError('a lab must not need nbdev')\n")
    path = os.pathsep.join([str(tmp_path/'no_nbdev'), str(root)])
    return {k: v for k,v in os.environ.items() if k not in ('IN_TEST', 'PYTHONWARNINGS')} | dict(PYTHONPATH=path)

def call(tmp_path, *args):
    "A command line in another folder"
    (tmp_path/'elsewhere').mkdir(exist_ok=True)
    res = subprocess.run([sys.executable, *map(str, args)], cwd=tmp_path/'elsewhere', env=environment(tmp_path), capture_output=True,
                         text=True)
    assert res.returncode==0, res.stdout+res.stderr
    return res

def by_papermill(lab, tmp_path):
    "Plain papermill: `papermill lab.ipynb done.ipynb -p out FOLDER`"
    call(tmp_path, '-m', 'papermill', lab, tmp_path/'done.ipynb', '-p', 'out', tmp_path/'out', '-p', 'device', 'cpu', '--no-progress-bar',
         '--execution-timeout', timeout_s)
    return tmp_path/'done.ipynb'

def by_gpubench(lab, tmp_path):
    "`gpubench run LAB --out FOLDER`, which also makes the report"
    call(tmp_path, '-c', 'from gpubench.cli import main; main()', 'run', lab, '--device', 'cpu', '--out', tmp_path/'out', '--no-progress')
    assert (tmp_path/'out'/'report.html').stat().st_size>0
    executed = list((tmp_path/'out').rglob(f'{lab.stem}*.ipynb'))
    assert len(executed)==1
    return executed[0]

def by_hand(lab, tmp_path):
    "As in JupyterLab: a copy of the lab, parameters edited in their cell, every cell from the top"
    nb = nbformat.read(lab, 4)
    cell = next(o for o in nb.cells if 'parameters' in o.metadata.get('tags', []))
    for k,v in dict(out=str(tmp_path/'out'), device='cpu').items():
        cell.source, n = re.subn(rf"^({k}: str = )'[^']*'", lambda m: f'{m[1]}{v!r}', cell.source, flags=re.M)
        assert n==1, f'no parameter {k} to edit'
    (tmp_path/'elsewhere').mkdir(exist_ok=True)
    client = NotebookClient(nb, timeout=timeout_s, kernel_name='python3', resources=dict(metadata=dict(path=str(tmp_path/'elsewhere'))))
    client.execute(env=environment(tmp_path))
    nbformat.write(nb, tmp_path/'done.ipynb')
    return tmp_path/'done.ipynb'

routes = [by_papermill, by_gpubench, by_hand]

def plan(labs, every=False):
    "Which lab runs by which route: the lab's number decides, so that a new lab changes nothing for the others"
    return [(lab, r) for lab in labs for i,r in enumerate(routes) if every or i==(int(lab.stem.split('_')[0])-1)%len(routes)]

def faults(path):
    "What is wrong with an executed notebook"
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type!='code' or not cell.source.strip(): continue
        first = cell.source.splitlines()[0]
        if cell.execution_count is None: yield f'not executed: {first}'
        for o in cell.outputs:
            if o.output_type=='error': yield f'{o.ename} in: {first}'
            if o.output_type=='stream' and (m := warning.search(o.text)): yield f'a warning ({m.group()}) in: {first}: {o.text[:300]}'

def records(folder):
    "Every record that a lab left"
    return [json.loads(line) for file in sorted(folder.rglob('records.jsonl')) for line in file.read_text(encoding='utf-8').splitlines()]

@pytest.mark.parametrize('lab,route', plan(labs, os.environ.get('GPUBENCH_ROUTES')=='all'), ids=lambda o: getattr(o, 'stem', None) or o.__name__)
def test_lab(lab, route, tmp_path):
    assert list(faults(route(lab, tmp_path)))==[]
    found = records(tmp_path/'out')
    ran = [o for o in found if o['status']!='skipped']
    assert ran and {o['status'] for o in ran}=={'ok'} and {o['device'] for o in found}=={'cpu'}
    assert all(o['epoch_s']>0 and o['n_images']>0 for o in ran)
    assert {o['precision'] for o in found if o not in ran}==({'fp16', 'tf32'} if lab.stem.startswith('07') else set())    # no CPU has these
    keys = [(o['trial_id'], o['machine'], o['visit']) for o in found]
    assert len(set(keys))==len(keys)                 # no visit is written twice


# ---- the tests tested, on a lab that takes no time

parameters = "device: str = 'auto'  # where\nout: str = ''  # folder\nseed: int = 0  # of the order"
record = '''import json
from pathlib import Path
Path(out).mkdir(parents=True, exist_ok=True)
Path(out, 'records.jsonl').write_text(json.dumps(dict(status='ok', device=device, epoch_s=1.5)))'''

def fake_lab(path, *sources):
    cells = [new_markdown_cell('# 01 · Why?\n\n| Minutes | Needs | Measures |\n|---|---|---|\n| 1 | any machine | one device |'),
             new_code_cell(parameters, metadata=dict(tags=['parameters'])), *[new_code_cell(o) for o in sources]]
    nbformat.write(new_notebook(cells=cells, metadata=dict(kernelspec=dict(display_name='python3', language='python', name='python3'))), path)
    return path

@pytest.mark.parametrize('route', [by_papermill, by_hand])
def test_routes(route, tmp_path):
    lab = fake_lab(tmp_path/'01_x.ipynb', record, 'import sys; print("a bar", file=sys.stderr)')
    assert list(faults(route(lab, tmp_path)))==[]
    assert records(tmp_path/'out')==[dict(status='ok', device='cpu', epoch_s=1.5)]

@pytest.mark.parametrize('route', [by_papermill, by_hand])
def test_routes_fault(route, tmp_path):
    with pytest.raises(Exception, match='ZeroDivisionError'): route(fake_lab(tmp_path/'01_x.ipynb', '1/0'), tmp_path)
    with pytest.raises(Exception, match='must not need nbdev'): route(fake_lab(tmp_path/'02_x.ipynb', 'import nbdev'), tmp_path)
    noisy = fake_lab(tmp_path/'03_x.ipynb', 'import warnings; warnings.warn("x is old", FutureWarning)')
    assert ['FutureWarning' in o for o in faults(route(noisy, tmp_path))]==[True]
    assert len(list(faults(noisy)))==2               # nothing was executed here

def test_plan():
    def names(**kw): return [(o.stem, r.__name__) for o,r in plan([Path('01_a.ipynb'), Path('02_b.ipynb'), Path('04_d.ipynb')], **kw)]
    assert names()==[('01_a', 'by_papermill'), ('02_b', 'by_gpubench'), ('04_d', 'by_papermill')]
    assert len(names(every=True))==9


# ---- what lab 02 says where its visits leave the answer open

def cell_of(lab, start):
    "The one cell of a lab that has a line with this start"
    [found] = [o.source for o in nbformat.read(root/'nbs'/'labs'/f'{lab}.ipynb', 4).cells
               if o.cell_type=='code' and re.search(f'^{re.escape(start)}', o.source, re.M)]
    return found

def functions(lab, *starts, **known):
    "What the `def`s of these cells define, without running the rest of them"
    for source in (cell_of(lab, o) for o in starts):
        tree = ast.parse(source)
        tree.body = [o for o in tree.body if isinstance(o, ast.FunctionDef)]
        exec(compile(tree, lab, 'exec'), known)
    return known

def definitions(lab, *constants, **known):
    "Imports, parameters, functions and classes of a whole lab, and what it assigns to names in `constants`; nothing that trains or measures"
    def wanted(o): return isinstance(o, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)) or isinstance(o, ast.Assign) and any(
        n.id in constants for t in o.targets for n in ast.walk(t) if isinstance(n, ast.Name))
    for cell in nbformat.read(root/'nbs'/'labs'/f'{lab}.ipynb', 4).cells:
        if cell.cell_type!='code': continue
        tree = ast.parse(cell.source)
        if 'parameters' not in cell.metadata.get('tags', []): tree.body = [o for o in tree.body if wanted(o)]
        exec(compile(tree, lab, 'exec'), known)
    return known

def meeting():
    found = functions('02_batch_size', 'def say_meeting', 'def meeting_bs')
    return found['say_meeting'], found['meeting_bs']

nan, inf = float('nan'), float('inf')

@pytest.mark.parametrize('c', [(nan, nan, nan), (30., nan, nan), (30., 0., 40.), (30., 20., inf)], ids=str)
def test_a_meeting_that_is_not_determined(c):
    say, bs = meeting()
    c, verdicts = Interval(*c, .95), pd.Series(['not distinguishable', 'GPU faster'])
    assert say(c).startswith('not determined')
    assert bs(c, verdicts) is None
    reply = check_guess(20, bs(c, verdicts), unit='images')
    assert reply.ok is None and 'measured were' not in reply.text

def test_a_meeting_that_is_determined():
    say, bs = meeting()
    c, verdicts = Interval(30., 20., 40., .95), pd.Series(['CPU faster', 'GPU faster'])
    assert say(c)=='at batch 30. From 20 to 40 they cannot be told apart.' and bs(c, verdicts)==30
    assert bs(Interval(nan, nan, nan, 0.), verdicts[1:])==0      # the GPU was faster at every size

def test_a_prediction_without_a_curve():
    met = pd.DataFrame(dict(lo=[nan], cpu_predicted=[nan], gpu_predicted=[.98765]))
    shown = eval(cell_of('02_batch_size', 'met.round').splitlines()[-1], dict(met=met))
    assert shown.iloc[0, 1:].tolist()==['no curve', .988] and shown.lo.isna().all()

def test_lab_02_checks_the_guess_that_it_asks_for():
    "Images a second, though an epoch of the largest size trains fewer and so is shorter still"
    table = pd.DataFrame(dict(epoch_s=[4., 2., .2], images_per_s=[100., 200., 800.]), index=[8, 16, 512])
    def reply(guess, sizes=(8, 16, 512)): return eval_last(cell_of('02_batch_size', 'check_guess(my_guess_ratio'), batch_sizes=list(sizes),
                                                           table=table, my_guess_ratio=guess, check_guess=check_guess)
    assert (reply(8).ok, reply(20).ok)==(True, False)
    assert reply(8, sizes=(8, 16, 4096)).ok is None                      # no visit of the largest succeeded
    asked = next(o.source for o in nbformat.read(root/'nbs'/'labs'/'02_batch_size.ipynb', 4).cells if o.source.startswith('## Guess'))
    assert 'images a second' in asked.split('?')[0]

def eval_last(source, **known):
    "The value of the last line of a cell"
    *body, last = ast.parse(source).body
    exec(compile(ast.Module(body, []), 'cell', 'exec'), known)
    return eval(compile(ast.Expression(last.value), 'cell', 'eval'), known)

def test_lab_02_needs_two_sizes():
    with pytest.raises(ValueError, match=r'batch_sizes is \[64, 64\], and there is nothing to compare'):
        exec(cell_of('02_batch_size', 'if len(set(batch_sizes))'), dict(batch_sizes=[64, 64]))
