"""Each lab from end to end, once, with what we claim about its functions as its last cells

A lab takes one of three routes in turn; GPUBENCH_ROUTES=all runs every lab by every route. claims/NN.py holds the claims about lab NN,
claims/NN_name.py those about deeper/NN_name.ipynb:
cells that begin with `# %%`, plain asserts about the variables and functions that the lab leaves behind; claims/every.py those about every lab."""
import json, os, re, subprocess, sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from gpubench.course.lab_format import check_parameters

from helpers import needed, root

labs = sorted((root/'nbs'/'labs').rglob('[0-9]*.ipynb'))   # the core and `deeper`; as `find_labs`: a notebook without a number is no lab
claims = Path(__file__).with_name('claims')
timeout_s = 600                                      # a cell; a lab's own promise is two minutes
times_nothing = {'02_transfer', '05_memory', '05_throttling', '07_int8', '07_waits', '10_gradient_noise', '12_what_to_do',
                 '13_your_training'}     # labs that leave no records.jsonl
# what a kernel prints when a package warns: 'FutureWarning: …', '[IPKernelApp] WARNING | …'
warning = re.compile(r'\w*Warning:|\bWARNING |\bdeprecated\b')


def environment(tmp_path):
    "As a student has it: no nbdev, the checkout's library"
    (tmp_path/'no_nbdev').mkdir(exist_ok=True)
    (tmp_path/'no_nbdev'/'nbdev.py').write_text("raise ImportError('a lab must not need nbdev')\n")
    path = os.pathsep.join([str(tmp_path/'no_nbdev'), str(root), str(claims)])
    return {k: v for k,v in os.environ.items() if k not in ('IN_TEST', 'PYTHONWARNINGS')} | dict(PYTHONPATH=path)

def call(tmp_path, *args):
    "A command line in another folder"
    (tmp_path/'elsewhere').mkdir(exist_ok=True)
    res = subprocess.run([sys.executable, *map(str, args)], cwd=tmp_path/'elsewhere', env=environment(tmp_path), capture_output=True,
                         text=True)
    assert res.returncode==0, res.stdout+res.stderr
    return res

def claims_name(lab): return lab.stem if lab.parent.name=='deeper' else lab.stem[:2]

def with_claims(lab, to, folder=claims):
    "A copy of the lab that ends with the claims about every lab and about it"
    nb, files = nbformat.read(lab, 4), [folder/'every.py', folder/f'{claims_name(lab)}.py']
    text = '\n'.join(o.read_text(encoding='utf-8') for o in files if o.is_file())
    titled = [re.sub('^# %% .*', lambda m: repr(m[0]), o.strip()) for o in re.split('^(?=# %% )', text, flags=re.M)]
    nb.cells += [new_code_cell(o) for o in titled if o]       # the title as code, since messages quote a cell's first line of code
    nbformat.write(nb, to/lab.name)
    return to/lab.name

def by_papermill(lab, tmp_path):
    "Plain papermill: `papermill lab.ipynb done.ipynb -p out FOLDER`"
    call(tmp_path, '-m', 'papermill', lab, tmp_path/'done.ipynb', '-p', 'out', tmp_path/'out', '-p', 'device', 'cpu', '--no-progress-bar',
         '--execution-timeout', timeout_s)
    return tmp_path/'done.ipynb'

def by_gpubench(lab, tmp_path):
    "`gpubench run LAB --out FOLDER`, which also makes the report"
    call(tmp_path, '-c', 'from gpubench.cli import main; main()', 'run', lab, '--device', 'cpu', '--out', tmp_path/'out', '--no-progress')
    assert lab.stem in times_nothing or (tmp_path/'out'/'report.html').stat().st_size>0
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

@pytest.mark.slow
@pytest.mark.parametrize('lab,route', plan(labs, os.environ.get('GPUBENCH_ROUTES')=='all'), ids=lambda o: getattr(o, 'stem', None) or o.__name__)
def test_lab(lab, route, tmp_path):
    assert list(faults(route(with_claims(lab, tmp_path), tmp_path)))==[]
    found = records(tmp_path/'out')
    assert bool(found)==(lab.stem not in times_nothing)
    assert {o['status'] for o in found}<={'ok'} and {o['device'] for o in found}<={'cpu'}
    assert all(o['epoch_s']>0 and o['n_images']>0 for o in found)
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

@pytest.mark.slow
@pytest.mark.parametrize('route', [by_papermill, by_hand])
def test_routes(route, tmp_path):
    lab = fake_lab(tmp_path/'01_x.ipynb', record, 'import sys; print("a bar", file=sys.stderr)')
    assert list(faults(route(lab, tmp_path)))==[]
    assert records(tmp_path/'out')==[dict(status='ok', device='cpu', epoch_s=1.5)]

@pytest.mark.slow
@pytest.mark.parametrize('route', [by_papermill, by_hand])
def test_routes_fault(route, tmp_path):
    with pytest.raises(Exception, match='must not need nbdev'): route(fake_lab(tmp_path/'02_x.ipynb', 'import nbdev'), tmp_path)
    noisy = fake_lab(tmp_path/'03_x.ipynb', 'import warnings; warnings.warn("x is old", FutureWarning)')
    assert ['FutureWarning' in o for o in faults(route(noisy, tmp_path))]==[True]
    assert len(list(faults(noisy)))==2               # nothing was executed here

def test_plan():
    def names(**kw): return [(o.stem, r.__name__) for o,r in plan([Path('01_a.ipynb'), Path('02_b.ipynb'), Path('04_d.ipynb')], **kw)]
    assert names()==[('01_a', 'by_papermill'), ('02_b', 'by_gpubench'), ('04_d', 'by_papermill')]
    assert len(names(every=True))==9

@pytest.mark.slow
@pytest.mark.parametrize('route', routes)
def test_a_claim_that_fails_is_shown(route, tmp_path):
    (tmp_path/'claims').mkdir()
    (tmp_path/'claims'/'01.py').write_text('# %% Four\nassert n==4\n\n# %% Five\n\nassert n==5\n')
    lab = with_claims(fake_lab(tmp_path/'01_x.ipynb', record, 'n = 4'), tmp_path, tmp_path/'claims')
    with pytest.raises(Exception, match='# %% Five') as e: route(lab, tmp_path)
    assert 'Four' not in str(e.value)

def test_claims_belong_to_labs():
    assert {o.stem for o in claims.glob('[0-9]*.py')} <= {claims_name(o) for o in labs}
    assert all(o.read_text(encoding='utf-8').startswith('# %% ') for o in claims.glob('[0-9]*.py'))


# ---- what labs ask for

def sources(lab, kind): return [o.source for o in nbformat.read(root/'nbs'/'labs'/f'{lab}.ipynb', 4).cells if o.cell_type==kind]

@pytest.mark.parametrize('lab', labs, ids=lambda o: o.stem)
def test_parameters_are_checked_first(lab):
    codes = [o for o in nbformat.read(lab, 4).cells if o.cell_type=='code' and 'install' not in o.metadata.get('tags', [])]
    assert 'parameters' in codes[0].metadata.tags and codes[1].source.startswith('from gpubench import LabSession\nlab = LabSession(')

def test_lab_02_checks_the_guess_that_it_asks_for():
    [asked] = [o for o in sources('02_batch_size', 'markdown') if o.startswith('## Guess')]
    assert 'images/s' in asked.split('?')[0]

def test_int8_imports_what_its_extra_holds():
    [line] = [l for o in sources('deeper/07_int8', 'code') for l in o.splitlines() if l.startswith('try: import ')]
    assert sorted(line.removeprefix('try: import ').split(', '))==sorted(o.name for o in needed('int8'))

def test_lab_11_takes_prices_and_runs_as_typed(tmp_path):
    lab = root/'nbs'/'labs'/'11_compare.ipynb'
    (tmp_path/'records.jsonl').touch()
    found = check_parameters(lab, dict(price_per_h='{cpu: .5, gpu: 4}', runs=f'{tmp_path},{tmp_path}'), text=True)
    assert found==dict(price_per_h=dict(cpu=.5, gpu=4.), runs=[str(tmp_path)]*2)
    for wrong in (dict(price_per_h='{gpu: 0}'), dict(price_per_h='4'), dict(runs=str(tmp_path/'gone'))):
        with pytest.raises(ValueError, match='Lab 11_compare: parameter'): check_parameters(lab, wrong, text=True)
