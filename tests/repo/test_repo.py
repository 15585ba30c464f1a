"""What holds of the whole repository"""
import ast, re, sys, zipfile
from email.parser import Parser
from importlib.util import resolve_name
from pathlib import Path

import pytest

from conftest import copy_checkout
from helpers import as_module, needed, read_settings, root, run, tool

heavy = {'torch', 'torchvision', 'fastai', 'pandas', 'matplotlib'}
heavier = heavy | {'numpy', 'scipy', 'sklearn', 'papermill', 'nbclient', 'IPython', 'fastcore'}


# ---- tools

def contents(folder, *patterns):
    "Bytes of every file that matches, by path from `folder`"
    return {str(o.relative_to(folder)): o.read_bytes() for p in patterns for o in sorted(folder.glob(p))}

def differences(old, new):
    "Names of files that are missing, more or not the same"
    return sorted(k for k in old.keys() | new.keys() if old.get(k)!=new.get(k))

package = root/'gpubench'
rooms = ['ground', 'data', 'watch', 'step', 'run', 'show', 'course']    # each imports from those before it
modules = sorted(o for o in package.rglob('*.py') if o.stem not in ('__init__', '_modidx'))
library = [o for room in (*rooms, '') for o in sorted((root/'nbs'/room).glob('[0-9][0-9]_*.ipynb'))]
CONFIGURATION = ('pyproject.toml', 'settings.ini', 'setup.py')


# ---- errors

def test_errors_with_a_sentence_are_those_for_users():
    "The command line shows a sentence for `InputError` and `StateError` alone"
    plain = {o.relative_to(package).as_posix() for o in modules if re.search(r'raise (ValueError|RuntimeError)\(', o.read_text(encoding='utf-8'))}
    assert plain==set()


# ---- notebooks and what is made from them

@pytest.fixture(scope='module')
def changed(repo_files, tmp_path_factory):
    "Files that one export and one clean of the notebooks in another folder would add, remove or change"
    tree = copy_checkout([o for o in repo_files if o.parts[0]=='nbs' or o.name in CONFIGURATION], tmp_path_factory.mktemp('made'))
    for o in ('nbdev-export', 'nbdev-clean'): run(tool(o), cwd=tree)
    made, hand_made = contents(tree, 'gpubench/**/*.py', 'nbs/**/*.ipynb'), {f'gpubench/{o}/__init__.py' for o in rooms}
    ours = {str(o): (root/o).read_bytes() for o in repo_files if o.suffix=='.py' and o.parts[0]=='gpubench' or str(o) in made}
    return [o for o in differences(ours, made) if o not in hand_made | {'gpubench/_modidx.py'}]

def test_export_in_step(changed): assert [o for o in changed if o.endswith('.py')]==[], 'run `make export`'

def test_notebooks_clean(changed): assert [o for o in changed if o.endswith('.ipynb')]==[], 'run `nbdev-clean`'

def test_readme_in_step():
    readme = as_module(root/'tools'/'readme.py')
    assert readme.readme_text(root/'nbs'/'index.ipynb')==(root/'README.md').read_text(encoding='utf-8'), 'run `make readme`'

# ---- imports

packages = {'gpubench', *(f'gpubench.{o}' for o in rooms)}

def imported(source, package='gpubench'):
    "What a module of `package` imports, anywhere in it, as dotted names"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import): yield from (o.name for o in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name('.'*node.level+(node.module or ''), package)
            if base in packages: yield from (f'{base}.{o.name}' for o in node.names)
            else: yield base

def imports_of(module, source):
    "What a module of the library imports: `ground.core` for one of its own"
    package = '.'.join(['gpubench', *module.split('.')[:-1]])
    return {o.removeprefix('gpubench.') for o in imported(source, package)} - {'__version__'}

def wrong_arrows(order, sources):
    "Imports of the library's own modules that do not point to one of a lower number"
    place = {o: i for i,o in enumerate(order)}
    own = tuple(f'{o}.' for o in rooms)
    return sorted(f'{m} imports {o}' for m,source in sources.items() for o in imports_of(m, source)
                  if o!=m and (o in place or o.startswith(own)) and place.get(o, len(order))>=place[m])

def dotted(path, folder):
    "The module of a file below `folder`, such as ground.core; a notebook's has a number in front"
    return '.'.join([*path.relative_to(folder).parts[:-1], re.sub(r'^\d\d_', '', path.stem)])

def sources_and_order():
    "Module sources by name, and the names by the numbers of their notebooks"
    order = [dotted(o, root/'nbs') for o in library]
    return {dotted(o, package): o.read_text(encoding='utf-8') for o in modules}, [o for o in order if o!='__init__']

def test_arrows():
    sources, order = sources_and_order()
    assert set(sources)==set(order)
    assert wrong_arrows(order, sources)==[]

def loaded(statement, of):
    "Which packages of `of` a fresh Python has loaded after `statement`"
    code = f'import sys\n{statement}\nprint(*sorted(set({sorted(of)!r}) & set(sys.modules)))'
    return run(sys.executable, '-c', code, PYTHONPATH=str(root)).split()

def test_what_an_import_loads():
    assert loaded('import gpubench', heavier)==[]
    assert loaded('import gpubench.ground.record, gpubench.ground.stats, gpubench.show.plot', {'torch', 'torchvision', 'fastai'})==[]
    assert loaded('import gpubench.cli', heavy | {'papermill', 'scipy', 'sklearn'})==[]

# ---- what no file may say

# in pieces, so that this file passes its own test
indexes = ['pypi'+r'\.org', 'python'+'hosted', 'deb'+r'\.debian', 'npm'+r'js\.(?:org|com)', 'anaconda'+r'\.(?:org|com)',
           r'download\.pytorch\.org/'+'whl', 'pypi'+r'\.nvidia', '--(?:extra-)?index'+'-url']
places = [r'(?<![\w.])/(?:work|farm|root)'+'/', '/tmp/'+'bash_jobs', '/tmp/'+r'pytest-of', '/tmp/'+r'ipykernel_\d']
homes = [r'(?<![\w.])/(?:home|Users)/'+r'[\w.-]+']    # in outputs and records: whoever made them
forbidden, forbidden_outputs = re.compile('|'.join(indexes+places)), re.compile('|'.join(places+homes))

def forbidden_words(path, text):
    "Package indexes and paths of one machine that a file names"
    found = {m.group() for m in forbidden.finditer(text)}
    if path.suffix in ('.ipynb', '.jsonl'): found |= {m.group() for m in forbidden_outputs.finditer(text)}
    return [f'{path}: {o}' for o in sorted(found)]

def readable(path):
    "The text of a file, empty if it holds none"
    try: return path.read_text(encoding='utf-8')
    except UnicodeDecodeError: return ''

def test_no_index_no_machine(repo_files):
    assert [o for f in repo_files for o in forbidden_words(f, readable(root/f))]==[]

# ---- the package

def test_version():
    import gpubench
    assert gpubench.__version__==read_settings()['version']
    assert re.search(rf'^## \[{re.escape(gpubench.__version__)}\]', (root/'CHANGELOG.md').read_text(encoding='utf-8'), re.M)

@pytest.fixture(scope='module')
def wheel(repo_files, tmp_path_factory):
    "A wheel built from the files that are or would be committed, without the network"
    tree = copy_checkout(repo_files, tmp_path_factory.mktemp('wheel'))
    run(sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '--no-build-isolation', '--no-index', '-w', tree/'out', tree)
    with zipfile.ZipFile(next((tree/'out').glob('*.whl'))) as z: yield z

def test_wheel_files(wheel, repo_files):
    folder = Path('nbs', 'labs')
    labs = [o.relative_to(folder) for o in repo_files if folder in o.parents and o.name!='.notest']    # the syllabus travels with them
    own = [*package.glob('*.py'), *package.rglob('*/*.py'), *(package/'show').glob('page.*')]
    want = {f'gpubench/{o.relative_to(package).as_posix()}' for o in own if o.name!='_modidx.py'}    # git ignores it
    want |= {f'gpubench/notebooks/{o.as_posix()}' for o in labs}
    assert want=={o for o in wheel.namelist() if '.dist-info/' not in o}

def test_wheel_requirements(wheel):
    import gpubench
    file = next(o for o in wheel.namelist() if o.endswith('.dist-info/METADATA'))
    meta = Parser().parsestr(wheel.read(file).decode())
    plain = [re.match(r'[\w.-]+', o)[0].lower() for o in meta.get_all('Requires-Dist') if 'extra ==' not in o]
    assert {'torch', 'fastai', 'papermill', 'ipykernel'} <= set(plain)
    assert not {'nbdev', 'jupyterlab', 'execnb', 'ghapi', 'pytest', 'nbconvert', 'onnx', 'onnxruntime', 'onnxscript', 'sphinx'} & set(plain)
    assert set(meta.get_all('Provides-Extra'))=={'lab', 'int8', 'site', 'dev', 'cluster'}
    assert (meta['Version'], meta['License-Expression'])==(gpubench.__version__, 'Apache-2.0')
    entry = next(o for o in wheel.namelist() if o.endswith('.dist-info/entry_points.txt'))
    assert 'gpubench = gpubench.cli:main' in wheel.read(entry).decode()

def test_requirements_are_imported():
    "What modules import is required, and nothing else but nvitop, which a lab shows; `cluster` has an extra"
    known = dict(sklearn='scikit-learn', PIL='pillow', yaml='pyyaml', pynvml='nvidia-ml-py', cuda='torch', IPython='ipykernel')   # which bring them
    required = {o.name for o in needed()+needed('cluster')}
    used = {known.get(o.split('.')[0], o.split('.')[0]) for m,source in sources_and_order()[0].items() for o in imports_of(m, source)}
    optional = {'torch_xla'}                          # needs a torch of its own; without it, device='xla' is refused
    assert sorted(used-required-optional-set(sys.stdlib_module_names)-{'gpubench', 'cli', *rooms})==[]
    assert required-used=={'nvitop'}
