"The order of visits is that of the seed"
import multiprocessing

import torch

from gpubench.ground.record import read_records
from gpubench.ground.stats import aa_pairs, varied_settings
from gpubench.run.process import pack, run_fresh
from gpubench.run.sweep import sweep
from gpubench.show.compare import compare


def test_another_seed_is_another_order():
    def run(x): return dict(y=x)
    def order(seed): return sweep(dict(x=list(range(8))), 2, run=run, seed=seed, twin=None, isolate=False, progress=False).x.tolist()
    a, b = order(1), order(2)
    assert a==order(1)!=b and sorted(a[:8])==sorted(b[8:])==list(range(8))          # whole rounds, shuffled anew
    assert a[:8]!=a[8:]


def test_a_function_may_hold_what_json_does_not_know():
    round_and_round = []
    round_and_round.append(round_and_round)
    for held in ({(1, 2): .1}, {1: .1, 'a': 2}, round_and_round):
        assert sweep([dict(bs=1)], run=lambda bs: dict(n=len(held)), repeats=1, isolate=False, twin=None, progress=False).n.tolist()==[len(held)]

def timed(bs): return dict(images_per_s=10.*bs, epoch_s=1/bs)

def swept(out, bs=(1, 2), repeats=3): return sweep(dict(bs=list(bs)), repeats, out, timed, isolate=False, progress=False)

def test_a_round_is_written_and_a_resumed_sweep_goes_on_in_it(tmp_path):
    whole = swept(tmp_path)
    assert sorted(whole.groupby(['bs', 'twin'])['round'].agg(list))==[[0, 1, 2]]*3 and whole.sweep_id.nunique()==1
    file = tmp_path/'records.jsonl'
    lines = file.read_text().splitlines(keepends=True)
    lost = [i for i,o in enumerate(whole.to_dict('records')) if o['round']==1 and o['bs']==1]        # not the last one
    file.write_text(''.join(o for i,o in enumerate(lines) if i not in lost))
    again = swept(tmp_path, repeats=4)
    assert sorted(again.groupby(['bs', 'twin'])['round'].agg(sorted))==[[0, 1, 2, 3]]*3 and {*again.sweep_id}=={*whole.sweep_id}
    assert {*swept(tmp_path, (4, 8)).sweep_id}.isdisjoint(whole.sweep_id)                             # other trials: a sweep of its own

def test_what_a_visit_inherits_makes_it_another_one(tmp_path, capsys):
    threads = torch.get_num_threads()
    swept(tmp_path)
    try:
        torch.set_num_threads(threads+1)
        more = swept(tmp_path)
    finally: torch.set_num_threads(threads)
    assert {*more.torch_threads}=={threads+1} and '9 other visits of these trials' in capsys.readouterr().out
    both = read_records(tmp_path)
    assert len(both)==18 and len(aa_pairs(both))==2 and varied_settings(both)==['torch_threads']
    one, two = (both[both.torch_threads==o] for o in (threads, threads+1))
    assert all(f'compute threads {threads} and {threads+1}' in o for o in compare(one, two).note)


def test_a_fresh_process_starts_workers_as_this_one_does():
    "A spawned one takes seconds to start"
    def method(): return dict(method=multiprocessing.get_start_method())
    assert run_fresh(pack(method))==dict(method=multiprocessing.get_start_method())
