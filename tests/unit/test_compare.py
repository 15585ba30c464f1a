"Two sets of records side by side, from records that are made up"
import re

import numpy as np
import pandas as pd
import pytest
from made_up_records import NOT_MEASURED, failed, folder_of, visit, visits

from gpubench.show.compare import accuracy_differs, compare, comparison_text, load_records
from gpubench.show.findings import summary_table
from gpubench.ground.stats import ratio_ci


def test_cpu_beside_gpu():
    c = compare(visits(devices=['cpu']), visits(devices=['cuda']))
    assert (c.bs.tolist(), c.where_a.unique().tolist(), c.where_b.unique().tolist())==([16, 64], ['CPU'], ['GPU'])
    assert c.same_work.all() and (c.warning=='').all() and (c.ratio_of=='epoch_s').all()
    assert (c.lo<c.speedup).all() and (c.speedup<c.hi).all() and (c.level==.95).all()
    assert re.fullmatch(r'[\d.]+ times as fast \([\d.]+ to [\d.]+\)', c.verdict[1])


def test_the_other_way_round_is_the_inverse():
    a, b = visits(devices=['cpu']), visits(devices=['cuda'])
    there, back = compare(a, b), compare(b, a)
    np.testing.assert_allclose(there.speedup*back.speedup, 1)
    np.testing.assert_allclose(there.lo*back.hi, 1)
    assert back.verdict[1].startswith('0.')


def test_folders_files_frames_and_lists_are_the_same(tmp_path):
    rows = visits()
    folder = folder_of(tmp_path/'a', rows)
    forms = [folder, str(folder), folder/'records.jsonl', pd.DataFrame(rows), rows, [pd.DataFrame(rows)]]
    wanted = compare(rows, visits(devices=['cuda']))
    for o in forms:
        pd.testing.assert_frame_equal(compare(o, visits(devices=['cuda'])), wanted, check_dtype=False)


def test_records_from_before_a_setting_existed():
    "They match what leaves it off, also where one side turns it on in part; what turns it on isn't the same work"
    old, new = visits(devices=['cuda']), visits(devices=['cuda'], graph=False, n_devices=1)
    assert compare(old, new).same_work.all() and len(compare(old, new))==2
    c = compare(old, new+visits(devices=['cuda'], graph=True, n_devices=1))
    assert c.same_work.tolist()==[True, True, False, False] and c.speedup.notna().tolist()==[True, True, False, False]
    for on in (dict(graph=True), dict(n_devices=2), dict(accumulate=4)):
        with pytest.raises(ValueError, match=f'differ in {next(iter(on))}: '): compare(old, visits(devices=['cuda'], **on))


def test_an_own_function_with_a_setting_is_other_work_than_one_without():
    def own(**kw): return [{k: v for k,v in o.items() if k!='loader'} for o in visits(devices=['cuda'], **kw)]
    with pytest.raises(ValueError, match='graph'): compare(own(), own(graph=True))


def test_records_with_and_without_a_setting_are_one_series():
    rows = load_records(visits(devices=['cuda'])+visits(devices=['cuda'], graph=False))
    assert rows.graph.tolist()==[False]*12


def test_a_run_beside_itself_is_not_distinguishable():
    c = compare(visits(), visits())
    assert c.verdict.tolist()==['not distinguishable']*4
    assert set(c.where_a)=={'CPU (A)', 'GPU (A)'}


@pytest.mark.parametrize('change, says', [
    (dict(n_images=1024, n_steps=16, n_dropped=413), 'An epoch trained 1,408 and 1,024 images'),
    (dict(n_params=1000), 'The networks have 54,528 and 1,000 parameters'),
    (dict(n_train=2000), 'The training sets hold 1,437 and 2,000 images'),
    (dict(accuracy=.3), 'they did not learn the same'),
    (dict(dtype_seen='bfloat16'), 'computed in float32 and bfloat16')])
def test_other_work_is_warned_of(change, says):
    c = compare(visits((64,), ['cpu'], dtype_seen='float32'),
                       visits((64,), ['cuda'], **dict(dtype_seen='float32') | change))
    assert says in c.warning[0] and not c.same_work[0]
    assert says in comparison_text(c)


def test_where_the_images_differ_the_ratio_is_of_images_a_second():
    few = dict(n_images=64, epoch_s=.001, images_per_s=3000.)
    c = compare(visits((64,), ['cpu'], images_per_s=1000.), visits((64,), ['cuda'], **few))
    assert (c.ratio_of[0], round(c.speedup[0], 6))==('images_per_s', 3.)
    assert 'The ratio is of images per second' in c.warning[0]


@pytest.mark.parametrize('change, says', [
    (dict(n_images=0, n_steps=0), 'no image was trained on GPU'),
    (dict(loss=float('nan')), 'the loss is not a number on GPU'),
    (NOT_MEASURED | dict(status='oom'), 'every visit failed on GPU (oom)'),
    (NOT_MEASURED | dict(loss=.1), 'nothing was timed on GPU')])
def test_no_ratio_of_a_broken_side(change, says):
    c = compare(visits((64,), ['cpu']), visits((64,), ['cuda'], **change))
    assert c.verdict[0]==f'no ratio: {says}'
    assert np.isnan(c.speedup[0]) and not c.same_work[0]


def test_some_visits_failed():
    c = compare(visits((64,), ['cpu']), visits((64,), ['cuda']) + [failed('error')])
    assert (c.n_b[0], c.n_failed_b[0], c.warning[0])==(3, 1, '1 of 4 visits failed on GPU (error).')
    assert c.speedup.notna()[0] and not c.same_work[0]


def test_versions_are_a_note_and_no_warning():
    c = compare(visits((64,), ['cpu']), visits((64,), ['cuda'], torch='9.9'))
    assert c.same_work[0] and 'torch 0.0 and 9.9' in c.note[0]


def test_default_and_explicit_size_are_two_configurations():
    with pytest.raises(ValueError, match='size: own size against 224 px'):
        compare(visits(), visits(size=224))


def test_several_machines_on_each_side():
    a = visits((64,)) + visits((64,), machine='m2', gpu='GPU 2', cpu='CPU 2')
    c = compare(a, visits((64,), ['cuda'], machine='m3', gpu='GPU 3'))
    assert set(c.where_a)=={'Made-up GPU', 'GPU 2', 'Made-up CPU, 4 cores', 'CPU 2, 4 cores'}
    assert (len(c), set(c.where_b))==(4, {'GPU 3'})


def test_columns_of_ones_own():
    a = [visit(64, n=v, hidden=h) for v in range(3) for h in (8, 16)]
    assert compare(a, a, by=['hidden']).hidden.tolist()==[8, 16]


def test_settings_of_ones_own_are_found():
    "A sweep of another function: the settings are whatever its points hold"
    rows = [dict(trial_id=f'{h}', hidden=h, bs=8, visit=v, machine='m', epoch_s=h+v/100, settings=['bs', 'hidden'])
            for h in (1, 2) for v in range(3)]
    assert summary_table(rows).n_visits.tolist()==[3, 3]
    assert compare(rows, rows).hidden.tolist()==[1, 2]


def test_two_runs_of_one_machine_are_called_so():
    again = [o | dict(visit=o['visit']+3) for o in visits()]
    text = comparison_text(compare(visits(), again))
    assert text.count('the same machine, or one just like it, so each ratio is how much two runs differ')==2      # once for each device
    assert 'the same machine' not in comparison_text(compare(visits(), visits(machine='m2')))
    assert 'the same machine' not in comparison_text(compare(visits(devices=['cpu']), visits(devices=['cuda'])))


def test_a_run_compared_with_itself_is_noticed(tmp_path):
    folder = folder_of(tmp_path/'a', visits((16, 64)))
    c = compare(folder, folder/'records.jsonl')
    assert c.same_records.all() and comparison_text(c).count('the same records on both sides, so this compares a run with itself')==2
    assert not compare(visits(), [o | dict(visit=o['visit']+3) for o in visits()]).same_records.any()


def test_settings_that_one_side_does_not_know_are_never_pooled():
    some = [{k: v for k,v in o.items() if k!='precision'} for o in visits((64,), ['cuda'])]
    both = visits((64,), ['cuda'], precision='fp32') + visits((64,), ['cuda'], precision='bf16')
    assert compare(visits((64,), ['cuda'], precision='bf16'), some).n_a.tolist()==[3]
    with pytest.raises(ValueError, match='precision: bf16 and fp32 against default precision'): compare(both, some)
    c = compare(visits((64,), ['cpu'], max_images=None) + visits((64,), ['cpu'], max_images=100), visits((64,), ['cpu']))
    assert c.n_a.tolist()[0]==3 and c.verdict[1]=='no ratio: run on CPU (A) only'


@pytest.mark.parametrize('change, says', [
    (dict(status=200), 'status is 200, not text'), (dict(status=['ok']), 'status is a list'), (dict(bs=[64]), 'bs is a list'),
    (dict(machine=dict(a=1)), 'machine is a dict'), (dict(trial_id=3), 'trial_id is 3, not text'),
    (dict(wait_ms=[1.]), 'wait_ms is a list'), (dict(size=[28, 28]), 'size is a list'), (dict(device=0), 'device is 0')])
def test_damaged_records_are_set_aside_in_words(change, says):
    odd = visit(64) | change
    with pytest.warns(UserWarning, match=re.escape(says)): assert len(load_records([*visits(), odd]))==12
    with pytest.warns(UserWarning, match='1 of 13 records are damaged'): assert len(compare([*visits(), odd], visits()))==4
    with pytest.raises(RuntimeError, match='nothing to report'): load_records([odd])


@pytest.mark.parametrize('a, b, n, differs', [
    (.98, .995, 60_000, False),                         # sure, and no more than two points
    (.90, .95, 100, False), (.90, .95, 10_000, True),   # five points: within chance, beyond it
    (.95, .90, 10_000, True), (None, .9, 10_000, False)])
def test_accuracies_differ_where_it_is_sure_and_matters(a, b, n, differs): assert accuracy_differs(a, b, n) is differs


def test_two_versions_of_a_network_are_not_pooled():
    def side(slower): return [visit(64, n=i, model='mine:make', model_source=v, epoch_s=s*slower*(1+.01*i), images_per_s=None)
                              for v,s in (('a', 10.), ('b', 1.)) for i in range(3)]
    df = compare(pd.DataFrame(side(1)), pd.DataFrame(side(2)))
    assert len(df)==2 and sorted(df.model_source)==['a', 'b'] and df.speedup.between(.49, .51).all()
    assert len(compare(pd.DataFrame(side(1)[:3]), pd.DataFrame(side(2)[3:])))==1              # one version each: with a warning


def test_settings_of_a_users_own_function():
    rows = [dict(settings=o, size='small', epoch_s=1., device='cpu', machine='m') for o in (['size'], np.array(['size']))]
    assert load_records(rows)['size'].tolist()==['small', 'small']
    with pytest.raises(RuntimeError, match='settings are not names'): load_records([dict(settings=5, epoch_s=1.)])
    with pytest.raises(RuntimeError, match="size is 'small', not a number"): load_records([dict(size='small', epoch_s=1.)])


def test_cards_of_two_machines_and_of_one_are_kept_apart():
    a, b = visits((64,), ['cuda'], machine='aaaa1'), visits((64,), ['cuda:0'], machine='bbbb1')
    cpu, both = visits((64,), ['cpu'], machine='cccc1'), visits((64,), ['cuda:0', 'cuda:1'], machine='bbbb1')
    assert sorted(compare(cpu, [*a, *b]).where_b)==['Made-up GPU (aaaa)', 'Made-up GPU (bbbb)']
    assert sorted(compare(cpu, both).where_b)==['Made-up GPU 0', 'Made-up GPU 1']
    assert sorted(compare(cpu, [*a, *both]).where_b)==['Made-up GPU (aaaa)', 'Made-up GPU 0 (bbbb)', 'Made-up GPU 1 (bbbb)']


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
