"What benchmarks/scaling.py makes of its visits, and which groups it runs side by side"
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]/'benchmarks'))
from scaling import STOCK, WAYS, WEAK_ONLY, alone, phases, table, where_time_went  # noqa: E402

def visits(way, scaling, n, *ms, **kwargs):
    return [dict(status='ok', workload='CNN', way=way, scaling=scaling, n_devices=n, step_ms=o, visit=i, start_s=12., setup_s=3.,
                 visit_s=.5) | kwargs for i,o in enumerate(ms)]

def test_efficiency_is_relative_to_the_fastest_way_on_one_device():
    rows = [*visits('eager', 'weak', 1, 4., 4.), *visits('compiled', 'weak', 1, 1., 1.), *visits('eager, DDP', 'weak', 2, 5., 5.),
            *visits('compiled, flat', 'weak', 2, 1.25, 1.25), *visits('compiled, flat', 'strong', 2, 1., 1.),
            dict(status='error', error='RuntimeError: no', workload='CNN', way=STOCK, scaling='weak', n_devices=2, start_s=12.)]
    df = table(rows).set_index(['way', 'scaling', 'n'])
    assert set(df.base)=={'compiled'}
    assert df.efficiency.round(6).to_dict()=={
        ('eager', 'weak', 1): .25, ('compiled', 'weak', 1): 1., ('eager, DDP', 'weak', 2): .2, ('compiled, flat', 'weak', 2): .8,
        ('compiled, flat', 'strong', 2): .5}
    assert df.added_ms.dropna().round(6).tolist()==[1., .25, 0.]        # than the same way on one device
    times = where_time_went(rows).loc[(2, 'CNN')]
    assert times.to_dict()==dict(start_s=12., setup_s=3., compile_s=6., visits_s=3.)

def test_without_one_device_there_is_no_efficiency():
    assert list(table(visits('captured, DDP', 'weak', 2, 1., 1.)))==['workload', 'way', 'scaling', 'n', 'step_ms']

@pytest.mark.parametrize('sizes, n_there, found', [
    ({1, 2, 4}, 4, [[2, 1], [4]]), ({1, 2}, 2, [[1], [2]]), ({1, 2, 4}, 8, [[4, 2, 1]]), ({1, 2}, 0, [[1], [2]])])
def test_groups_side_by_side(sizes, n_there, found): assert phases(sizes, n_there)==found

def test_each_way_has_its_like_on_one_device():
    assert {alone(o) for o in WAYS}=={'eager', 'captured', 'compiled', 'stock'} and WEAK_ONLY<=set(WAYS)
