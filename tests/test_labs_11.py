"What lab 11 does with records: its own functions and cells, on planted visits and on the records that come with the labs"
import ast, re
from pathlib import Path

import gpubench.core
import nbformat
import numpy as np
import pandas as pd
import pytest

from gpubench.labs import lab_records
from gpubench.report import compare, compare_devices, load_records

lab = Path(__file__).resolve().parent.parent/'nbs'/'labs'/'11_compare.ipynb'
keep = ast.Import, ast.ImportFrom, ast.FunctionDef


def code(): return [o for o in nbformat.read(lab, 4).cells if o.cell_type=='code']

@pytest.fixture(scope='module')
def d():
    "Imports, parameters and functions of the lab, and the fields that it compares; nothing that trains"
    known = dict(small='lenet', here='cpu')
    for cell in code():
        tree, parameters = ast.parse(cell.source), 'parameters' in cell.metadata.get('tags', [])
        tree.body = [o for o in tree.body if parameters or isinstance(o, keep) or 'WORK' in [getattr(t, 'id', '') for t in getattr(o, 'targets', [])]]
        exec(compile(tree, lab.stem, 'exec'), known)
    return known

def cell_with(words):
    [found] = [o.source for o in code() if words in o.source]
    return found

def last_value(source, **known):
    "The value of the last line of a cell"
    *body, last = ast.parse(source).body
    exec(compile(ast.Module(body, []), 'cell', 'exec'), known)
    return eval(compile(ast.Expression(last.value), 'cell', 'eval'), known)

def visits(step_ms, **fields):
    return pd.DataFrame([dict(status='ok', device='cpu', model='lenet', dataset='digits', bs=64, step_ms=o, visit=i) | fields
                         for i,o in enumerate(step_ms)])

@pytest.fixture(scope='module')
def server(): return load_records(lab_records('01_cpu_vs_gpu.jsonl'))


# ---- the naive table, and why it is refused

def test_the_first_record_of_each_device(d):
    df = pd.concat([visits([9.], status='oom'), visits([8.], bs=16), visits([7.], model='resnet18'), visits([5., 4.]), visits([1.], device='cuda')])
    assert d['first_records'](df).step_ms.tolist()==[5., 1.]

def test_fields_that_differ_are_named_and_no_others(d):
    a = pd.Series(dict(model='lenet', n_epoch=1, max_images=640., size=None, pretrained=False, n_train=512))
    b = pd.Series(dict(model='lenet', n_epoch=2., max_images=np.nan, size=np.nan, pretrained=False, n_train=512., only_there=3))
    found = d['differing'](a, b, [*d['WORK'], 'only_there'])
    assert found.to_dict('index')==dict(n_epoch=dict(here=1, there=2), max_images=dict(here=640, there=None),
                                        only_there=dict(here=None, there=3))
    assert len(d['differing'](a, a, d['WORK']))==0

def test_the_naive_rows_are_not_the_same_work(d, server):
    "What the lab says of the records that come with it: the first ones of lenet have other images than this lab trains"
    few = server[server.max_images.eq(d['max_images'])]
    naive = d['first_records'](server)
    assert len(naive)==2 and naive.n_images.gt(few.n_images.max()).all()
    with pytest.raises(ValueError, match='No configuration was run on both sides.*max_images'): compare(few, naive)

def test_the_quick_profile_has_a_partner(d, server):
    "Every network that this lab trains by default was trained alike on the server's CPU and GPU"
    mine = server[(server.device=='cpu') & server.max_images.eq(d['max_images']) & server.model.isin(d['models'])]
    measure = {'half_width': d['half_width'], 'max_s': d['max_s'], 'whole_epoch': True}
    mine = mine.assign(machine='ours', cpu='slow', epoch_s=10*mine.epoch_s, images_per_s=mine.images_per_s/10,
                       measure=gpubench.core.json.dumps(measure))
    found = compare_devices(load_records([mine, server]))
    pairs = set(zip(found[found.speedup.notna() & found.where_a.str.startswith('slow')].model, found.where_b))
    assert len(pairs)==2*len(d['models'])


# ---- a machine against itself

def test_a_slower_session_shows_and_noise_does_not(d):
    a = visits([10., 10.1, 9.9])
    slow, same = d['itself']('later', a, visits([12., 12.1, 11.9])), d['itself']('later', a, visits([10.05, 9.95, 10.1]))
    assert slow['verdict']=='slower' and slow['ratio']==pytest.approx(1.2, rel=.01) and slow['visits']=='3 and 3'
    assert same['verdict']=='not distinguishable' and same['lo']<1<same['hi']
    assert d['itself']('later', a, visits([5.]*3))['verdict']=='faster'

def test_visits_that_failed_do_not_count(d):
    a = visits([10., 10.1, 9.9])
    failed = visits([99.], status='error')
    assert d['itself']('x', a, pd.concat([a, failed]))['ratio']==pytest.approx(1.)
    assert d['itself']('x', a, failed)==dict(what='x')

def test_a_pair_is_the_twin_over_its_sibling(d):
    both = pd.concat([visits([10., 10.1, 9.9], twin=False), visits([11., 11.1, 10.9], twin=True)]).assign(trial_id='t', machine='m')
    [found] = d['pair_of'](both, 'here')
    assert found['ratio']==pytest.approx(1.1, rel=.01) and found['what']=='here, cpu: A/A in one session'

def test_one_session_has_no_interval(d):
    ours, theirs = [visits([10., 11.]), visits([12., 13.])], [visits([1., 1.])]
    assert d['by_session'](*ours)==[10.5, 12.5]
    r = d['ratio_ci'](d['by_session'](*ours), d['by_session'](*theirs))
    assert 10<r.mid<13 and np.isnan(r.lo) and not r.is_distinct()

def test_how_many_minutes_apart(d):
    a, b = (visits([1., 1.]).assign(time_utc=o) for o in (['2026-01-01T10:00:00+00:00', '2026-01-01T10:09:00+00:00'],
                                                          ['2026-01-01T10:05:00+00:00', '2026-01-01T10:30:00+00:00']))
    assert d['minutes_apart'](a, b)==5.


# ---- what is told before anything is measured

def test_a_price_of_nobody_is_told_at_once(d):
    cell = cell_with('add_prices(load_records([ours')
    known = d | dict(machine=dict(fingerprint='f', cpu='EPYC', gpu=None), devices=['cpu'], others={})
    exec(cell, known | dict(price_per_h=dict(cpu=1., gpu=2.)))
    exec(cell, known | dict(price_per_h={}))
    with pytest.raises(ValueError, match="No visit ran on 'h100', so it cannot have a price"): exec(cell, known | dict(price_per_h=dict(h100=3.)))


def test_prices_and_runs_as_typed(tmp_path):
    from gpubench.labs import check_parameters
    (tmp_path/'records.jsonl').touch()
    found = check_parameters(lab, dict(price_per_h='{cpu: .5, gpu: 4}', runs=f'{tmp_path},{tmp_path}'), text=True)
    assert found==dict(price_per_h=dict(cpu=.5, gpu=4.), runs=[str(tmp_path)]*2)
    for wrong in (dict(price_per_h='{gpu: 0}'), dict(price_per_h='4'), dict(runs=str(tmp_path/'gone'))):
        with pytest.raises(ValueError, match='Lab 11_compare: parameter'): check_parameters(lab, wrong, text=True)


# ---- answers

@pytest.mark.parametrize('words,right,wrong', [
    ('Report A: 50,000', '10.2', '23.8/9.3'), ('A GPU is 8 times', "'unknown'", "'gpu'"), ('Three visits of one afternoon', 'False', 'True'),
    ('Which of these have to be equal', "['images trained', 'size of the images', 'precision', 'parameters of the network']", "['torch version']")])
def test_answers(d, words, right, wrong):
    def reply(x): return last_value(re.sub(r'^answer = None', lambda m: f'answer = {x}', cell_with(words), flags=re.M), **d)
    assert (reply('None').ok, reply(right).ok, reply(wrong).ok)==(None, True, False)
