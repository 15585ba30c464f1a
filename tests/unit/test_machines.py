"A class's records on one page: from files of any kind to what a browser shows"
import json
import re
import shutil

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from click.testing import CliRunner

from gpubench.cli import cli
from gpubench.show.compare import add_prices, load_records
from gpubench.show.machines import Comparison, price_runs, read_runs, write_comparison
from gpubench.show.plot import plot_phases, plot_price_speed
from gpubench.ground.record import FIELDS
from made_up_records import HOSTILE, PARTS, folder_of, visits

CHROME = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)


def class_of(tmp_path, n=20, **kw):
    "Folders of a class: alike machines, some with a GPU of another kind"
    return [folder_of(tmp_path/f'student{i:02}', visits((16, 64), ['cuda'], machine=f'm{i%3}', gpu=f'Made-up GPU {i%3}', epoch_s=1+.1*i,
                                                        images_per_s=1408/(1+.1*i), **PARTS | kw)) for i in range(n)]


@pytest.mark.slow
def test_a_class_of_twenty_is_one_table_and_nobody_is_pooled(tmp_path):
    folders = class_of(tmp_path)
    said = CliRunner().invoke(cli, ['compare', *map(str, folders), '--json', '--base', 'student03', '--out', str(tmp_path/'class.html')])
    rows = pd.DataFrame(json.loads(said.stdout))
    assert len(rows)==40 and set(rows.n_visits)=={3} and rows.run.nunique()==20
    assert (tmp_path/'class.html').read_text().count('<tbody>')==5            # two sizes, their phases, the machines


def test_folders_of_one_name_are_three_runs(tmp_path):
    runs = read_runs([folder_of(tmp_path/o/'run (1)', visits((16,), ['cpu'])) for o in 'abc'])
    assert [*runs]==['run (1)', 'run (1) (2)', 'run (1) (3)']


def test_prices_are_for_equal_machines_only(tmp_path):
    runs = read_runs(class_of(tmp_path, 4))
    assert price_runs(runs, {'gpu 1': .5})['student01'].price_per_h.tolist()==[.5]*6
    with pytest.raises(ValueError, match='unequal machines'): price_runs(runs, {'made-up gpu': .5})
    said = CliRunner().invoke(cli, ['compare', *map(str, class_of(tmp_path, 3)), '--price', '2.5'])
    assert said.exit_code==2 and 'unequal machines' in said.stderr


def test_a_price_that_no_run_uses_is_refused(tmp_path):
    both = [folder_of(tmp_path/o, visits((64,), ['cpu'], machine=None)) for o in 'ab']
    said = CliRunner().invoke(cli, ['compare', *map(str, both), '--price', 'gpu=2.5'])
    assert said.exit_code==2 and "No run uses the price of 'gpu'; there are: a, all, b, cpu" in said.stderr
    with pytest.raises(ValueError, match="No run uses the price of 'all'"): price_runs(read_runs(both), dict(cpu=1., all=2.))
    for o in ('nan', 'none'):
        with pytest.raises(ValueError, match=f'No run has {o!r}'): add_prices(load_records(both), {o: 1.})


def timed(s, **kw): return [o | dict(epoch_s=x, images_per_s=1408/x) | kw for o,x in zip(visits((64,), ['cpu'], n=len(s)), s)]


def test_a_class_hears_of_noise_of_equal_machines_and_of_an_order_that_is_open(tmp_path):
    runs = dict(laptop=timed([1., 1.1, 1.2]), desk=timed([.5, .9, 1.3], visit=9), server=timed([3., 3.1, 3.2], machine='m2'))
    found = Comparison(runs, 'laptop', dict(laptop=1., desk=1., server=.01))
    page = write_comparison(found, tmp_path/'class.html').read_text()
    for text in (str(found), page):
        assert 'In 1 of 3 configurations, visits of the same thing differ by more than a factor of 2.' in text and 'The widest: 2.6 times at made-up net on made-up images, batch 64 on desk' in text
        assert 'The same machine as laptop · CPU, or one just like it, so each ratio is how much two runs differ: desk · CPU.' in text
    assert 'no machine is shown to be the fastest. By the medians it is desk · CPU, but that is not distinguishable from laptop · CPU.' in page
    assert 'an image costs least on server · CPU, 0.0061 a million.' in page
    clear = write_comparison(Comparison(runs | dict(desk=timed([.5, .51, .52], machine='m3')), 'laptop'), tmp_path/'clear.html').read_text()
    assert re.search(r'desk · CPU is the fastest, 2\.\d+ \([\d.]+ to [\d.]+\) times as fast as laptop · CPU\.', clear)


def test_a_machine_has_one_color_in_all_figures(tmp_path):
    runs = {o: timed([1.+i, 1.1+i], machine=o, **PARTS) for i,o in enumerate(('slow', 'a', 'b'))}
    runs['slow'] = timed([9., 9.1], machine='slow', **PARTS)
    found = Comparison(runs, prices=dict.fromkeys(runs, 1.))
    rows = pd.concat(df.assign(run=o) for o,df in found.visits(found.rows).items())
    both = plot_price_speed(found.speeds(found.rows)), plot_phases(rows, by='run', number_of=found.number_of)
    styles = [{o.get_label(): (o.get_color(), o.get_marker()) for o in ax.lines if not o.get_label().startswith('_')} for ax in both]
    plt.close('all')
    assert styles[0]==styles[1] and {*styles[0]}=={'slow · CPU', 'a · CPU', 'b · CPU'}


BROKEN = {'binary': '\x00\x01\xff'*99, 'list': '[1, 2]\n', 'empty': '', 'another schema': '{"schema": 99}\n', 'web page': '<html><script>alert(1)</script>\n',
          'wrong types': json.dumps(dict(schema=3, settings=3, bs=[1], gpu={'a': 1}, status=7))+'\n'}


@pytest.mark.parametrize('name', BROKEN)
@pytest.mark.filterwarnings('ignore')
def test_what_is_no_file_of_records_is_refused_in_words(tmp_path, name):
    good = class_of(tmp_path, 2)
    (tmp_path/'odd.jsonl').write_bytes(BROKEN[name].encode('latin-1', 'replace'))
    said = CliRunner().invoke(cli, ['compare', *map(str, good), str(tmp_path/'odd.jsonl')])
    assert said.exit_code==2 and 'odd: ' in said.stderr and len(said.stderr)<1000 and not isinstance(said.exception, (TypeError, KeyError))


@pytest.mark.parametrize('device', [None, '', 'missing'])
def test_a_record_without_a_device_stops_no_page(tmp_path, device):
    odd = [o | dict(device=device) for o in visits((64,), ['cuda'])]
    if device=='missing': odd = [{k: v for k,v in o.items() if k!='device'} for o in odd]
    good = visits((64,), ['cuda'])
    for runs in (dict(a=good, b=odd), dict(a=odd, b=good), dict(a=good+odd[:1], b=good)):
        page = write_comparison(Comparison(runs), tmp_path/'x.html')
        assert page.read_text().count('1: the base')==1


@pytest.mark.parametrize('epoch_s', [1e-320, 5e-324, 1e300])
def test_a_time_that_no_clock_gives_is_no_time(tmp_path, epoch_s):
    odd = [o | dict(epoch_s=epoch_s, images_per_s=None) for o in visits((64,), ['cuda'])]
    rows = Comparison(dict(a=visits((64,), ['cuda']), b=odd)).rows.set_index('run')
    assert pd.isna(rows.speedup['b']) and 'nothing was timed' in rows.verdict['b']


@pytest.fixture(scope='module')
def tab():
    "A page of a real browser, which closes dialogs; `seen` is what it was asked to show or to load"
    api = pytest.importorskip('playwright.sync_api', reason='No browser was tried: playwright is missing. It is in the extra `dev`.')
    if not CHROME: pytest.skip('No browser was tried: no Chromium runs here. On Debian: sudo apt-get install chromium')
    with api.sync_playwright() as p:
        page = p.chromium.launch(executable_path=CHROME, args=['--no-sandbox']).new_page()
        page.seen = []
        page.on('dialog', lambda o: (page.seen.append(o.message), o.dismiss()))
        page.on('request', lambda o: page.seen.append(o.url) if not o.url.startswith(('file:', 'data:')) else None)
        yield page
        page.context.browser.close()


def looks(tab, path):
    "What the browser makes of a page: scripts and other active parts, images, images that are broken, the text"
    tab.seen.clear()
    tab.goto(path.as_uri())
    tab.wait_for_timeout(200)
    active = tab.evaluate("""[...document.querySelectorAll('*')].filter(o => o.localName=='script' || o.localName=='iframe'
        || o.getAttributeNames().some(a => a.startsWith('on')) || /^javascript:/i.test(o.getAttribute('href'))).map(o => o.outerHTML)""")
    images = tab.evaluate("[...document.images].map(o => o.naturalWidth>0)")
    return tab.seen + active, images, tab.inner_text('body')


TEXTS = [o.name for o in FIELDS.values() if o.dtype is str and o.name not in ('status', 'device', 'time_utc')]


def hostile_class(tmp_path):
    "Folders in which every text, name and setting of a record is hostile, and one line each is no record"
    texts = dict.fromkeys(TEXTS, HOSTILE) | {HOSTILE: HOSTILE, 'own': HOSTILE, 'settings': ['own', HOSTILE]}
    for i,(name,bad) in enumerate(BROKEN.items()):
        folder = folder_of(tmp_path/f'{i}<script>alert(3)<', visits((64,), ['cuda', 'cpu'], **PARTS | texts | dict(n_params=i//4)))
        if name!='another schema':                       # such a file is refused as a whole
            with (folder/'records.jsonl').open('ab') as f: f.write(bad.encode('latin-1', 'replace'))
        yield folder


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_a_browser_runs_no_script_of_a_class_page(tmp_path, tab):
    folders = [*hostile_class(tmp_path)]
    said = CliRunner().invoke(cli, ['compare', *map(str, folders), '--price', '2.5', '--out', str(tmp_path/'class.html')])
    assert said.exit_code==0, said.output
    active, images, shown = looks(tab, tmp_path/'class.html')
    assert active==[] and images and all(images)
    assert HOSTILE in shown and '7<script>alert(3)<' in shown and '49' not in re.findall(r'\{\{ \d+', shown)      # all of it is text
    assert 'Not the same work' in shown and shown.count('parameters')>=3       # names in warnings, too


@pytest.mark.slow
def test_a_browser_shows_hostile_titles_names_and_prices_as_text(tmp_path, tab):
    runs = {HOSTILE: visits((64,), ['cuda'], **PARTS), HOSTILE+'2': visits((64,), ['cuda'], n_params=3, **PARTS), 'third': visits((64,), **PARTS)}
    found = Comparison(runs, prices={HOSTILE: 1., HOSTILE+'2': 2.})
    active, images, shown = looks(tab, write_comparison(found, tmp_path/'class.html', title=HOSTILE))
    assert active==[] and len(images)==2 and all(images) and HOSTILE in shown
