"A function that returns a `Learner`, in a sweep"
import pytest
from fastai.callback.core import Callback
from fastai.test_utils import synth_learner

from gpubench.sweep import sweep


def make_learner(bs, n_trn):
    "`synth_learner` has batches of 16, whatever is asked for"
    return synth_learner(n_trn=n_trn)


def sweep_of(run, capsys, **point):
    df = sweep(point, run=run, repeats=1, isolate=False, progress=False, twin=None)
    return df, capsys.readouterr().out


def test_a_sweep_times_a_learner_and_names_what_it_cannot_verify(capsys):
    df, said = sweep_of(make_learner, capsys, bs=16, n_trn=[10, 20])
    assert (df.status.tolist(), sorted(df.n_images)) == (['ok', 'ok'], [160, 320])
    assert df.unverified.tolist()==['n_trn', 'n_trn'] and 'no training shows it: n_trn.' in said


def test_a_setting_that_did_not_happen_is_an_error(capsys):
    df, _ = sweep_of(make_learner, capsys, bs=[16, 64], n_trn=10)
    assert df.set_index('bs').status.to_dict()=={16: 'ok', 64: 'error'}
    assert 'bs was to be 64 and was 16' in df.set_index('bs').error[64]


def test_the_warm_up_leaves_the_weights_as_they_were(capsys):
    starts = []
    class StartCallback(Callback):
        def before_fit(self): starts.append([o.item() for o in self.model.parameters()])
    def run(n_trn): return synth_learner(n_trn=n_trn, cbs=StartCallback())
    sweep_of(run, capsys, n_trn=10)
    assert len(starts)==2 and starts[0]==pytest.approx(starts[1])
