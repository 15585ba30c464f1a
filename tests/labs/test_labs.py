"""Each lab from end to end, with what we claim about its functions as its last cells; three of them are also run with tiny.yaml, in a minute or two

A lab takes one of three routes in turn; GPUBENCH_ROUTES=all runs every lab by every route. claims/NN.py holds the claims about lab NN,
claims/NN_name.py those about deeper/NN_name.ipynb:
cells that begin with `# %%`, plain asserts about the variables and functions that the lab leaves behind; claims/every.py those about every lab."""
import json, os, re, subprocess, sys
from pathlib import Path

import nbformat
import pytest
import yaml
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

from gpubench.course.labs import find_labs, spread_parameters

from helpers import root

labs = sorted((root/'nbs'/'labs').rglob('[0-9]*.ipynb'))   # the core and `deeper`; as `find_labs`: a notebook without a number is no lab
claims = Path(__file__).with_name('claims')
tiny = yaml.safe_load(Path(__file__).with_name('tiny.yaml').read_text(encoding='utf-8'))
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

def written(tmp_path, params):
    "A file with these parameters"
    (tmp_path/'params.yaml').write_text(yaml.safe_dump(params))
    return tmp_path/'params.yaml'

def by_papermill(lab, tmp_path, params):
    "Plain papermill: `papermill lab.ipynb done.ipynb -f params.yaml`"
    file = written(tmp_path, params | dict(out=str(tmp_path/'out'), device='cpu'))
    call(tmp_path, '-m', 'papermill', lab, tmp_path/'done.ipynb', '-f', file, '--no-progress-bar', '--execution-timeout', timeout_s)
    return tmp_path/'done.ipynb'

def by_gpubench(lab, tmp_path, params):
    "`gpubench run LAB -f params.yaml --out FOLDER`, which also makes the report"
    call(tmp_path, '-c', 'from gpubench.cli import main; main()', 'run', lab, '--device', 'cpu', '--out', tmp_path/'out', '--no-progress',
         '-f', written(tmp_path, params))
    assert lab.stem in times_nothing or (tmp_path/'out'/'report.html').stat().st_size>0
    executed = list((tmp_path/'out').rglob(f'{lab.stem}*.ipynb'))
    assert len(executed)==1
    return executed[0]

def by_hand(lab, tmp_path, params):
    "As in JupyterLab: a copy of the lab, parameters edited in their cell, every cell from the top"
    nb = nbformat.read(lab, 4)
    cell = next(o for o in nb.cells if 'parameters' in o.metadata.get('tags', []))
    for k,v in (params | dict(out=str(tmp_path/'out'), device='cpu')).items():
        cell.source, n = re.subn(rf'^({k}: .+? = ).*?(?=  +#)', lambda m: f'{m[1]}{v!r}', cell.source, flags=re.M)
        assert n==1, f'no parameter {k} to edit'
    (tmp_path/'elsewhere').mkdir(exist_ok=True)
    client = NotebookClient(nb, timeout=timeout_s, kernel_name='python3', resources=dict(metadata=dict(path=str(tmp_path/'elsewhere'))))
    client.execute(env=environment(tmp_path))
    nbformat.write(nb, tmp_path/'done.ipynb')
    return tmp_path/'done.ipynb'

routes = [by_papermill, by_gpubench, by_hand]

def own_route(lab): return routes[(int(lab.stem.split('_')[0])-1)%len(routes)]     # so that a new lab changes nothing for the others

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

def check(lab, route, tmp_path, params):
    "Run a lab; its outputs and its records are as they should be"
    assert list(faults(route(with_claims(lab, tmp_path), tmp_path, params)))==[]
    found = records(tmp_path/'out')
    assert bool(found)==(lab.stem not in times_nothing)
    assert {o['status'] for o in found}<={'ok'} and {o['device'] for o in found}<={'cpu'}
    assert all(o['epoch_s']>0 and o['n_images']>0 for o in found)
    keys = [(o['trial_id'], o['machine'], o['visit']) for o in found]
    assert len(set(keys))==len(keys)                 # no visit is written twice

every_route = os.environ.get('GPUBENCH_ROUTES')=='all'

@pytest.mark.slow
@pytest.mark.parametrize('lab,route', [(o, r) for o in labs for r in (routes if every_route else [own_route(o)])],
                         ids=lambda o: getattr(o, 'stem', None) or o.__name__)
def test_lab(lab, route, tmp_path): check(lab, route, tmp_path, {})

@pytest.mark.parametrize('name,route', {'01_cpu_vs_gpu': by_gpubench, '04_data_loading': by_papermill, '06_training_loops': by_hand}.items(),
                         ids=lambda o: getattr(o, '__name__', o))
def test_tiny_lab(name, route, tmp_path):
    [lab] = [o for o in labs if o.stem==name]
    check(lab, route, tmp_path, tiny[name])

def test_every_lab_has_a_tiny_profile():
    assert {*tiny}=={o.stem for o in labs}
    spread_parameters(tiny, [*find_labs(root/'nbs'/'labs'), *find_labs(root/'nbs'/'labs'/'deeper')])
