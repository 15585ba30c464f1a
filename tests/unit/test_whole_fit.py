"""What benchmarks/whole_fit.py makes of the runs that it has measured"""
import json, sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]/'benchmarks'))
from whole_fit import broken, difference, done, main, plan, seconds, table  # noqa: E402

def run(row, variant, seed, total_s, score=.5, **kwargs):
    return dict(row=row, variant=variant, seed=seed, total_s=total_s, train_s=[2., .5, .7, .6], valid_s=[.1], n_train=60,
                metrics=dict(valid_loss=1., accuracy=score)) | kwargs
def pair(row, stock_s, ours_s, **kwargs):
    return [run(row, k, seed, t+seed/10) for seed in range(3) for k,t in (('stock', stock_s), ('speed_up', ours_s))]
def failed(row, variant): return dict(row=row, variant=variant, seed=0, raised='Traceback\nTypeError: no\n', train_s=[])

def test_never_slower():
    "1.03 of 10.1 s and .5 s are 10.903 s"
    assert broken(pair('photos_1', 10, 10.8))==[]
    assert broken(pair('photos_1', 10, 10.9))==["photos_1: 11.00 s, and stock's 10.10 s allow 10.90 s"]
    assert broken(pair('collab', .1, .6))==[] and len(broken(pair('collab', .1, .7)))==1

def test_what_raises():
    both = [failed('text', 'stock'), failed('text', 'speed_up')]
    assert broken(both)==[]
    assert broken([run('text', 'stock', 0, 1.), failed('text', 'speed_up')])==['text: TypeError: no']
    assert broken([run('text', 'stock', 0, 1.)])==[]                  # cut before the other side ran

def test_order_of_runs():
    runs = list(plan(['photos_1', 'birds'], ['stock', 'speed_up'], 3, 5))
    assert Counter(runs)==Counter((row, v, i) for row,n in (('photos_1', 3), ('birds', 5)) for v in ('stock', 'speed_up') for i in range(n))
    assert [o[2] for o in runs]==[0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len({o[1] for o in runs[::2]})==2                          # neither side is always the first

def test_table():
    runs = pair('photos_4', 20, 5)+[failed('photos_4', 'fp32'), run('photos_1', 'stock', 0, 3., None)]
    df = table(runs)
    assert df.row.tolist()==['photos_1', 'photos_4', 'photos_4'] and df.variant.tolist()==['stock', 'stock', 'speed_up']
    assert df['whole fit (s)'].tolist()==['3 (3 to 3)', '20.1 (20 to 20.2)', '5.1 (5 to 5.2)']
    assert df['images/s later'].tolist()==['100', '100', '100']       # 60 images in .6 s, the median of later epochs
    assert df['stock ÷ it'].iloc[-1].startswith('3.94 (') and df['stock ÷ it'].iloc[1]==''
    assert seconds(done(runs))['photos_4']['speed_up']==[5., 5.1, 5.2]

def test_difference():
    import numpy as np
    mean, lo, hi = difference(np.array([.5, .6, .7]), np.array([.5, .62, .74]))
    assert (round(mean, 6), round(lo, 4), round(hi, 4))==(.02, -.0297, .0697)     # .02 ± 4.3027·.02/√3
    assert difference(np.array([.5, .6]), np.array([.5, .6]))==(0, 0, 0)

def test_record(tmp_path, monkeypatch, capsys):
    "One that exists is printed, checked and drawn"
    def show(stock_s, ours_s, *args):
        record = dict(machine=dict(cpu='slow', gpu=None, n_cores=2), settings=dict(device='cpu', rows=dict(photos_1=dict(what='one'))),
                      runs=pair('photos_1', stock_s, ours_s))
        (tmp_path/'record').write_text(json.dumps(record))
        monkeypatch.setattr(sys, 'argv', ['whole_fit.py', str(tmp_path/'record'), '--check', *args])
        with pytest.raises(SystemExit) as e: main()
        return e.value.code, capsys.readouterr().out
    code, shown = show(10, 5, '--figure', str(tmp_path/'a.png'))
    assert code==0 and 'None of the 1 rows takes more than 1.03' in shown and (tmp_path/'a.png').stat().st_size
    code, shown = show(10, 12)
    assert code==1 and 'photos_1: 12.10 s' in shown
