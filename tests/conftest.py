"""What all tests share"""
import os, shutil, signal, subprocess, tempfile
from pathlib import Path

import pytest

from gpubench.ground.core import hide_known_warnings
from gpubench.step.fast import keep_pages

hide_known_warnings()                                # in the processes that tests start, too
os.environ.setdefault('MPLBACKEND', 'Agg')           # no test opens a window
os.environ['GPUBENCH_LOCKS'] = tempfile.mkdtemp(prefix='gpubench-test-locks-')   # no test, on no worker, waits for another one's sweep
if 'PYTEST_XDIST_WORKER' in os.environ: os.environ.setdefault('OMP_NUM_THREADS', '1')   # workers share the cores
for o in signal.SIGINT, getattr(signal, 'SIGHUP', signal.SIGINT):                    # a script's `&` and nohup leave them ignored
    if signal.getsignal(o)==signal.SIG_IGN: signal.signal(o, signal.default_int_handler if o==signal.SIGINT else signal.SIG_DFL)
root = Path(__file__).resolve().parent.parent

# ---- what takes long is marked

slow_fixtures = {'browser', 'shared_tree', 'slurm'}                          # they start a browser, a server or a build, a scheduler
shared_fixtures = slow_fixtures | {'wheel', 'changed'}                       # one worker makes what they share

@pytest.hookimpl(tryfirst=True)                      # before pytest selects by marker
def pytest_collection_modifyitems(items):
    for o in items:
        if slow_fixtures & {*o.fixturenames}: o.add_marker('slow')
        if shared_fixtures & {*o.fixturenames}: o.add_marker(pytest.mark.xdist_group(o.path.stem))

# ---- fixtures

@pytest.fixture(autouse=True)
def forget_kept_pages():
    "A trial refuses a process whose pages another test had kept; no test compares times"
    yield
    keep_pages.is_done = False

@pytest.fixture(scope='module')
def one_thread():
    "For tensors too small for two, which wait for each other on a busy machine: 77 s instead of 3 for one test"
    import torch
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)

@pytest.fixture(scope='session')
def repo_files():
    "Every file that is or would be committed, relative to the checkout"
    res = subprocess.run(['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'], cwd=root, capture_output=True,
                         text=True)
    if res.returncode: pytest.skip(f'not a git checkout: {res.stderr.strip()}')
    return sorted(Path(o) for o in set(res.stdout.split('\0')) if o and (root/o).is_file())

def copy_checkout(files, to):
    "These files of the checkout in another folder"
    for o in files:
        (to/o).parent.mkdir(parents=True, exist_ok=True)
        (to/o).write_bytes((root/o).read_bytes())
        (to/o).chmod((root/o).stat().st_mode)
    return to

@pytest.fixture(scope='module')
def shared_tree(repo_files, tmp_path_factory):
    "A copy of the checkout for all tests of a file"
    return copy_checkout(repo_files, tmp_path_factory.mktemp('shared')/'tree')

@pytest.fixture(scope='module')
def browser():
    "Headless Chromium; where something is missing the test says what, and is skipped"
    api = pytest.importorskip('playwright.sync_api', reason='No browser was tried: playwright is missing. It is in the extra `dev`.')
    names = 'chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable'
    path = os.environ.get('GPUBENCH_BROWSER') or next((o for o in names if shutil.which(o)), None)
    if not path: pytest.skip(f'No browser was tried: none of {", ".join(names)} is here. On Debian: sudo apt-get install chromium')
    flags = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-background-networking']
    with api.sync_playwright() as p: yield p.chromium.launch(executable_path=shutil.which(path), args=flags)
