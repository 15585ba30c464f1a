"What lab 11 does with records: its own functions and cells, on planted visits and on the records that come with the labs"
import re
from pathlib import Path
from types import FunctionType

import nbformat
import numpy as np
import pandas as pd
import pytest

from gpubench.checks import lab_records
from gpubench.compare import compare, load_records
from gpubench.findings import compare_devices
from test_labs import definitions, eval_last

lab = Path(__file__).resolve().parents[2]/'nbs'/'labs'/'11_compare.ipynb'


def code(): return [o for o in nbformat.read(lab, 4).cells if o.cell_type=='code']

@pytest.fixture(scope='module')
def d():
    "Imports, parameters and functions of the lab, the fields that it compares and how long it measures; nothing that trains"
    return definitions('11_compare', 'WORK', 'effort', small='lenet', here='cpu')

def cell_with(words):
    [found] = [o.source for o in code() if words in o.source]
    return found

def rebound(f, known):
    "The function with other globals"
    return FunctionType(f.__code__, known)

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
    measure = d['effort'] | dict(whole_epoch=True, monitor=False)       # as a sweep writes it now; the server's records lack `monitor`
    mine = mine.assign(machine='ours', cpu='slow', epoch_s=10*mine.epoch_s, images_per_s=mine.images_per_s/10,
                       measure=[measure]*len(mine))
    found = compare_devices(load_records([mine, server]))
    found = found[found.speedup.notna() & found.where_a.str.startswith('slow')]
    pairs = set(zip(found.model, found.where_b))
    assert len(pairs)==2*len(d['models'])


def test_same_work_is_what_one_of_ours_did(d):
    mine = visits([9., 8.], n_images=512, precision='fp32')
    theirs = pd.concat([visits([1.], n_images=512., precision='fp32', device='cuda', size=np.nan), visits([2.], n_images=512, precision='bf16'),
                        visits([3.], n_images=1408, precision='fp32'), visits([4.], n_images=512, precision='fp32', bs=16)])
    functions = {k: rebound(d[k], d | dict(mine=mine)) for k in ('work', 'same_work')}
    same_work = rebound(d['same_work'], d | functions | dict(mine=mine))
    assert same_work(theirs).step_ms.tolist()==[1.] and same_work(mine).step_ms.tolist()==[9., 8.]
    assert list(same_work(theirs[:0]))==list(theirs)                            # no rows, and all columns
    failed = rebound(d['same_work'], d | functions | dict(mine=mine.assign(status='oom')))
    assert not len(failed(theirs))


# ---- runs of one's own

@pytest.fixture
def report(d, server):
    "The lab's tables for these records: ours, and those in `runs`"
    def make(mine, price_per_h=None, **others):
        known = d | dict(mine=mine, others=others, me=mine.machine.iloc[0], price_per_h=price_per_h, print=lambda *o: None)
        known |= {k: rebound(d[k], known) for k in ('work', 'same_work')}
        for words in ('everyone = add_labels', 'pairs = compare_devices', 'aside = ran['): exec(cell_with(words), known)
        return known
    return make

def part(server, device, machine, **fields):
    "The server's visits of the quick profile on one device as those of another machine"
    df = server[(server.device==device) & server.max_images.eq(640)]
    return load_records(df.assign(machine=machine, cpu=f'CPU of {machine}', gpu=f'GPU of {machine}' if device=='cuda' else None, **fields))

def test_a_cpu_run_and_a_gpu_run_are_compared_even_where_we_have_no_part_in_them(report, server):
    ours = part(server, 'cpu', 'here', n_epoch=7)
    k = report(ours, a=part(server, 'cpu', 'one'), b=part(server, 'cuda', 'two'))
    found = k['pairs']
    assert set(zip(found.model, found.where_a, found.where_b))=={(o, 'CPU of one, 16 cores', 'GPU of two') for o in ('lenet', 'cnn_medium', 'resnet18')}
    assert (found.lo<found.speedup).all() and (found.speedup<found.hi).all()
    assert set(k['aside'].workload.str.contains('7 epochs'))=={True} and set(k['aside']['where'])=={'CPU of here, 16 cores'}

def test_any_number_of_machines(report, server):
    slow = part(server, 'cpu', 'here').assign(epoch_s=lambda o: 10*o.epoch_s, images_per_s=lambda o: o.images_per_s/10)
    k = report(slow, a=part(server, 'cpu', 'one'), b=part(server, 'cuda', 'two'), c=part(server, 'cuda', 'three'))
    lenet = k['pairs'][k['pairs'].model=='lenet']
    assert set(lenet.where_a)=={'CPU of here, 16 cores'} and set(lenet.where_b)=={'CPU of one, 16 cores', 'GPU of two', 'GPU of three'}
    assert not len(k['aside'])

def test_cost_and_energy_where_they_are_known(report, server):
    "The CPU needs 10 times the energy of the GPU for an image; no money without prices"
    a, b = part(server, 'cpu', 'here', cpu_energy_j_per_image=.5), part(server, 'cuda', 'two', energy_j_per_image=.05)
    k = report(a, b=b[b.model!='resnet18'], c=part(server, 'cuda', 'two')[lambda o: o.model=='resnet18'])
    exec(cell_with('energy = pairs.reindex'), k)
    known = k['known'].set_index('workload')
    assert len(known)==3 and (known.epoch_j_a==.5*512).all()
    lenet, resnet18 = (known[known.index.str.startswith(o)].iloc[0] for o in ('lenet', 'resnet18'))
    assert lenet.epoch_j_b==pytest.approx(.05*512) and lenet.energy_verdict.startswith('10 times less')
    assert np.isnan(resnet18.epoch_j_b) and resnet18.energy_verdict=='–' and k['pairs'].money_verdict.eq('–').all()
    priced = report(a, dict(cpu=1., gpu=10.), b=b)['pairs']
    assert np.allclose(priced.money_ratio, priced.speedup/10)

def test_what_failed_stands_aside(report, server):
    k = report(part(server, 'cpu', 'here'), a=part(server, 'cuda', 'two', status='oom'))
    assert not len(k['pairs']) and set(k['aside'].status)=={'ok', 'oom'}

def test_folders_of_one_machine_are_sessions(d, server):
    first, later, day = (part(server, 'cpu', 'here') for _ in range(3))
    theirs = [part(server, 'cuda', 'two'), part(server, 'cuda', 'two')]
    known = d | dict(mine=first, first=first, later=later, others=dict(yesterday=day, a=theirs[0], b=theirs[1]))
    known |= {k: rebound(d[k], known) for k in ('work', 'same_work')}
    known['same_work'] = rebound(d['same_work'], known)
    exec(cell_with('sessions = {}'), known)
    assert {k: len(o) for k,o in known['sessions'].items()}=={('here', 'cpu'): 3, ('two', 'cuda'): 2}


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
    def reply(x): return eval_last(re.sub(r'^answer = None', lambda m: f'answer = {x}', cell_with(words), flags=re.M), **d)
    assert (reply('None').ok, reply(right).ok, reply(wrong).ok)==(None, True, False)
