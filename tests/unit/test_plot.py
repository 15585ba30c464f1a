"Figures, from records that are made up: none of the numbers here was measured"
from dataclasses import fields

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from made_up_records import HOSTILE, PARTS, failed, visit, visits

from gpubench.show import plot
from gpubench.ground import series
from gpubench.watch import timing
from gpubench.show.compare import compare
from gpubench.ground.curves import fit_step_time
from gpubench.ground.record import FIELDS, INHERITED, PHASE_NAMES
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


def test_every_phase_of_a_step_has_words():
    assert [*PHASE_NAMES]==[*timing.PHASES, 'other_ms']


@pytest.fixture(scope='module')
def real():
    "Records as a sweep really writes them: two trials and an A/A pair"
    trials = dict(dataset='digits', model='lenet', bs=[64, 128], device='cpu', max_images=300)
    return sweep(trials, repeats=2, isolate=False, progress=False, max_s=0.)


@pytest.mark.slow
def test_nothing_measured_is_taken_for_a_setting(real):
    "Two trials that the settings cannot tell apart, and every other column that has no unit differs between them"
    settings = {*series.SETTINGS, 'bs', 'seed', 'device', 'machine', *(o.name for o in INHERITED)}
    rows = [{k: v if k in settings else f'{k} {i}' for k,v in real.iloc[0].items()} for i in (0, 1)]
    assert series.varied_settings(pd.DataFrame(rows))==series.varied_settings(real)==[]
    assert series.varied_settings(pd.DataFrame([o | dict(hidden=i, settings=['hidden']) for i,o in enumerate(rows)]))==['hidden']


# ---- figures

def dots(ax):
    lines = [o for o in ax.lines if o.get_linestyle()=='None' and o.get_marker()!='x']
    return [xy for o in lines for xy in zip(*o.get_data())]


def test_accuracies_that_differ_little_fill_the_axis_and_the_caption_says_so():
    ax = plot.plot_batch_sizes(pd.DataFrame(visits((16, 64), n=4)).assign(accuracy=[.95, .96, .97, .98]*4), y='accuracy')
    lo, hi = ax.get_ylim()
    assert .9<lo<.95 and .98<hi<1.01 and 'The axis does not start at 0.' in caption_of(ax)


def test_every_visit_is_a_dot_and_the_axis_starts_at_zero():
    rows = visits((16, 64, 256), n=4)
    ax = plot.plot_batch_sizes(pd.DataFrame(rows))
    assert sorted(dots(ax)) == sorted((o['bs'], o['epoch_s']) for o in rows)
    assert ax.get_ylim()[0]==0 and 'start at 0' not in caption_of(ax)
    assert [o.get_text() for o in ax.get_xticklabels()]==['16', '64', '256']
    assert '(s)' in ax.get_ylabel()
    ax.figure.canvas.draw()


def test_lines_are_medians():
    times = (1., 2., 9.)
    ax = plot.plot_batch_sizes(pd.DataFrame([visit(bs, n=i, epoch_s=t) for bs in (16, 64) for i,t in enumerate(times)]))
    line = next(o for o in ax.lines if o.get_linestyle()=='-' and len(o.get_xdata()))
    assert list(line.get_ydata())==[2., 2.]


def test_every_visit_is_a_dot_in_each_phase():
    rows = visits((64,), n=4, transform_ms=None, **PARTS)
    ax = plot.plot_phases(pd.DataFrame(rows))
    assert sorted(x for x,_ in dots(ax))==sorted([*PARTS.values()]*8)
    assert [o.get_text() for o in ax.get_yticklabels()]==[v for k,v in PHASE_NAMES.items() if k in PARTS]
    assert ax.get_xlim()[0]==0 and '(ms)' in ax.get_xlabel() and 'Made-up GPU' in ax.texts[-1].get_text()
    ax.figure.canvas.draw()


def test_phases_of_steps_and_of_real_records(real):
    steps = pd.DataFrame([PARTS | dict(fit=0, epoch=0, step=i, step_ms=15., transform_ms=np.nan) for i in range(30)])
    ax = plot.plot_phases(steps)
    assert len(dots(ax))==7*30 and [o.get_text() for o in ax.texts if o.get_gid()=='share'][0]=='33 %'
    ax = plot.plot_phases(real)
    assert [o.get_text() for o in ax.get_legend().get_texts()]==['CPU · batch 64', 'CPU · batch 128']
    assert len(plot.plot_phases(real, by='bs').get_yticklabels())==8


@pytest.mark.parametrize('status', ['oom', 'error', 'skipped'])
def test_failures_are_marked_with_their_reason(status):
    ax = plot.plot_batch_sizes(pd.DataFrame(visits() + [failed(status, 1024, n) for n in range(3)]))
    assert [o.get_text() for o in ax.texts if o.get_gid()=='failure']==[f'{status} (GPU)']
    assert '1024' in [o.get_text() for o in ax.get_xticklabels()]


def test_a_median_never_mixes_configurations():
    df = pd.DataFrame(visits(n_workers=0) + visits(n_workers=4) + visits(model='other made-up net'))
    labels = series.series_labels(df)
    for _,rows in df.groupby(labels): assert rows[['device', 'n_workers', 'model']].drop_duplicates().shape[0]==1


def test_seeds_are_visits_of_one_series():
    assert series.series_labels(pd.DataFrame(visits(seed=0) + visits(seed=1))).nunique()==2


@pytest.mark.parametrize('f', [plot.plot_batch_sizes, plot.plot_images_per_s, plot.plot_memory])
def test_an_empty_frame_is_refused(f):
    n = len(plt.get_fignums())
    with pytest.raises(ValueError, match='no rows'): f(pd.DataFrame(visits())[:0])
    with pytest.raises(ValueError, match='no rows'): f(pd.DataFrame())
    assert len(plt.get_fignums())==n                    # no blank figure left behind


def test_missing_columns_are_named():
    df = pd.DataFrame(visits())
    with pytest.raises(ValueError, match=r"lacks 'time'\. Its columns are: .*epoch_s"):
        plot.plot_batch_sizes(df, y='time')
    with pytest.raises(ValueError, match="lacks 'bs', 'epoch_s'"): plot.plot_batch_sizes(df[['device']])
    with pytest.raises(ValueError, match="lacks 'speedup'"): plot.plot_speedup(df)


def test_hostile_names_can_be_drawn():
    df = pd.DataFrame(visits(model=HOSTILE) + visits(model='_hidden $'))
    plot.plot_batch_sizes(df, by='model').figure.canvas.draw()
    assert len(plot.plot_batch_sizes(df, by='model').get_legend().get_texts())==4
    plot.plot_speedup(compare(df[df.device=='cpu'], df[df.device=='cuda'])).figure.canvas.draw()


# ---- captions, fits and ways of measuring

WORDY = dict(gpu='Made-up GPU of a maker with a long name 9000', cpu='Made-up CPU of a maker with a long name 7000 v2', torch='2.11.0+cu130',
             fastai='2.8.12', container=True)


def caption_of(ax): return ' '.join(next(o for o in ax.texts if o.get_gid()=='caption').get_text().split())


def inside(ax):
    "Does the caption lie within its figure?"
    ax.figure.canvas.draw()
    box, edge = next(o for o in ax.texts if o.get_gid()=='caption').get_window_extent(), ax.figure.bbox
    return edge.x0<=box.x0 and box.x1<=edge.x1 and edge.y0<=box.y0 and box.y1<=edge.y1


PRICED = pd.DataFrame([dict(name=o, price_per_h=p, images_per_s=s, lo=.9*s, hi=1.1*s) for o,p,s in
                       ((WORDY['cpu']+' · CPU', 1., 100.), ('b · GPU', 10., 3000.), ('without a price', np.nan, 10.), ('without a speed', 2., np.nan))])
BOTH = pd.DataFrame(visits((16, 64, 256, 512), transform_ms=None, **PARTS, **WORDY))
GPU = BOTH[BOTH.device=='cuda']
EXAMPLES = dict( # name -> figures
    plot_batch_sizes=lambda: [plot.plot_batch_sizes(BOTH)], plot_images_per_s=lambda: [plot.plot_images_per_s(BOTH)],
    plot_phases=lambda: [plot.plot_phases(o) for o in (GPU[GPU.bs==64], GPU, BOTH)],
    plot_memory=lambda: [plot.plot_memory(BOTH)], plot_visits=lambda: [plot.plot_visits(BOTH)],
    plot_fit=lambda: [plot.plot_fit(GPU, fit_step_time(GPU.bs, GPU.step_ms))],
    plot_workers=lambda: [plot.plot_workers(GPU.assign(n_workers=2, loader='files'))],
    plot_speedup=lambda: [plot.plot_speedup(compare(BOTH[BOTH.device=='cpu'], GPU))],
    plot_price_speed=lambda: [plot.plot_price_speed(PRICED, PRICED.name[0])],
    plot_roofline=lambda: [plot.plot_roofline(BOTH.assign(**dict.fromkeys(plot.ROOF, 1.)))],
    plot_curves=lambda: [plot.plot_curves(GPU.assign(step=GPU.bs, seed=0, bs=64, accuracy=.5))])


@pytest.mark.parametrize('name', [o for o in plot.__all__ if o.startswith('plot_') and o!='plot_monitor'])
def test_captions_are_whole(name):
    for ax in EXAMPLES[name](): assert inside(ax)


def test_price_against_speed_shows_what_has_both():
    ax = plot.plot_price_speed(PRICED, PRICED.name[0])
    points = [(o.get_xdata()[0], o.get_ydata()[0]) for o in ax.lines if o.get_gid()=='machine']
    assert points==[(1., 100.), (10., 3000.)] and ax.get_xlim()[0]==ax.get_ylim()[0]==0
    assert len(ax.get_legend().get_texts())==2


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


def test_phases_where_every_visit_failed():
    ax = plot.plot_phases(pd.DataFrame([failed(bs=o) for o in (16, 64)]), by='bs')
    assert 'no phase was measured' in [o.get_text() for o in ax.texts]
