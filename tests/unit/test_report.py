"The page of a run, from records that are made up"
import json
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote

import matplotlib
import matplotlib.image as mpimg
import pytest
from fastai.test_utils import synth_learner
from made_up_records import HOSTILE, PARTS, failed, folder_of, visit, visits

from gpubench import gain
from gpubench.show.compare import compare, comparison_text, load_records
from gpubench.show.findings import add_labels, findings
from gpubench.show.report import LAB_QUESTIONS, render_page, summary_text, write_report


class Page(HTMLParser):
    "Tags with their attributes, text, and whether the tags close in order"
    VOID = {'meta', 'link', 'img', 'br', 'source'}
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
        if not self.open or self.open[-1]!='style': self.text += data.replace('\xa0', ' ')
    def all(self, tag): return [attrs for o,attrs in self.tags if o==tag]


def page_of(path, rows, **kw): return Page(write_report(folder_of(path, rows), **kw).read_text(encoding='utf-8'))


def test_what_the_new_fields_say_stands_on_the_page(tmp_path):
    new = dict(PARTS, step_ms=15., twin=False, not_tight=True, half_width_frac=.08, process_s=2., visit_s=9., epoch_check_frac=-.3,
               epoch_whole_s=1., transform_ms=None)
    rows = [o | new | dict(trial_id=f"{o['device']}{o['bs']}", step_ms=10+o['bs']/100) for o in visits((16, 32, 64, 128))]
    twins = [o | dict(twin=True) for o in rows if o['bs']==64 and o['device']=='cpu']
    page = page_of(tmp_path/'run', rows + twins)
    for o in ('visited twice in each round (batch 64 on the CPU)', 'of a step is waiting for data (5 ms)', 'By a fit', 'A whole epoch took',
              'before their median step was known as precisely', 'measured, at '):
        assert o in page.text, o
    assert len(page.all('details'))==5 and not any('open' in o for o in page.all('details'))             # folded
    assert page.balanced and 'optimizer (ms)' in page.text and any('Parts of a step on the GPU' in o['alt'] for o in page.all('img'))


def test_the_page_is_the_same_whatever_the_matplotlibrc_says(tmp_path):
    def images(): return [o['src'] for o in page_of(tmp_path/'run', []).all('img')]
    folder_of(tmp_path/'run', visits())
    usual = images()
    for settings in ({'text.usetex': True}, {'text.color': 'white', 'axes.facecolor': 'black', 'lines.color': 'white', 'patch.edgecolor': 'white'},
                     {'svg.fonttype': 'none', 'savefig.transparent': True, 'savefig.bbox': 'tight', 'path.sketch': (1, 100, 2)}, {'backend': 'TkAgg'}):
        with matplotlib.rc_context(settings): assert images()==usual, settings
    assert len(usual)>2


@pytest.mark.parametrize('seed', range(12))
def test_records_with_holes(seed):
    "Any column may be missing and any value unknown"
    rng = random.Random(seed)
    lost = rng.sample(sorted(visit()), rng.randrange(12))
    def hole(row): return {k: None if rng.random()<.15 else v for k,v in row.items() if k not in lost}
    rows = [hole(o) | dict(status=rng.choice(['ok', 'ok', 'oom'])) for o in visits((16, 64, 512))]
    df = add_labels(load_records(rows))
    html, _ = render_page(df, 'holes', figures=False)
    assert Page(html).balanced and 'nan' not in re.sub(r'[a-z]nan|nan[a-z]', '', Page(html).text.lower())
    summary_text(rows)


ODD = [
    dict(trial_id=None), dict(visit=None), dict(visit='first'), dict(twin='yes'), dict(hidden=[1, 2]), dict(losses=dict(a=1)), dict(bs='many'),
    dict(epoch_s='fast'), dict(process_s='no'), dict(not_tight='no'), dict(time_utc='yesterday'), dict(machine=None), dict(n_train=None),
    dict(bs=float('inf')), dict(bs=-3), dict(bs=2.5), dict(epoch_s=-1.), dict(step_ms=-1.), dict(device=None), dict(status=None)]


@pytest.mark.parametrize('change', ODD)
def test_odd_values_break_neither_page_nor_comparison(change):
    rows = visits((16, 64, 256, 512)) + [visit(64) | change]
    assert Page(render_page(add_labels(rows), 'odd', figures=False)[0]).balanced
    comparison_text(compare(rows, visits()))
    summary_text(rows)


def test_odd_values_break_no_figure(tmp_path):
    assert page_of(tmp_path/'run', visits((16, 64, 256, 512)) + [visit(64) | o for o in ODD]).balanced


def test_a_files_name_that_is_no_text(tmp_path):
    folder_of(tmp_path/'run', visits()+[dict(bs=64, status='error', error='caf\udce9.jpg')])
    page = write_report(tmp_path/'run').read_text(encoding='utf-8')
    assert Page(page).balanced and 'caf\\udce9.jpg' in page
    assert summary_text(tmp_path/'run').encode()


def test_no_torch_is_imported():
    code = "import sys, gpubench.show.plot, gpubench.show.report; print([o for o in ('torch', 'fastai') if o in sys.modules])"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip()=='[]'


@pytest.mark.parametrize('junk', [None, 3, 1.5, [1], [None], object(), []])
@pytest.mark.parametrize('door', [load_records, findings, summary_text, write_report, lambda o: compare(o, visits())])
def test_what_is_no_record_is_refused_in_words(door, junk):
    with pytest.raises((ValueError, RuntimeError)) as e: door(junk)
    assert len(str(e.value))>30 and 'could not convert' not in str(e.value)


# ---- the page

def test_the_page_needs_nothing_else(tmp_path):
    page = page_of(tmp_path/'run', visits((16, 64, 256)))
    assert page.balanced
    assert not page.all('script') and not page.all('iframe') and not page.all('object')
    urls = [v for _,attrs in page.tags for k,v in attrs.items() if k in ('src', 'href', 'srcset')]
    assert urls and all(o.startswith(('data:', './')) for o in urls)
    assert {o.get('name') for o in page.all('meta')} >= {'viewport', 'color-scheme'}
    assert "default-src 'none'" in next(o['content'] for o in page.all('meta') if o.get('http-equiv'))
    assert page.all('img') and all(len(o['alt'])>40 for o in page.all('img'))


def test_the_numbers_on_the_page_are_those_of_the_records(tmp_path):
    rows = [visit(64, n=i, epoch_s=o) for i,o in enumerate((.4567, .4444, .5))]
    assert '0.457 (0.444 to 0.5, 75 %)' in page_of(tmp_path/'run', rows).text


def test_figures_are_files_too(tmp_path):
    page_of(tmp_path/'run', visits((16, 64, 256)))
    files = sorted((tmp_path/'run'/'figures').glob('*.png'))
    assert len(files)>=4
    for o in files: assert mpimg.imread(o).shape[1]>=1000


def test_a_second_page_replaces_the_first_and_leaves_others_figures(tmp_path):
    folder = folder_of(tmp_path/'run', visits((16, 64)))
    write_report(folder)
    (folder/'figures'/'mine.png').write_bytes(b'mine')
    n = len(list((folder/'figures').iterdir()))
    write_report(folder)
    assert len(list((folder/'figures').iterdir()))==n and (folder/'figures'/'mine.png').read_bytes()==b'mine'
    assert not list(folder.glob('*.new'))


def test_links_lead_to_files_beside_the_page(tmp_path):
    folder = tmp_path/'run'
    folder.mkdir()
    names = ['#x?.ipynb', '01 lab & more.ipynb', 'javascript:alert(1).ipynb']
    for o in names: (folder/o).write_text('{}')
    links = page_of(folder, visits()).all('a')
    assert [unquote(o['href'].removeprefix('./')) for o in links]==[*names, 'records.jsonl']


def test_everything_from_records_is_escaped(tmp_path):
    names = dict.fromkeys('model dataset gpu cpu os torch loader'.split(), HOSTILE)
    rows = visits((16, 64), **names) + [failed(HOSTILE, 256, error=HOSTILE, model=HOSTILE, machine=HOSTILE)]
    page = page_of(tmp_path/'run', rows)
    assert page.balanced and not page.all('script')
    assert not [attrs for _,attrs in page.tags for k in attrs if k.startswith('on')]
    assert '<script>alert(1)</script>' in page.text and '{{ 7*7 }}' in page.text     # shown as it stands
    assert {o.get('src', '')[:5] for o in page.all('img')}=={'data:'}


def test_an_empty_folder(tmp_path):
    with pytest.raises(RuntimeError, match='no records'): write_report(tmp_path)
    (tmp_path/'records.jsonl').touch()
    with pytest.raises(RuntimeError, match='no visit has ended yet'): write_report(tmp_path)
    assert not (tmp_path/'report.html').exists()


MANY = [o | PARTS | dict(step_ms=15.) for m in 'abcde' for o in visits((16, 64, 256, 512), model=m)] + [failed(model=m) for m in 'abcde']
def test_the_questions_are_those_of_the_labs(repo):
    heads = [json.loads(o.read_text(encoding='utf-8'))['cells'][0]['source'][0] for o in sorted((repo/'nbs/labs').glob('[0-9]*.ipynb'))]
    titles = dict(o.strip('# \n').split(' · ') for o in heads)
    assert LAB_QUESTIONS=={k: v for k,v in titles.items() if k not in ('12', '13')}  # which have no visits


def test_settings_that_nobody_turned_are_not_listed():
    html = render_page(add_labels(visits((16, 64), ['cpu'], size=28)), 'x', figures=False)[0]
    assert '<p class="soft">28 px</p>' in html and 'memory loader' not in html


def test_each_finding_stands_on_the_page(tmp_path):
    page, found = Page(render_page(add_labels(MANY), 'many', figures=False)[0]), findings(MANY)
    assert page.balanced
    for o in found: assert page.text.count(o.text.removeprefix(f'{o.workload}: '))>=1, o


def test_two_networks_under_one_name_are_never_pooled(tmp_path):
    rows = visits((16, 64), ['cuda'], model='mine:make', model_source='a') + visits((16, 64), ['cuda'], model='mine:make', model_source='b')
    text = page_of(tmp_path/'run', rows).text
    assert 'mine:make (version 1) on made-up images' in text and 'mine:make (version 2) on made-up images' in text
    assert '12 visits of 4 configurations' in text and 'busy with something else' not in text


def test_a_folder_that_cannot_be_written_to(tmp_path):
    folder = folder_of(tmp_path/'run', visits())
    (folder/'figures').write_text('a file where a folder should be')
    with pytest.raises(RuntimeError, match='cannot be written .* Make the folder writable'): write_report(folder)


@pytest.mark.parametrize('rows, says', [
    ([visit()], 'Only one run exists'), (visits(devices=['cpu']), 'Only a CPU was measured'),
    ([failed(error='CUDA out of memory.')], 'CUDA out of memory.'), (visits(n=1), 'Each configuration has one visit'),
    (visits(accuracy=None, epoch_s=float('nan')), 'The fastest of 16 to 64'), (visits(devices=['cuda']), 'of the GPU'),
    ([dict(status='ok')], 'this machine'), ([dict(bs=8, y=3.)], 'this run')])
def test_every_kind_of_run_has_a_page(tmp_path, rows, says):
    page = page_of(tmp_path/'run', rows)
    assert page.balanced and says in page.text


def test_two_machines_on_one_page(tmp_path):
    other = visits(machine='m2', gpu='Other made-up GPU', cpu='Other made-up CPU', time_utc='2000-01-05T12:00:00+00:00')
    page = page_of(tmp_path/'run', visits() + other)
    assert 'The machines' in page.text and '1 January 2000, 00:00 to 5 January 2000, 12:00 UTC' in page.text
    assert re.search('Other made-up GPU against (Made-up|Other made-up) CPU, 4 cores', page.text)


# ---- in a browser, where there is one

CHROME = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
LOOK = """<iframe id=f style="border:0;width:{width}px;height:900px" src="{page}"></iframe><pre id=seen></pre><script>
f.onload = () => {{ const d = f.contentDocument, imgs = [...d.images]
  const sizes = [...d.querySelectorAll('p,li,td,th,dd')].map(o => parseFloat(getComputedStyle(o).fontSize))
  seen.textContent = JSON.stringify({{ wide: d.documentElement.scrollWidth, n: imgs.length, small: Math.min(...sizes),
    broken: imgs.filter(o => !o.naturalWidth).length }}) }}
</script>"""


needs_chrome = pytest.mark.skipif(not CHROME, reason='no Chromium here')

def on_screen(page, width, tmp_path):
    "How wide a page is on a screen, its smallest text, its figures"
    look = tmp_path/'look.html'
    look.write_text(LOOK.format(width=width, page=page.as_uri()))
    flags = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-background-networking',
             '--allow-file-access-from-files', '--virtual-time-budget=5000']
    out = subprocess.run([CHROME, *flags, f'--user-data-dir={tmp_path/"profile"}', '--dump-dom', look.as_uri()],
                         capture_output=True, text=True, timeout=120).stdout
    return json.loads(re.search(r'<pre id="seen">(.*?)</pre>', out)[1])

@pytest.mark.slow
@needs_chrome
@pytest.mark.parametrize('width', [360, 390, 768, 1280])
def test_nothing_sticks_out_of_the_screen(tmp_path, width):
    rows = visits((16, 64, 256)) + [failed('error', 512, error='a reason without a break: '+'x'*300)]
    page = write_report(folder_of(tmp_path/('a-folder-with-a-long-name-'*3), rows))
    found = on_screen(page, width, tmp_path)
    assert found['wide']<=width, 'the page scrolls sideways'
    assert found['broken']==0 and found['n']>=4
    assert found['small']>=12

@pytest.mark.slow
@needs_chrome
def test_the_page_of_gain_fits_a_phone(tmp_path, monkeypatch):
    monkeypatch.setattr('gpubench.show.gain.TIMES_S', dict(cpu=(.2, .1)))
    found = on_screen(gain(synth_learner(), 2, 'fit').to_html(tmp_path/'gain.html', ['a sentence', 'x'*300]), 360, tmp_path)
    assert found['wide']<=360 and found['small']>=12


def test_a_frame_is_no_folder():
    with pytest.raises(ValueError, match='^A DataFrame is no place for records. Use a folder'): write_report(load_records(visits()))
