"""Lab 01 in a real browser, cell by cell as a student runs it: `make lab`, headless Chromium, Shift+Enter.
Needs playwright (in the extra `dev`) and a Chromium or Chrome of this machine. Screenshots go to runs/browser, which git ignores"""
import re, shutil
from pathlib import Path

import nbformat
import psutil
import pytest

from helpers import lab_server, status

pytestmark = pytest.mark.slow

shots = Path(__file__).resolve().parents[2]/'runs'/'browser'
cell_s = 120                                         # a cell's own promise is two minutes
look_s = 5                                           # until what has arrived is painted
# what a cell of the page shows; a figure counts if it was decoded, has a size on the page, and is not of one colour
looks = '''cell => {
    const all = (o, from=cell) => [...from.querySelectorAll(o)], texts = o => all(o).map(e => e.innerText.trim())
    function painted(img) {
        if (!img.complete || !img.naturalWidth || !img.getBoundingClientRect().width) return false
        const c = Object.assign(document.createElement('canvas'), {width: img.naturalWidth, height: img.naturalHeight}).getContext('2d')
        c.drawImage(img, 0, 0)
        return new Set(new Uint32Array(c.getImageData(0, 0, img.naturalWidth, img.naturalHeight).data.buffer)).size > 2
    }
    const full = o => o.getBoundingClientRect().width > .99*o.parentElement.clientWidth
    return {prompt: texts('.jp-InputPrompt')[0], n_outputs: all('.jp-OutputArea-child .jp-OutputArea-output').length,
            complaints: texts('[data-mime-type="application/vnd.jupyter.stderr"], [data-mime-type="application/vnd.jupyter.error"]'),
            n_figures: all('.jp-OutputArea-output img').filter(painted).length,
            n_bars: all('.progress-bar').length, n_full_bars: all('.progress-bar').filter(full).length}
}'''

done = r'/^\[\d+\]:$/.test(o.prompt)'


# ---- the server and its page

@pytest.fixture(scope='module')
def server(shared_tree, tmp_path_factory):
    "`make lab` in a copy of the checkout, whose library its kernels import"
    with lab_server(shared_tree, tmp_path_factory.mktemp('jupyter'), PYTHONPATH=str(shared_tree)) as o: yield o

@pytest.fixture
def page(browser, server, shots_folder):
    o = browser.new_page(viewport=dict(width=1280, height=1000))
    yield o
    o.close()


# ---- what a student does

def open_notebook(page, server, path):
    "The notebook in an empty workspace, when its kernel is ready; the question whether one wants news gets a no, a dialog its OK"
    page.add_locator_handler(page.get_by_role('button', name='No', exact=True), lambda o: o.click())
    page.add_locator_handler(page.locator('.jp-Dialog'), accept)
    page.goto(f'{server.base}/lab/workspaces/{Path(path).stem}/tree/{path}?token={server.token}')
    page.locator('.jp-Notebook-cell').first.wait_for(timeout=1e3*cell_s)
    page.locator('.jp-Notebook-ExecutionIndicator[data-status=idle]').wait_for(timeout=1e3*cell_s)

def accept(dialog):
    "What a student does with a dialog, such as that the server was slow to answer; its words are in the test's output"
    print('JupyterLab:', dialog.inner_text())
    dialog.locator('.jp-mod-accept').click()

def click_into(page, i):
    "Put the cursor into cell `i`"
    page.locator('.jp-Notebook-cell').nth(i).locator('.cm-content').click(position=dict(x=5, y=5))

def rewrite(page, i, source):
    "Put other words into cell `i`"
    click_into(page, i)
    page.keyboard.press('Control+A')
    page.keyboard.insert_text(source)

def wait_until(page, i, condition, seconds):
    "Wait until a condition in JavaScript holds of what cell `i` shows, `o`; its value, None where it never came to hold"
    from playwright.sync_api import TimeoutError as TooLong
    code = f'i => {{ const o = ({looks})(document.querySelectorAll(".jp-Notebook-cell")[i]); return {condition} }}'
    try: return page.wait_for_function(code, arg=i, timeout=1e3*seconds, polling=50).json_value()
    except TooLong: return None

def press_run(page, i):
    "Shift+Enter in cell `i`, once more where nothing begins: a question that vanishes can take the cursor with it"
    for _ in range(2):
        click_into(page, i)
        page.keyboard.press('Shift+Enter')
        if wait_until(page, i, 'o.prompt!="[ ]:"', look_s): return

def run_cell(page, i, cell):
    "Shift+Enter in a code cell, and what is wrong with what comes of it, judged by what was committed with the cell"
    wants_bar = bool(re.search(r'(?<!def )\bsweep\(', cell.source))
    n_figures = sum('image/png' in o.get('data', {}) for o in cell.outputs)
    press_run(page, i)
    if wants_bar and not wait_until(page, i, f'o.prompt=="[*]:" ? o.n_bars && "seen" : {done}', cell_s)=='seen': yield 'no progress bar while it ran'
    if not wait_until(page, i, done, cell_s): return (yield f'not done after {cell_s} s')
    wait_until(page, i, f'o.complaints.length || o.n_outputs>={bool(cell.outputs):d} && o.n_figures>={n_figures}', look_s)
    seen = page.locator('.jp-Notebook-cell').nth(i).evaluate(looks)
    yield from (f'it says: {o.splitlines()[-1]}' for o in seen['complaints'])
    if cell.outputs and not seen['n_outputs']: yield 'no output'
    if seen['n_figures']!=n_figures: yield f'{seen["n_figures"]} figures are painted, not {n_figures}'
    if wants_bar and seen['n_full_bars']!=1: yield f'{seen["n_full_bars"]} full progress bars, not 1'
    if n_figures or wants_bar: shoot(page, i)

def shoot(page, i):
    "Keep a picture of the page as it shows cell `i`"
    page.locator('.jp-Notebook-cell').nth(i).locator('.jp-Cell-outputWrapper').scroll_into_view_if_needed()
    page.screenshot(path=shots/f'{page.url.split("?")[0].split("/")[-1].removesuffix(".ipynb")}-cell-{i+1:02}.png')

def run_notebook(page, nb):
    "Every cell from the top; what went wrong, by the cell's number"
    found = []
    for i,cell in enumerate(nb.cells):
        if cell.cell_type!='code':
            page.keyboard.press('Shift+Enter')       # on to the next one
            continue
        found += [(i+1, o) for o in run_cell(page, i, cell)]
    return found

@pytest.fixture(scope='module')
def shots_folder(browser):
    "Pictures of this run only"
    shutil.rmtree(shots, ignore_errors=True)
    shots.mkdir(parents=True)


# ---- the tests

def test_make_lab(server):
    "JupyterLab answers on 127.0.0.1 alone, opens the labs, and only to whoever has its token"
    labs = f'{server.base}/api/contents/runs/labs'
    assert server.said_port==server.port
    assert [status(f'{labs}{o}') for o in ('', '?token=wrong', f'?token={server.token}')]==[403, 403, 200]
    pids = {server.pid, *(o.pid for o in psutil.Process(server.pid).children(recursive=True))}   # some end meanwhile
    assert {o.laddr.ip for o in psutil.net_connections('inet') if o.pid in pids and o.status==psutil.CONN_LISTEN}=={'127.0.0.1'}

smaller = dict(larger="['cnn_medium']", repeats='1', max_s='.2')

def smaller_parameters(source):
    "The cell as a student in a hurry rewrites it"
    for k,v in smaller.items():
        source, n = re.subn(rf'^({k}: [^=]+= ).*?(?=  #|$)', lambda m: m[1]+v, source, flags=re.M)
        assert n==1, k
    return source

def test_lab_01(page, server, shared_tree):
    path = 'nbs/labs/01_cpu_vs_gpu.ipynb'
    nb = nbformat.read(shared_tree/path, 4)
    i = next(i for i,o in enumerate(nb.cells) if 'parameters' in o.metadata.get('tags', []))
    open_notebook(page, server, path)
    page.screenshot(path=shots/'01_cpu_vs_gpu-open.png')
    rewrite(page, i, smaller_parameters(nb.cells[i].source))
    try: assert run_notebook(page, nb)==[]
    finally: page.screenshot(path=shots/'01_cpu_vs_gpu-end.png')
    page.keyboard.press('Control+s')
    kept = saved(page, shared_tree/path)
    counts = [o.execution_count for o in kept]
    assert None not in counts and counts==sorted(set(counts))        # in order; a number is left out where Shift+Enter was pressed again
    assert smaller_parameters(nb.cells[i].source) in [o.source for o in kept]

def saved(page, path):
    "Code cells of the file, as soon as the last one is there with its number"
    for _ in range(10*look_s):
        kept = [o for o in nbformat.read(path, 4).cells if o.cell_type=='code' and o.source]
        if kept[-1].execution_count: break
        page.wait_for_timeout(100)
    return kept
