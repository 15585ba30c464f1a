"What makes one series of visits, and what does not"
import pandas as pd

from gpubench.show.compare import compare
from gpubench.ground.stats import series_labels, varied_settings


def visits(seeds, epoch_s=2., **about):
    return pd.DataFrame([dict(trial_id=f's{o}', machine='m1', visit=0, status='ok', device='cpu', dataset='digits', model='lenet', bs=64,
                              seed=o, n_train=1437, n_images=1408, epoch_s=epoch_s+.01*o, **about) for o in seeds])

def test_seeds_are_visits_of_one_series():
    df = visits(range(4))
    assert varied_settings(df)==[] and series_labels(df).nunique()==1

def test_sides_with_other_seeds_are_compared():
    row = compare(visits(range(3), 4.), visits(range(3, 6), 2.)).iloc[0]
    assert row.n_a==row.n_b==3 and 1.9<row.speedup<2.1 and 'seed' in row.note
