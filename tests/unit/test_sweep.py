"The order of visits is that of the seed"
from gpubench.sweep import sweep


def test_another_seed_is_another_order():
    def run(x): return dict(y=x)
    def order(seed): return sweep(dict(x=list(range(8))), 2, run=run, seed=seed, twin=None, isolate=False, progress=False).x.tolist()
    a, b = order(1), order(2)
    assert a==order(1)!=b and sorted(a[:8])==sorted(b[8:])==list(range(8))          # whole rounds, shuffled anew
    assert a[:8]!=a[8:]
