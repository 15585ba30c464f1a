"A class's records on one page: from files of any kind to what a browser shows"
import json
import re
import shutil

import pandas as pd
import pytest
from click.testing import CliRunner

from gpubench.cli import cli
from gpubench.machines import Comparison, price_runs, read_runs, write_comparison
from made_up_records import HOSTILE, PARTS, folder_of, visits

CHROME = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)


def class_of(tmp_path, n=20, **kw):
    "Folders of a class: alike machines, some with a GPU of another kind"
    return [folder_of(tmp_path/f'student{i:02}', visits((16, 64), ['cuda'], machine=f'm{i%3}', gpu=f'Made-up GPU {i%3}', epoch_s=1+.1*i,
                                                        images_per_s=1408/(1+.1*i), **PARTS | kw)) for i in range(n)]


def test_a_class_of_twenty_is_one_table_and_nobody_is_pooled(tmp_path):
    folders = class_of(tmp_path)
    said = CliRunner().invoke(cli, ['compare', *map(str, folders), '--json', '--base', 'student03', '--out', str(tmp_path/'class.html')])
    rows = pd.DataFrame(json.loads(said.stdout))
    assert len(rows)==40 and set(rows.n_visits)=={3} and rows.run.nunique()==20
    assert (tmp_path/'class.html').read_text().count('<tbody>')==5            # two sizes, their phases, the machines


def test_prices_are_for_equal_machines_only(tmp_path):
    runs = read_runs(class_of(tmp_path, 4))
    assert price_runs(runs, {'gpu 1': .5})['student01'].price_per_h.tolist()==[.5]*6
    with pytest.raises(ValueError, match='unequal machines'): price_runs(runs, {'made-up gpu': .5})
    said = CliRunner().invoke(cli, ['compare', *map(str, class_of(tmp_path, 3)), '--price', '2.5'])
    assert said.exit_code==2 and 'unequal machines' in said.stderr


BROKEN = {'deep': '{"schema": 3, "a": ' + '['*900 + ']'*900 + '}\n', 'long': json.dumps(dict(schema=3, cpu='x'*2**21))+'\n',
          'binary': '\x00\x01\xff'*99, 'list': '[1, 2]\n', 'empty': '', 'another schema': '{"schema": 99}\n', 'web page': '<html><script>alert(1)</script>\n',
          'wrong types': json.dumps(dict(schema=3, settings=3, bs=[1], gpu={'a': 1}, status=7))+'\n'}


@pytest.mark.parametrize('name', BROKEN)
@pytest.mark.filterwarnings('ignore')
def test_what_is_no_file_of_records_is_refused_in_words(tmp_path, name):
    good = class_of(tmp_path, 2)
    (tmp_path/'odd.jsonl').write_bytes(BROKEN[name].encode('latin-1', 'replace'))
    said = CliRunner().invoke(cli, ['compare', *map(str, good), str(tmp_path/'odd.jsonl')])
    assert said.exit_code==2 and 'odd: ' in said.stderr and len(said.stderr)<1000 and not isinstance(said.exception, (TypeError, KeyError))


def test_a_browser_runs_no_script_from_a_record(tmp_path):
    if not CHROME: pytest.skip('no Chromium here')
    sync_api = pytest.importorskip('playwright.sync_api')
    texts = dict.fromkeys('model dataset cpu gpu machine loader precision error os torch'.split(), HOSTILE)
    runs = {HOSTILE: visits((64,), ['cuda'], **PARTS | texts), HOSTILE+'2': visits((64,), ['cuda'], n_params=3, **PARTS | texts), 'third': visits((64,), **PARTS | texts)}
    page = write_comparison(Comparison(runs, prices={HOSTILE: 1., HOSTILE+'2': 2.}), tmp_path/'class.html', title=HOSTILE)
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROME, args=['--no-sandbox'])
        tab, seen = browser.new_page(), []
        tab.on('dialog', lambda o: (seen.append(o.message), o.dismiss()))
        tab.on('request', lambda o: seen.append(o.url) if not o.url.startswith(('file:', 'data:')) else None)
        tab.goto(page.as_uri())
        counts = tab.evaluate("['script', 'img[src=x]', '[onerror]', 'img'].map(o => document.querySelectorAll(o).length)")
        broken = tab.evaluate("[...document.images].filter(o => !o.naturalWidth).length")
        shown = tab.inner_text('body')
        browser.close()
    assert (seen, counts[:3], broken) == ([], [0, 0, 0], 0) and counts[3]>=1
    assert '<script>alert(1)</script>' in shown and '49' not in re.findall(r'\{\{ \d+', shown)       # as text
