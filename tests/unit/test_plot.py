"Figures, from records that are made up: none of the numbers here was measured"
from dataclasses import fields

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt
import pandas as pd
import pytest
from made_up_records import HOSTILE, PARTS, visits

from gpubench.show import plot
from gpubench.show.compare import compare
from gpubench.ground.record import USUAL
from gpubench.run import trial
from gpubench.run.trial import Trial


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close('all')


def test_every_setting_of_a_trial_has_words():
    "Without one, medians would mix configurations; `speed_up` is recorded as its parts"
    names = {o.name for o in fields(Trial)}-{'speed_up'}
    assert names | {*trial.PARTS} == {*USUAL}


# ---- figures

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
