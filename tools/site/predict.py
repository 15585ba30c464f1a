"""The page `predict.html`: readers lock a predicted speed, then see the recorded visits. One file without a server: `predict.html` and
`predict.js` beside this module, with the repository's records in it"""
import base64, hashlib, json
from importlib.resources import files
from pathlib import Path

import jinja2
import pandas as pd

from gpubench.ground.record import SCHEMA_VERSION, USUAL, record_rows
from gpubench.ground.stats import SETTINGS, WORDINGS, plain_value
from gpubench.show.compare import fmt
from gpubench.show.draw import ON_DARK, ON_LIGHT
from gpubench.show.findings import PARTS, is_usual
from gpubench.show.plot import phase_shares

here = Path(__file__).resolve().parent
about = 'gpu', 'n_gpus', 'cpu', 'n_cores'               # of a machine
# what a configuration is, besides machine, device and batch size; how many images there are counts, not how many there might have been
names = [*(o for o in SETTINGS if o not in ('lr', 'max_images')), 'n_train']
images = 'dataset', 'size', 'n_channels', 'n_train', 'labels', 'n_epoch'
least_sync_frac, alike_frac, max_wait_frac = .02, .1, .1

def read_visits(srcdir):
    "Every visit of a trial in the repository's records that succeeded, with what isn't usual about it as `key`"
    found = [*Path(srcdir, 'nbs/labs/records').glob('*.jsonl'), *Path(srcdir, 'benchmarks/results').rglob('*.jsonl')]
    rows = [o for path in sorted(found) for o in record_rows(path) if o.get('status')=='ok' and o.get('model') and o.get('images_per_s')]
    def key(o): return json.dumps({k: plain_value(o.get(k)) for k in names if not is_usual(k, o.get(k))})
    return pd.DataFrame([o | dict(key=key(o)) for o in rows])

def launches(rows, others):
    "That a step takes no longer with more images, if it doesn't; `others`: the same at other batch sizes"
    first, step_ms = rows.iloc[0], rows.step_ms.median()
    if first.device=='cpu' or plain_value(first.get('graph')) or first.get('n_devices', 1)>1: return ''
    for bs,ms in others.groupby('bs').step_ms.median().items():
        if max(bs/first.bs, first.bs/bs)>=2 and abs(ms/step_ms-1)<=alike_frac: return (
            f"A step takes about as long at batch {bs} ({fmt(ms, 'ms')}) as at batch {first.bs} ({fmt(step_ms, 'ms')}): "
            "launching its kernels from Python takes the time, not the images.")
    return ''

def reason(rows, others):
    "Where the time of a configuration's steps goes, in sentences"
    shares = phase_shares(rows)
    each = [(o, shares[shares.index.isin(o.phases)].sum()) for o in PARTS]
    part, most = max(each, key=lambda o: (o[1].share_frac>=o[0].least_frac, o[1].share_frac))
    if not most.share_frac: return 'The parts of its steps were not recorded.'
    share = f"{fmt(most.share_frac, '%', 100)} of a step is {part.words} ({fmt(most.ms, 'ms')})."
    waits = shares.share_frac.get('wait_ms', 0)>max_wait_frac
    out = [] if waits else [launches(rows, others)]
    is_network = part is PARTS[-1]
    if not (is_network and any(out)):
        out += [f'{share} {part.remedy(rows.iloc[0].to_dict())}' if most.share_frac>=part.least_frac else f'No part stands out: {share}']
    sync_frac = rows.get('sync_frac', pd.Series(dtype=float)).median()
    if sync_frac>=least_sync_frac: out.append(f"Averaging the gradients takes {fmt(sync_frac, '%', 100)} of a step.")
    return ' '.join(filter(None, out))

def configurations(visits):
    "One per machine, device, settings and batch size: the rates of its visits, their days, the reason"
    series = ['machine', 'device', 'key']
    for (*_,key),same in visits.groupby(series, sort=False):
        for bs,rows in same.groupby('bs'):
            machine, days = rows.iloc[0], rows.time_utc.str[:10]
            yield dict(at={o: plain_value(machine.get(o)) for o in ('device', *about)}, bs=int(bs), settings=json.loads(key),
                       rates=[float(f'{o:.4g}') for o in rows.images_per_s], days=[days.min(), days.max()],
                       why=reason(rows, same[same.bs!=bs]))

def page_data(visits):
    "What the page knows: the visits, and how the library words settings and the parts of a step"
    usual = {o: USUAL[o] for o in SETTINGS if is_usual(o, USUAL[o])}
    words = {o: dict(wording=WORDINGS.get(o, f'{o} {{}}'), usual=usual.get(o)) for o in names} | dict(n_train=dict(wording='{:,} training images'))
    parts = [dict(words=o.words, phases=o.phases, least=o.least_frac) for o in PARTS]
    return dict(configurations=[*configurations(visits)], settings=words, images=images, parts=parts, schema=SCHEMA_VERSION,
                n_visits=len(visits))

def render(srcdir):
    "The page as text; None if the folder has no records"
    visits = read_visits(srcdir)
    if not len(visits): return None
    jinja = jinja2.Environment(loader=jinja2.FileSystemLoader(here), undefined=jinja2.StrictUndefined)
    script = (here/'predict.js').read_text(encoding='utf-8')
    # the browser runs this script and no other, whatever is in the records
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = json.dumps(page_data(visits), ensure_ascii=False, separators=(',', ':')).replace('<', '\\u003c')
    css = (files('gpubench.show')/'page.css').read_text(encoding='utf-8')
    return jinja.get_template('predict.html').render(data=data, script=script, digest=digest, css=css, light=ON_LIGHT, dark=ON_DARK)

def write(app, error):
    page = None if error else render(app.srcdir)
    if page: Path(app.outdir, 'predict.html').write_text(page, encoding='utf-8')

def setup(app):
    app.connect('build-finished', write)
    return dict(parallel_read_safe=True, parallel_write_safe=True)
