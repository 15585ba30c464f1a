"""The page on which readers predict a speed: made from made-up records, opened from disk in headless Chromium"""
import json

import pytest

from helpers import as_module, root
from made_up_records import HOSTILE, failed, folder_of, visit

predict = as_module(root/'tools'/'site'/'predict.py')
gpu, cpu, other = 'GPU: Made-up GPU, 4 cores', 'CPU: Made-up CPU, 4 cores, beside Made-up GPU', 'GPU: 2 × Other GPU, 8 cores'

shares = dict(wait_ms=.05, forward_ms=.3, loss_ms=.05, backward_ms=.3, optimizer_ms=.25, other_ms=.05)

def three(rate, bs=64, device='cuda', **kw):
    "Three visits around a rate, whose steps have these parts"
    step_ms = 1e3*bs/rate
    parts = {k: x*step_ms for k,x in shares.items()}
    return [visit(bs, device, i, **dict(images_per_s=rate*o, step_ms=step_ms) | parts | kw) for i,o in enumerate((.9, 1., 1.1))]

def planted():
    "Batch 128 is missing on the first machine, batch 16 and 256 on the second; two devices were used on the second"
    b = dict(machine='madeup02', gpu='Other GPU', n_gpus=2, n_cores=8)
    return [*three(1000), *three(250, 16), *three(4000, 256, model=HOSTILE), *three(2500, 256), *three(100, device='cpu'),
            *three(2000, **b), *three(2600, 128, **b), *three(3000, 128, **b, n_devices=2, sync_frac=.25)]

@pytest.fixture(scope='module')
def page_file(tmp_path_factory):
    tree = tmp_path_factory.mktemp('predict')
    folder_of(tree/'nbs'/'labs'/'records'/'01.jsonl', [*planted(), failed()])
    folder_of(tree/'benchmarks'/'results'/'h1'/'parts.jsonl', [dict(part='copy', ms=1.)])
    page = tree/'predict.html'
    page.write_text(predict.render(tree), encoding='utf-8')
    return page


def test_the_repository_s_own_records():
    "Every visit is in the page once, every configuration has a reason, and the page is small"
    data = predict.page_data(predict.read_visits(root))
    all = data['configurations']
    assert len(all)>100 and sum(len(o['rates']) for o in all)==data['n_visits'] and not [o for o in all if not o['why']]
    names = [json.dumps([o['at'], o['bs'], o['settings']]) for o in all]
    assert len(set(names))==len(names) and len(predict.render(root))<300_000


# ---- in a browser

@pytest.fixture
def page(browser, page_file):
    "The page as it opens; it asks for nothing, complains about nothing, and runs nothing from a record"
    o, asked, said = browser.new_page(viewport=dict(width=1000, height=900)), [], []
    o.on('request', lambda x: asked.append(x.url))
    for name in ('pageerror', 'console', 'dialog'): o.on(name, lambda x: said.append(str(x)))
    o.goto(page_file.as_uri())
    yield o
    assert o.evaluate('document.querySelectorAll("img, iframe, script:not([type]) ~ script").length')==0
    o.close()
    assert said==[] and [x for x in asked if not x.startswith(('file:', 'data:'))]==[]

def lock(page, guess):
    page.get_by_label('Your prediction (images/s)').fill(str(guess))
    page.get_by_role('button', name='Lock prediction').click()

def rows(page, id):
    "What a figure's rows say: name, value"
    return {o.locator('.name').inner_text(): o.locator('.value').text_content() for o in page.locator(f'#{id} li:has(.name)').all()}

def pick(page, **values):
    for k,x in values.items(): page.locator(f'#{k}').select_option(str(x))

def start(page): pick(page, place=gpu, model='made-up net', how='the defaults', precision='fp32', n_devices=1, bs=64)

def test_lock_then_see(page):
    start(page)
    assert page.locator('#state').inner_text()=='3 visits recorded (2000-01-01).'
    assert not page.locator('#result').is_visible() and '1,000' not in page.locator('main').inner_text()
    lock(page, 2500)
    assert page.evaluate('document.activeElement.id')=='seen' and not page.locator('#guess').is_visible()
    assert page.locator('#verdict').inner_text()==(
        'You predicted 2,500 images/s; the median is 1,000 images/s. Your prediction is 2.5 times the median.')
    why = page.locator('#why').inner_text().replace('\xa0', ' ')
    assert why.startswith('A step takes about as long at batch 16 (64 ms) as at batch 64 (64 ms)')
    assert '25 % of a step is the optimizer (16 ms). speed_up steps it in one launch.' in why
    assert page.locator('#why code').all_inner_texts()==['speed_up']
    visits = ' images/s · 3 visits: '
    assert rows(page, 'machines')=={gpu: f'1,000{visits}900, 1,000, 1,100', other: f'2,000{visits}1,800, 2,000, 2,200',
                                    cpu: f'100{visits}90, 100, 110'}
    assert page.locator('#machines circle').count()==9
    pick(page, bs=16)
    lock(page, 300)
    assert page.locator('#verdict').inner_text().endswith('Of your 2 predictions, 1 is between half and twice the median.')
    pick(page, bs=64)                                # a locked prediction stays
    assert page.locator('#state').inner_text().endswith('Locked: 2,500 images/s.') and not page.locator('#guess').is_visible()

def drop(page, name, text):
    "Drop a file on the page, and return what it says of it"
    page.evaluate('''([name, text]) => {
        const held = new DataTransfer()
        held.items.add(new File([text], name))
        for (const o of ['dragover', 'drop']) document.body.dispatchEvent(
            new DragEvent(o, {dataTransfer: held, bubbles: true, cancelable: true}))
    }''', [name, text])
    page.wait_for_function('!document.getElementById("read").textContent.startsWith("Every gpubench run and gpubench sweep writes one")')
    return page.locator('#read').inner_text()

def lines(*records): return '\n'.join(json.dumps(dict(schema=3) | o) for o in records)

def test_own_machine(page):
    start(page)
    own = three(1200, gpu='Own GPU', machine='mine', n_cores=6)
    text = drop(page, 'records.jsonl', lines(*own, failed())+'\n{"torn')
    assert text==('records.jsonl: 3 visits read; left out: not a record (1 line); failed (1 line). '
                  'Your machine is now in the list of machines and in the figures.')
    assert page.locator('#place').input_value()==gpu
    lock(page, 1000)
    assert rows(page, 'machines')['Yours · GPU: Own GPU, 6 cores'].startswith('1,200 images/s · 3 visits')
    assert page.locator('#machines rect').count()==3 and page.locator('#own-legend').is_visible()
    pick(page, place='Yours · GPU: Own GPU, 6 cores')
    lock(page, 1200)
    assert 'is right' in page.locator('#verdict').inner_text()
    assert page.locator('#why').inner_text()=='25\xa0% of a step is the optimizer (13.3\xa0ms). gpubench report shows what shortens it.'

def test_a_hostile_file(page):
    "HTML in every string, in the file's name, and in the repository's own records, is text"
    words = {k: HOSTILE for k in 'model dataset device gpu cpu machine time_utc loader precision labels size n_workers n_cores n_gpus'.split()}
    names = {'__proto__': dict(polluted=1), 'constructor': HOSTILE, 'toString': 1}
    found = drop(page, '<img src=x onerror=alert(3)>.jsonl', lines(visit() | words | names, visit() | dict(gpu=HOSTILE, device='cuda')))
    assert found.startswith('<img src=x onerror=alert(3)>.jsonl: 2 visits read.')
    shown = page.locator('#place option').all_text_contents()
    assert len(shown)==5 and sum('<script>alert(1)</script>' in o for o in shown)==2
    for o in [x for x in page.locator('#place option').evaluate_all('all => all.map(o => o.value)') if 'Yours' in x]:
        pick(page, place=o)
        lock(page, 10)
        assert '<img' in page.locator('#machines .chosen .name').inner_text()
    pick(page, place=gpu, model=HOSTILE)
    lock(page, 10)
    assert page.evaluate('({}).polluted===undefined')
