"Comparisons, findings and pages, from records that are made up"
import math
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from unittest.mock import patch

import pytest
from made_up_records import HOSTILE, PARTS, failed, folder_of, visit, visits

from gpubench import compare, ratio_ci, report
from gpubench.show.findings import findings
from gpubench.show.compare import load_records
from gpubench.ground import stats


class Page(HTMLParser):
    "Tags with their attributes, text, and whether the tags close in order"
    VOID = {'meta', 'link', 'img', 'br'}
    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.text, self.balanced = [], [], '', True
        self.feed(html)
        self.balanced = self.balanced and not self.open
    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID: self.open.append(tag)
    def handle_endtag(self, tag):
        if not self.open or self.open.pop()!=tag: self.balanced = False
    def handle_data(self, data):
        if not self.open or self.open[-1]!='style': self.text += data
    def all(self, tag): return [attrs for o,attrs in self.tags if o==tag]

def page_of(tmp_path, *runs, **kw): return Page(report(*runs, out=tmp_path, **kw).read_text(encoding='utf-8'))


# ---- comparisons

def test_sides_are_paired_within_the_rounds_of_one_sweep():
    "The CPU's and the GPU's steps are twice as long in the second round; on another machine, that is no pair"
    slow = {0: 1., 1: 2., 2: 1.1}
    rows = [visit(64, d, n, epoch_s=slow[n]*(4 if d=='cpu' else 1)*(1+.01*n*(d=='cpu'))) for n in slow for d in ('cpu', 'cuda')]
    cpu, gpu = rows[::2], rows[1::2]
    one = compare(cpu, gpu).iloc[0]
    other = compare(cpu, [o | dict(machine='madeup02') for o in gpu]).iloc[0]
    r = ratio_ci([o['epoch_s'] for o in cpu], [o['epoch_s'] for o in gpu], paired=True)
    assert [one.speedup, one.lo, one.hi]==pytest.approx([r.mid, r.lo, r.hi]) and other.hi/other.lo>3*one.hi/one.lo
    def swept(rows, sweep_id): return [o | dict(sweep_id=sweep_id, round=o['visit']) for o in rows]
    set_back = [o | dict(time_utc='1999-01-01') for o in swept(gpu, 'a')][::-1]           # a clock decides nothing
    assert [compare(swept(cpu, 'a'), o).hi[0] for o in (set_back, swept(gpu, 'b'))]==pytest.approx([one.hi, other.hi])

@pytest.mark.parametrize('change, of', [
    (dict(n_images=700, images_per_s=None), 'images_per_s'), (dict(n_params=9), 'epoch_s'),
    (dict(dtype_seen='bfloat16'), 'epoch_s'), (dict(accuracy=.5), 'epoch_s')])
def test_other_work_is_named(change, of):
    a, b = visits((64,), ['cpu'], dtype_seen='float32'), visits((64,), ['cuda'], **dict(dtype_seen='float32') | change)
    row = compare(a, b).iloc[0]
    assert not row.same_work and row.warning and row.ratio_of==of and row.speedup>0

@pytest.mark.parametrize('name', ['graph', 'n_workers', 'hidden'])
def test_none_true_and_1_stay_apart(name):
    "Also settings of a user's own function"
    def run(x, device): return visits((64,), [device], **{name: x}, settings=[name])
    for a in (None, True, 1):
        for b in (None, True, 1):
            if value_differs := stats.value_text(a)!=stats.value_text(b):
                with pytest.raises(ValueError, match=name): compare(run(a, 'cpu'), run(b, 'cuda'))
            assert value_differs or len(compare(run(a, 'cpu'), run(b, 'cuda')))==1

@pytest.mark.parametrize('broken', [[failed()], visits((64,), ['cuda'], epoch_s=None, images_per_s=None)])
def test_a_broken_side_has_no_ratio(broken):
    row = compare(visits((64,), ['cpu']), broken).iloc[0]
    assert math.isnan(row.speedup) and row.verdict=='no ratio'

# ---- records of any kind

@pytest.mark.parametrize('seed', range(4))
def test_records_with_holes(seed, tmp_path):
    "Any column may be missing and any value unknown"
    rng = random.Random(seed)
    lost = rng.sample(sorted(visit()), rng.randrange(12))
    def hole(row): return {k: None if rng.random()<.15 else v for k,v in row.items() if k not in lost}
    rows = [hole(o) | dict(status=rng.choice(['ok', 'ok', 'oom'])) for o in visits((16, 64, 512))]
    with patch('gpubench.show.report.figures', return_value=[]): page = page_of(tmp_path, rows)
    assert page.balanced and 'nan' not in re.sub(r'[a-z]nan|nan[a-z]', '', page.text.lower())

ODD = [
    dict(trial_id=None), dict(visit=None), dict(visit='first'), dict(twin='yes'), dict(hidden=[1, 2]), dict(losses=dict(a=1)),
    dict(epoch_s='fast'), dict(time_utc='yesterday'), dict(machine=None), dict(n_train=None), dict(energy_j_per_image='much'),
    dict(bs=2.5), dict(epoch_s=-1.), dict(step_ms=-1.), dict(device=None), dict(status=None), dict(images_per_s=float('inf')), dict(n_images=0)]

@pytest.mark.parametrize('change', ODD)
def test_odd_values_break_no_page(change, tmp_path):
    assert page_of(tmp_path, visits((16, 64, 256)) + [visit(64) | change]).balanced

@pytest.mark.parametrize('rows, says', [
    ([visit()], 'no interval'), ([failed(error='CUDA out of memory.')], 'CUDA out of memory.'), (visits(devices=['cuda']), 'batch 64'),
    ([dict(status='ok', device='cpu')], '1 visits'), ([dict(bs=8, y=3., device='cpu')], '1 visits')])
def test_every_kind_of_run_has_a_page(tmp_path, rows, says):
    page = page_of(tmp_path, rows)
    assert page.balanced and says in page.text

@pytest.mark.parametrize('junk', [None, 3, [1], [None], object(), []])
@pytest.mark.parametrize('door', [load_records, findings, report, compare])
def test_what_is_no_record_is_refused_in_words(door, junk):
    with pytest.raises((ValueError, RuntimeError), match='record'): door(junk)

# ---- the page

def test_the_page_needs_nothing_else(tmp_path):
    page = page_of(tmp_path, visits((16, 64, 256), **PARTS))
    assert page.balanced and len(page.all('img'))>=3
    assert not page.all('script') and not page.all('iframe') and not page.all('object')
    assert all(v.startswith('data:') for _,attrs in page.tags for k,v in attrs.items() if k in ('src', 'href'))
    assert "default-src 'none'" in next(o['content'] for o in page.all('meta') if o.get('http-equiv'))
    assert all(o['alt'] for o in page.all('img'))

def test_the_numbers_on_the_page_are_those_of_the_records(tmp_path):
    rows = [visit(64, 'cuda', i, epoch_s=o, energy_j_per_image=.5) for i,o in enumerate((.4567, .4444, .5))]
    text = page_of(tmp_path, dict(here=rows), prices=dict(here=3600.)).text
    assert '0.457 (0.444 to 0.5, 75 %)' in text and '704' in text and '46.7' in text           # energy of an epoch, price of a million images
    bare = page_of(tmp_path, visits()).text.split('How to read')[0]
    assert 'epoch (J)' not in bare and 'price' not in bare

TEXTS = ('trial_id machine error unverified sweep_id dataset model labels loader precision all_reduce classes split dtype_seen '
         'cpu gpu os torch driver env_vars').split()

def hostile():
    texts = dict.fromkeys(TEXTS, HOSTILE) | {'own': HOSTILE, 'settings': ['own', HOSTILE]}
    return {HOSTILE: visits((64, 16), **PARTS | texts), HOSTILE+'2': [*visits((64,), n_params=3, **PARTS | texts), failed(**texts)]}

@pytest.mark.filterwarnings('ignore')
def test_everything_from_records_is_escaped(tmp_path):
    page = page_of(tmp_path, hostile(), title=HOSTILE)
    assert page.balanced and not page.all('script') and not [attrs for _,attrs in page.tags for k in attrs if k.startswith('on')]
    assert '<script>alert(1)</script>' in page.text and '{{ 7*7 }}' in page.text     # shown as it stands
    assert {o.get('src', '')[:5] for o in page.all('img')}=={'data:'}

def test_what_is_in_backticks_is_code(tmp_path):
    page = page_of(tmp_path, visits((64, 16), ['cuda'], optimizer_ms=9., step_ms=10.))
    assert page.all('code') and '`' not in page.text

def test_a_page_does_not_name_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', '/home/somebody')
    rows = [o | dict(dataset='/home/somebody/photos') for o in visits()]
    text = page_of(tmp_path, rows).text
    assert '~/photos' in text and 'somebody' not in text

def test_where_the_page_goes(tmp_path):
    folder = folder_of(tmp_path/'run', visits())
    (tmp_path/'class.jsonl').write_bytes((folder/'records.jsonl').read_bytes())
    found = [report(folder), report(tmp_path/'class.jsonl'), report(folder, out=tmp_path/'there'), report(folder, out=tmp_path/'my.html')]
    assert [str(o.relative_to(tmp_path)) for o in found]==['run/report.html', 'class_report.html', 'there/report.html', 'my.html']
    with pytest.raises(RuntimeError, match='cannot be written'): report(folder, out=tmp_path/'my.html'/'x')
    (tmp_path/'empty').mkdir()
    with pytest.raises(RuntimeError, match='no records'): report(tmp_path/'empty')

def test_no_torch_is_imported():
    code = "import sys, gpubench.show.plot, gpubench.show.report; print([o for o in ('torch', 'fastai') if o in sys.modules])"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip()=='[]'

# ---- in a browser, where there is one

CHROME = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)

@pytest.fixture(scope='module')
def tab():
    "A page of a real browser"
    api = pytest.importorskip('playwright.sync_api', reason='No browser was tried: playwright is missing. It is in the extra `dev`.')
    if not CHROME: pytest.skip('No browser was tried: no Chromium runs here. On Debian: sudo apt-get install chromium')
    with api.sync_playwright() as p:
        page = p.chromium.launch(executable_path=CHROME, args=['--no-sandbox']).new_page()
        yield page
        page.context.browser.close()

SEEN = """() => ({wide: document.documentElement.scrollWidth, images: [...document.images].map(o => o.naturalWidth>0),
  small: Math.min(...[...document.querySelectorAll('p,li,td,th,dd')].map(o => parseFloat(getComputedStyle(o).fontSize)))})"""

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('width', [360, 1280])
def test_a_browser_shows_hostile_records_as_text_on_any_screen(tmp_path, tab, width):
    said = []
    tab.on('dialog', lambda o: (said.append(o.message), o.dismiss()))
    tab.set_viewport_size(dict(width=width, height=900))
    tab.goto(report(hostile(), title=HOSTILE, prices={HOSTILE: 1.}, out=tmp_path).as_uri())
    page = tab.evaluate(SEEN)
    assert said==[] and len(page['images'])>=3 and all(page['images'])
    assert page['wide']<=width and page['small']>=12 and HOSTILE in tab.inner_text('body')
