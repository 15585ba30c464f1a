"""The web site, built from a copy of the checkout and opened from disk in headless Chromium.
Needs the extra `site`, and for the browser playwright and a Chromium or Chrome of this machine"""
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

from helpers import run

pytestmark = pytest.mark.slow

for o in ('sphinx', 'myst_nb', 'furo', 'latex2mathml'):
    pytest.importorskip(o, reason=f'The site was not built: {o} is missing. It is in the extra `site`.')
lab = 'nbs/labs/01_cpu_vs_gpu.html'
phone, desk = dict(width=360, height=740), dict(width=1280, height=1000)

@pytest.fixture(scope='module')
def site(shared_tree, tmp_path_factory):
    "The folder that `make site` makes"
    out = tmp_path_factory.mktemp('site')
    run(sys.executable, '-m', 'sphinx', '-q', '-E', '-W', '-c', shared_tree/'tools'/'site', shared_tree, out)
    return out


# ---- the files

class Links(HTMLParser):
    "What a page links to and shows, and what of it can be linked to"
    def __init__(self, text):
        super().__init__()
        self.targets, self.ids = [], set()
        self.feed(text)
    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.targets += [(tag, attrs[o]) for o in ('href', 'src') if attrs.get(o)]
        if 'id' in attrs: self.ids.add(attrs['id'])

def wrong_links(folder):
    "Targets within the site that aren't there, and what a browser would load from elsewhere"
    read = {o: Links(o.read_text(encoding='utf-8')) for o in folder.rglob('*.html')}
    for page,links in sorted(read.items()):
        for tag,target in links.targets:
            url = urlsplit(target)
            file = (page.parent/unquote(url.path)).resolve() if url.path else page
            if url.scheme or url.netloc: wrong = tag!='a' and url.scheme!='data'
            else: wrong = not file.is_file() or bool(url.fragment and file in read and unquote(url.fragment) not in read[file].ids)
            if wrong: yield f'{page.relative_to(folder)}: {target}'

def test_links(site): assert [*wrong_links(site)]==[]

# ---- in a browser

def visit(browser, site, name, **kw):
    "A page of the site from disk, and everything that it asked for"
    page, asked = browser.new_page(**kw), []
    page.on('request', lambda o: asked.append(o.url))
    page.goto((site/name).as_uri())
    return page, asked

figures = '''() => [...document.querySelectorAll('.cell_output img')].map(img => {
    img.loading = 'eager'
    const c = Object.assign(document.createElement('canvas'), {width: img.naturalWidth, height: img.naturalHeight})
    return img.complete && c.width>100 && img.getBoundingClientRect().width>100
})'''

def test_a_lab(browser, site):
    page, asked = visit(browser, site, lab, viewport=desk)
    assert page.locator('h1').inner_text().startswith('01 ·')
    shown = page.evaluate(figures)
    assert shown and all(shown)
    assert [o for o in asked if not o.startswith(('file:', 'data:'))]==[]
    page.get_by_role('link', name='02 · ').first.click()
    page.wait_for_url('**/02_batch_size.html')
    page.close()

def test_nothing_is_cut_on_a_phone(browser, site):
    page, asked = visit(browser, site, 'index.html', viewport=phone)
    names, wide = sorted(o.relative_to(site).as_posix() for o in site.rglob('*.html')), []
    for o in names:
        page.goto((site/o).as_uri())
        if page.evaluate('document.documentElement.scrollWidth > document.documentElement.clientWidth'): wide.append(o)
    assert len(names)>40 and wide==[] and [o for o in asked if not o.startswith(('file:', 'data:'))]==[]
    page.close()
