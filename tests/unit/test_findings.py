"What records show, in sentences, from records that are made up"
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from made_up_records import PARTS, failed, visit, visits

from gpubench.show.compare import compare, load_records
from gpubench.show.findings import Workload, add_labels, compare_devices, findings, recommend, summary_table
from gpubench.ground.stats import ratios
from gpubench.ground.stats import Interval
from gpubench.show.wording import fit_sentence, fmt_ratio
from gpubench.run.sweep import noise_floor, sweep


def said(rows): return ' '.join(recommend(rows))


def rates(bs, *values): return [visit(bs, 'cuda', i, images_per_s=o, n_dropped=0) for i,o in enumerate(values)]


def test_the_smallest_batch_that_is_enough():
    rows = rates(64, 90, 91, 92) + rates(128, 100, 101, 99) + rates(256, 101, 100, 99.5)
    assert ('The smallest batch within 5 % of the fastest on the GPU: 128. Batch 256 gains nothing measurable. '
            'Batch 64 is 0.91 times as fast (') in said(rows)


def test_a_larger_batch_that_does_gain_is_named():
    rows = rates(64, 50., 50.1, 49.9) + rates(128, 99.0, 99.01, 98.99) + rates(256, 100., 100.01, 99.99)
    assert 'on the GPU: 128.' in said(rows) and 'Batch 256 is 1.01 times as fast (' in said(rows)


def test_one_trial_of_two_labs_is_pooled_and_other_images_are_not():
    again = visits((16, 64), ['cuda'], n=2, visit=7)
    df = add_labels(load_records(visits((16, 64), ['cuda']) + again))
    assert [*Workload(df).best['GPU'].sizes]==[16, 64] and df.workload.nunique()==1
    assert ratios(df, 'bs').n.tolist()==[5, 5]
    for other in (dict(max_images=500), dict(n_train=2000), dict(size=28)):
        df = add_labels(load_records(visits((16, 64), ['cuda']) + visits((16, 64), ['cuda'], **other)))
        assert df.workload.nunique()==2
        for _,rows in df.groupby('workload'): assert ratios(rows, 'bs').n.tolist()==[3, 3]
    assert said(visits((16, 64), ['cuda']) + visits((16, 64), ['cuda'], max_images=500)).count('The fastest of 16 to 64')==2


def pair(ratio, n=3):
    return [visit(64, 'cpu', i, twin=bool(t), step_ms=10*(1+.05*i)*(ratio*(1+.02*(i-1)) if t else 1))
            for i in range(n) for t in (0, 1)]


@pytest.mark.parametrize('ratio', [.8, 1., 1.03, 1.5])
def test_the_noise_floor_is_that_of_the_sweep(ratio):
    rows, floor = pair(ratio), noise_floor(pd.DataFrame(pair(ratio)))
    text = said(rows)
    times, ends = fmt_ratio(floor).split(' ', 1)
    assert f'took {times} times as long as the other {ends}. The true ratio is 1.' in text
    assert 'by its own interval, not by this one.' in text and ('excludes 1' in text)==(ratio in (.8, 1.5))


def test_the_noise_floor_of_real_records():
    "As a sweep really writes them: two trials and an A/A pair"
    real = sweep(dict(dataset='digits', model='lenet', bs=[64, 128], device='cpu', max_images=300), repeats=2, isolate=False, progress=False, max_s=0.)
    assert 'the same configuration was visited twice in each round (batch 128 on the CPU)' in said(real)


def test_where_the_gpu_loses():
    rows = visits((8, 16, 64), ['cpu'], epoch_s=1., images_per_s=100.)
    for bs,s in ((8, 2.), (16, 1.5), (64, .5)):
        rows += [visit(bs, 'cuda', n, epoch_s=s+n/100, images_per_s=100/(s+n/100)) for n in range(3)]
    assert 'The GPU is slower than the CPU below batch 64.' in said(rows)


def test_nothing_is_said_of_numbers_that_are_not_there():
    bare = [dict(bs=o['bs'], device=o['device'], epoch_s=o['epoch_s'], status='ok') for o in visits()]
    assert 'accuracy' not in said(bare) and 'GiB' not in said(bare)


def test_tables_never_make_up_a_number():
    t = summary_table([failed()])
    assert t[['epoch_s', 'images_per_s', 'n_images', 'accuracy', 'peak_allocated_mib']].isna().all(axis=None)


# ---- what is put together

def timed(s, device='cuda', more={}, **kw): return visits((16, 64), [device], measure=dict(max_s=s) | more, **kw)


def test_epochs_are_no_knob_of_speed():
    "Three times the epochs at nine times the speed: neither a ranking nor one median"
    rows = timed(1, n_epoch=1) + [o | dict(images_per_s=9*o['images_per_s'], epoch_s=o['epoch_s']/9) for o in timed(1, n_epoch=3)]
    text = said(rows)
    assert 'Take ' not in text and '9 times' not in text and text.count('The fastest of 16 to 64')==2
    table = summary_table(rows)
    assert table.n_visits.tolist()==[3]*4 and [*table.series.unique()]==['GPU']
    assert [*table.workload.unique()]==[f'made-up net on made-up images, {o}' for o in ('1 epoch', '3 epochs')]


def test_visits_measured_in_another_way_are_never_put_together():
    rows = timed(1) + timed(9)
    assert summary_table(rows).n_visits.tolist()==[3]*4
    assert [*summary_table(rows).workload.unique()]==[f'made-up net on made-up images, measured with max_s={o}' for o in (1, 9)]
    assert compare(rows, timed(1, 'cpu')).n_a.dropna().tolist()==[3, 3]
    assert set(compare_devices(rows + timed(1, 'cpu')).n_b)=={3}
    with pytest.raises(ValueError, match='measured with max_s=1 against measured with max_s=9'): compare(timed(1), timed(9))


def test_with_or_without_the_monitor_times_are_put_together():
    rows = timed(1) + timed(1, more=dict(monitor=True))
    assert summary_table(rows).n_visits.tolist()==[6, 6]
    assert compare(timed(1), timed(1, more=dict(monitor=True))).n_b.tolist()==[3, 3]


def test_records_that_do_not_say_how_they_were_measured():
    assert compare(visits(devices=['cuda']), timed(9)).n_a.tolist()==[3, 3]              # an older gpubench beside a newer
    assert summary_table(visits(devices=['cuda']) + timed(9)).n_visits.tolist()==[3]*4  # within one folder: unknown is not the same


def test_the_records_of_labs_1_and_2_on_one_page(repo, tmp_path):
    names = ('01_cpu_vs_gpu', '02_batch_size')
    rows = [o for name in names for o in load_records(repo/f'nbs/labs/records/{name}.jsonl').to_dict('records')]
    assert not re.search(r'Take \d+ epoch', said(rows)) and findings(rows)
    df = add_labels(load_records(rows))
    for _,o in df.groupby(['workload', 'series', 'bs']): assert o.n_epoch.nunique()==o.measure.nunique()==1


# ---- in short, and once

def test_the_most_important_comes_first_and_nothing_is_lost():
    rows = [o | PARTS | dict(step_ms=15.) for m in 'abcde' for o in visits((16, 64, 256, 512), model=m)] + [failed(model=m) for m in 'abcde']
    found = findings(rows)
    assert {o.workload for o in found}=={f'{o} on made-up images' for o in 'abcde'}
    assert [o.text.split(': ')[1].split(' ')[0] for o in found[:2]]==['Batch']*2 and 'Each at its best batch size' in found[2].text
    assert len({o.text for o in found})==len(found) and recommend(rows)==[o.text for o in found]


@pytest.mark.parametrize('ends,shown', [((77, 61_932), 'too noisy to tell.'), ((77, np.inf), 'too noisy to tell.'), ((77, 150), '300 (77 to 150), beyond')])
def test_a_range_of_batch_sizes_that_is_too_wide_is_no_range(ends, shown):
    intervals = {o: Interval(1., .9, 1.1, .95) for o in ('overhead_ms', 'fixed_ms', 'per_image_ms')}
    fit = SimpleNamespace(overhead_ms=1., per_image_ms=1., intervals=intervals, reason='', measured_range=(1, 99), best_bs=lambda: 300,
                          best_bs_ci=lambda: Interval(300., *ends, .95))
    assert f'images per second: {shown}' in fit_sentence('GPU', fit)


def test_accuracies_of_two_ways_are_not_pooled():
    rows = visits((16, 64), ['cpu'], accuracy=.95)+visits((16, 64), ['cpu'], precision='bf16', accuracy=.55)
    assert 'Held-out accuracy' not in ' '.join(recommend(rows))
    rows += visits((256,), ['cpu'], precision='bf16', accuracy=.3)
    assert 'Held-out accuracy of made-up net on made-up images on the CPU (bf16) is 55 % at batch' in ' '.join(recommend(rows))
