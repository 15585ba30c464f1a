"Figures, from records that are made up: none of the numbers here was measured"
from dataclasses import fields

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt
import pandas as pd
import pytest
from made_up_records import HOSTILE, PARTS, visits

from gpubench.show import plot
from gpubench.ground import stats
from gpubench.show.compare import compare
from gpubench.ground.record import FIELDS, INHERITED
from gpubench.run.sweep import sweep
from gpubench.run import trial
from gpubench.run.trial import Trial


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close('all')


def test_every_setting_of_a_trial_has_words():
    "Without one, medians would mix configurations; `speed_up` is recorded as its parts"
    names = {o.name for o in fields(Trial)}-{'speed_up'}
    assert names | {*trial.PARTS} == {o.name for o in FIELDS.values() if o.kind=='setting'}


@pytest.fixture(scope='module')
def real():
    "Records as a sweep really writes them: two trials and an A/A pair"
    trials = dict(dataset='digits', model='lenet', bs=[64, 128], device='cpu', max_images=300)
    return sweep(trials, repeats=2, isolate=False, progress=False, max_s=0.)


@pytest.mark.slow
def test_nothing_measured_is_taken_for_a_setting(real):
    "Two trials that the settings cannot tell apart, and every other column that has no unit differs between them"
    settings = {*stats.SETTINGS, 'bs', 'seed', 'device', 'machine', *(o.name for o in INHERITED)}
    rows = [{k: v if k in settings else f'{k} {i}' for k,v in real.iloc[0].items()} for i in (0, 1)]
    assert stats.varied_settings(pd.DataFrame(rows))==stats.varied_settings(real)==[]
    assert stats.varied_settings(pd.DataFrame([o | dict(hidden=i, settings=['hidden']) for i,o in enumerate(rows)]))==['hidden']


# ---- figures

def dots(ax):
    lines = [o for o in ax.lines if o.get_linestyle()=='None' and o.get_marker()!='x']
    return [xy for o in lines for xy in zip(*o.get_data())]


def test_every_visit_is_a_dot_and_the_axis_starts_at_zero():
    rows = visits((16, 64, 256), n=4)
    ax = plot.plot_batch_sizes(pd.DataFrame(rows))
    assert sorted(dots(ax)) == sorted((o['bs'], o['epoch_s']) for o in rows)
    assert ax.get_ylim()[0]==0
    assert [o.get_text() for o in ax.get_xticklabels()]==['16', '64', '256']
    assert '(s)' in ax.get_ylabel()
    ax.figure.canvas.draw()


def test_a_median_never_mixes_configurations():
    df = pd.DataFrame(visits(n_workers=0) + visits(n_workers=4) + visits(model='other made-up net'))
    labels = stats.series_labels(df)
    for _,rows in df.groupby(labels): assert rows[['device', 'n_workers', 'model']].drop_duplicates().shape[0]==1


def test_seeds_are_visits_of_one_series():
    assert stats.series_labels(pd.DataFrame(visits(seed=0) + visits(seed=1))).nunique()==2


def test_hostile_names_can_be_drawn():
    df = pd.DataFrame(visits(model=HOSTILE) + visits(model='_hidden $'))
    plot.plot_batch_sizes(df, by='model').figure.canvas.draw()
    assert len(plot.plot_batch_sizes(df, by='model').get_legend().get_texts())==4
    plot.plot_speedup(compare(df[df.device=='cpu'], df[df.device=='cuda'])).figure.canvas.draw()


@pytest.mark.parametrize('f', [plot.plot_batch_sizes, plot.plot_phases, plot.plot_memory])
def test_visits_that_were_measured_in_another_way_are_another_series(f):
    def timed(s, **kw): return visits(measure=dict(half_width=.05, max_s=s) | kw, **PARTS)
    def names(rows): return [o.get_text() for o in f(pd.DataFrame(rows)).get_legend().get_texts()]
    assert any('max_s=9' in o for o in names(timed(1)+timed(9))) and not any('half_width' in o for o in names(timed(1)+timed(9)))
    assert names(timed(1)+timed(1, monitor=True))==names(timed(1))     # the monitor comes after the timing


def test_hollow_dots_are_those_of_batches_that_leave_images_out():
    df = pd.DataFrame([dict(device='cpu', bs=bs, epoch_s=1., n_train=1000, n_dropped=n, status='ok') for bs,n in ((16, 8), (64, 50), (512, 488))])
    dots = {tuple(o.get_xdata()): o.get_markerfacecolor() for o in plot.plot_batch_sizes(df).lines if o.get_linestyle()=='None' and len(o.get_xdata())}
    assert dots[512,]=='none' and dots[16, 64]!='none'


