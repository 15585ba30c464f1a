"Figures, comparisons and the page, from records that are made up: none of the numbers here was measured"
import ast
import inspect
import json
import random
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import matplotlib

matplotlib.use('Agg')
import matplotlib.image as mpimg
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from gpubench import plot, report
from gpubench.record import append_record
from gpubench.curves import fit_step_time, fit_time_curve

HERE = Path(__file__).resolve().parent
MEASURED = ('n_images n_steps n_dropped epoch_s step_ms images_per_s first_batch_ms loss accuracy '
            'peak_allocated_mib peak_reserved_mib device_used_mib').split()
NOT_MEASURED = dict.fromkeys(MEASURED)
HOSTILE = '<script>alert(1)</script>"\'><img src=x onerror=alert(2)> $\\bad{$ {{ 7*7 }} _x'


def visit(bs=64, device='cpu', n=0, n_train=1437, **kw):
    "One made-up visit in the form of a record"
    rng = np.random.default_rng([bs, len(device), n])
    n_steps, step_ms = n_train//bs, (1.5+.12*bs if device=='cpu' else max(3., 1+.006*bs))*rng.normal(1, .01)
    memory = dict(peak_allocated_mib=40+.5*bs, peak_reserved_mib=60+.6*bs, device_used_mib=600+.6*bs)
    asked = dict(dataset='made-up images', model='made-up net', bs=bs, device=device, loader='memory', n_workers=0,
                 precision='fp32', size=None, n_epoch=1, lr=.001, seed=0)
    work = dict(n_train=n_train, n_valid=360, n_steps=n_steps, n_images=n_steps*bs, n_dropped=n_train-n_steps*bs,
                n_params=54_528, loss=.1, accuracy=.9)
    times = dict(epoch_s=n_steps*step_ms/1e3, step_ms=step_ms, images_per_s=1e3*bs/step_ms, first_batch_ms=1.)
    machine = dict(machine='madeup01', cpu='Made-up CPU', n_cores=4, gpu='Made-up GPU', gpu_memory_gib=8., torch='0.0',
                   fastai='0.0')
    about = dict(trial_id='madeup', status='ok', error=None, visit=n, time_utc=f'2000-01-01T00:{n:02d}:00+00:00')
    return about | asked | work | times | machine | (memory if device=='cuda' else {}) | kw


def visits(sizes=(16, 64), devices=('cpu', 'cuda'), n=3, **kw):
    return [visit(bs, d, v, **kw) for v in range(n) for bs in sizes for d in devices]


def failed(status='oom', bs=64, n=0, **kw): return visit(bs, 'cuda', n, **NOT_MEASURED | dict(status=status) | kw)


def folder_of(path, rows):
    for row in rows: append_record(path, row)
    return path


class Page(HTMLParser):
    "Tags with their attributes, text, and whether the tags close in order"
    VOID = {'meta', 'link', 'img', 'br', 'source'}
    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.text, self.balanced = [], [], '', True
        self.feed(html)
        self.balanced = self.balanced and not self.open
    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID: self.open.append(tag)
    def handle_endtag(self, tag):
        if not self.open or self.open.pop()!=tag: self.balanced = False
    def handle_data(self, data):
        if not self.open or self.open[-1]!='style': self.text += data
    def all(self, tag): return [attrs for o,attrs in self.tags if o==tag]


def page_of(path, rows, **kw): return Page(report.write_report(folder_of(path, rows), **kw).read_text(encoding='utf-8'))


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close('all')


# ---- what the modules may know

def test_every_setting_of_a_trial_has_words():
    Trial = pytest.importorskip('gpubench.trial').Trial
    assert {o.name for o in fields(Trial)} == set(plot.SETTINGS) | {'bs', 'device', 'seed'}, \
        'A field of Trial is missing in plot.SETTINGS: without it, medians would mix configurations.'


def test_every_phase_of_a_step_has_words():
    timing = pytest.importorskip('gpubench.timing')
    assert [*plot.PHASES]==[*timing.PHASES, 'other_ms']


@pytest.fixture(scope='module')
def real():
    "Records as a sweep really writes them: two trials and an A/A pair"
    sweep = pytest.importorskip('gpubench.sweep').sweep
    trials = dict(dataset='digits', model='lenet', bs=[64, 128], device='cpu', max_images=300)
    return sweep(trials, repeats=2, isolate=False, progress=False, max_s=0.)


def test_nothing_measured_is_taken_for_a_setting(real):
    "Two trials that the settings cannot tell apart, and every other column that has no unit differs between them"
    settings = {*plot.SETTINGS, 'bs', 'seed', 'device', 'machine'}
    rows = [{k: v if k in settings else f'{k} {i}' for k,v in real.iloc[0].items()} for i in (0, 1)]
    assert plot.own_settings(pd.DataFrame(rows))==[]
    assert plot.own_settings(pd.DataFrame([o | dict(hidden=i) for i,o in enumerate(rows)]))==['hidden']
    assert plot.varied_settings(real)==[]


def test_no_torch_is_imported():
    code = "import sys, gpubench.plot, gpubench.report; print([o for o in ('torch', 'fastai') if o in sys.modules])"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip()=='[]'


def test_only_modules_of_a_lower_number():
    def gpubench_modules(name):
        tree = ast.parse((HERE.parent/'gpubench'/f'{name}.py').read_text(encoding='utf-8'))
        return {o.module for o in ast.walk(tree) if isinstance(o, ast.ImportFrom)
                and (o.level or str(o.module).startswith('gpubench'))}
    assert gpubench_modules('plot') == {'core'}
    assert gpubench_modules('report') == {'core', 'stats', 'plot'}


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


def test_lines_are_medians():
    times = (1., 2., 9.)
    ax = plot.plot_batch_sizes(pd.DataFrame([visit(bs, n=i, epoch_s=t) for bs in (16, 64) for i,t in enumerate(times)]))
    line = next(o for o in ax.lines if o.get_linestyle()=='-' and len(o.get_xdata()))
    assert list(line.get_ydata())==[2., 2.]


PARTS = dict(wait_ms=5., copy_ms=.5, forward_ms=3., loss_ms=.5, backward_ms=4., optimizer_ms=1.5, other_ms=.5)


def test_every_visit_is_a_dot_in_each_phase():
    rows = visits((64,), n=4, transform_ms=None, **PARTS)
    ax = plot.plot_phases(pd.DataFrame(rows))
    assert sorted(x for x,_ in dots(ax))==sorted([*PARTS.values()]*8)
    assert [o.get_text() for o in ax.get_yticklabels()]==[v for k,v in plot.PHASES.items() if k!='transform_ms']
    assert ax.get_xlim()[0]==0 and '(ms)' in ax.get_xlabel() and 'Made-up GPU' in ax.texts[-1].get_text()
    ax.figure.canvas.draw()


def test_phases_of_steps_and_of_real_records(real):
    steps = pd.DataFrame([PARTS | dict(fit=0, epoch=0, step=i, step_ms=15., transform_ms=np.nan) for i in range(30)])
    ax = plot.plot_phases(steps)
    assert len(dots(ax))==7*30 and [o.get_text() for o in ax.texts if o.get_gid()=='share'][0]=='33 %'
    ax = plot.plot_phases(real)
    assert [o.get_text() for o in ax.get_legend().get_texts()]==['CPU · batch 64', 'CPU · batch 128']
    assert len(plot.plot_phases(real, by='bs').get_yticklabels())==8


def test_records_of_schema_1_have_no_phases_and_still_draw(tmp_path):
    assert 'no phase was measured' in [o.get_text() for o in plot.plot_phases(pd.DataFrame(visits())).texts]
    folder_of(tmp_path/'run', visits((16, 64, 256, 512)))
    (tmp_path/'run'/'records.jsonl').write_text((tmp_path/'run'/'records.jsonl').read_text().replace('"schema": 2', '"schema": 1'))
    page = Page(report.write_report(tmp_path/'run').read_text(encoding='utf-8'))
    assert "Where a step's time goes" not in page.text and 'Smallest batch' in page.text and 'By a fit' in page.text


def test_series_differ_in_colour_and_marker():
    ax = plot.plot_batch_sizes(pd.DataFrame(visits(precision='fp32') + visits(precision='bf16')))
    handles = ax.get_legend_handles_labels()[0]
    assert len({o.get_color() for o in handles})==len({o.get_marker() for o in handles})==4


@pytest.mark.parametrize('status', ['oom', 'error', 'skipped'])
def test_failures_are_marked_with_their_reason(status):
    ax = plot.plot_batch_sizes(pd.DataFrame(visits() + [failed(status, 1024, n) for n in range(3)]))
    assert [o.get_text() for o in ax.texts if o.get_gid()=='failure']==[f'{status} (GPU)']
    assert '1024' in [o.get_text() for o in ax.get_xticklabels()]


def test_a_median_never_mixes_configurations():
    df = pd.DataFrame(visits(n_workers=0) + visits(n_workers=4) + visits(model='other made-up net'))
    labels = plot.series_labels(df)
    for _,rows in df.groupby(labels): assert rows[['device', 'n_workers', 'model']].drop_duplicates().shape[0]==1


def test_seeds_are_visits_of_one_series():
    assert plot.series_labels(pd.DataFrame(visits(seed=0) + visits(seed=1))).nunique()==2


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


def test_figures_leave_the_style_alone():
    before = dict(matplotlib.rcParams)
    plot.plot_batch_sizes(pd.DataFrame(visits()))
    assert dict(matplotlib.rcParams)==before


def test_a_given_axes_is_used():
    fig, axs = plt.subplots(1, 3, figsize=(15, 4))
    df = pd.DataFrame(visits())
    assert plot.plot_batch_sizes(df, ax=axs[0]) is axs[0]
    assert plot.plot_memory(df, ax=axs[1]) is axs[1]
    assert plot.plot_speedup(report.compare(df[df.device=='cpu'], df[df.device=='cuda']), ax=axs[2]) is axs[2]
    assert fig.get_size_inches().tolist()==[15, 4]
    fig.canvas.draw()


def test_hostile_names_can_be_drawn():
    df = pd.DataFrame(visits(model=HOSTILE) + visits(model='_hidden $'))
    plot.plot_batch_sizes(df, by='model').figure.canvas.draw()
    assert len(plot.plot_batch_sizes(df, by='model').get_legend().get_texts())==4
    plot.plot_speedup(report.compare(df[df.device=='cpu'], df[df.device=='cuda'])).figure.canvas.draw()


# ---- captions, fits and ways of measuring

WORDY = dict(gpu='Made-up GPU of a maker with a long name 9000', cpu='Made-up CPU of a maker with a long name 7000 v2', torch='2.11.0+cu130',
             fastai='2.8.12', container=True)


def inside(ax):
    "Does the caption lie within its figure?"
    ax.figure.canvas.draw()
    box, edge = next(o for o in ax.texts if o.get_gid()=='caption').get_window_extent(), ax.figure.bbox
    return edge.x0<=box.x0 and box.x1<=edge.x1 and edge.y0<=box.y0 and box.y1<=edge.y1


def test_captions_are_whole():
    df = pd.DataFrame(visits((16, 64, 256, 512), transform_ms=None, **PARTS, **WORDY))
    gpu = df[df.device=='cuda']
    for rows in (gpu[gpu.bs==64], gpu, df): assert inside(plot.plot_phases(rows))
    for ax in (plot.plot_batch_sizes(df), plot.plot_memory(df), plot.plot_fit(gpu, fit_step_time(gpu.bs, gpu.step_ms)),
               plot.plot_speedup(report.compare(df[df.device=='cpu'], gpu))): assert inside(ax)


def test_a_caption_of_a_fit_says_off_by_in_one_meaning_and_doubts_what_is_shown():
    times = [42.8, 34.5, 29.0, 24.2, 23.8]                       # every parameter has an interval with two ends, and the fit is in doubt
    df = pd.DataFrame(dict(bs=[16, 32, 64, 128, 256], epoch_s=times))
    text = ' '.join(plot.plot_fit(df, fit_time_curve(df.bs, df.epoch_s)).texts[-1].get_text().split())
    assert 'Doubtful: alpha and T_min' in text and 'Not shown by the data' not in text
    assert 'off by' not in text.split('Doubtful')[0]


@pytest.mark.parametrize('f', [plot.plot_batch_sizes, plot.plot_phases, plot.plot_memory])
def test_visits_that_were_measured_in_another_way_are_another_series(f):
    def timed(s, **kw): return visits(measure=f'{{"half_width": 0.05, "max_s": {s}{kw.get("more", "")}}}', **PARTS)
    def names(rows): return [o.get_text() for o in f(pd.DataFrame(rows)).get_legend().get_texts()]
    assert any('max_s=9' in o for o in names(timed(1)+timed(9))) and not any('half_width' in o for o in names(timed(1)+timed(9)))
    assert names(timed(1)+timed(1, more=', "monitor": true'))==names(timed(1))     # the monitor comes after the timing


# ---- two sets of records

def test_cpu_beside_gpu():
    c = report.compare(visits(devices=['cpu']), visits(devices=['cuda']))
    assert (c.bs.tolist(), c.where_a.unique().tolist(), c.where_b.unique().tolist())==([16, 64], ['CPU'], ['GPU'])
    assert c.same_work.all() and (c.warning=='').all() and (c.ratio_of=='epoch_s').all()
    assert (c.lo<c.speedup).all() and (c.speedup<c.hi).all() and (c.level==.95).all()
    assert re.fullmatch(r'[\d.]+ times faster \([\d.]+ to [\d.]+\)', c.verdict[1])


def test_the_other_way_round_is_the_inverse():
    a, b = visits(devices=['cpu']), visits(devices=['cuda'])
    there, back = report.compare(a, b), report.compare(b, a)
    np.testing.assert_allclose(there.speedup*back.speedup, 1)
    np.testing.assert_allclose(there.lo*back.hi, 1)
    assert 'slower' in back.verdict[1]


def test_folders_files_frames_and_lists_are_the_same(tmp_path):
    rows = visits()
    folder = folder_of(tmp_path/'a', rows)
    forms = [folder, str(folder), folder/'records.jsonl', pd.DataFrame(rows), rows, [pd.DataFrame(rows)]]
    wanted = report.compare(rows, visits(devices=['cuda']))
    for o in forms:
        pd.testing.assert_frame_equal(report.compare(o, visits(devices=['cuda'])), wanted, check_dtype=False)


def test_a_run_beside_itself_is_not_distinguishable():
    c = report.compare(visits(), visits())
    assert c.verdict.tolist()==['not distinguishable']*4
    assert set(c.where_a)=={'CPU (A)', 'GPU (A)'}


@pytest.mark.parametrize('change, says', [
    (dict(n_images=1024, n_steps=16, n_dropped=413), 'An epoch trained 1,408 and 1,024 images'),
    (dict(n_params=1000), 'The networks have 54,528 and 1,000 parameters'),
    (dict(n_train=2000), 'The training sets hold 1,437 and 2,000 images'),
    (dict(accuracy=.3), 'they did not learn the same'),
    (dict(dtype_seen='bfloat16'), 'computed in float32 and bfloat16')])
def test_other_work_is_warned_of(change, says):
    c = report.compare(visits((64,), ['cpu'], dtype_seen='float32'),
                       visits((64,), ['cuda'], **dict(dtype_seen='float32') | change))
    assert says in c.warning[0] and not c.same_work[0]
    assert says in report.comparison_text(c)


def test_where_the_images_differ_the_ratio_is_of_images_a_second():
    few = dict(n_images=64, epoch_s=.001, images_per_s=3000.)
    c = report.compare(visits((64,), ['cpu'], images_per_s=1000.), visits((64,), ['cuda'], **few))
    assert (c.ratio_of[0], round(c.speedup[0], 6))==('images_per_s', 3.)
    assert 'The ratio is of images a second' in c.warning[0]


@pytest.mark.parametrize('change, says', [
    (dict(n_images=0, n_steps=0), 'no image was trained on GPU'),
    (dict(loss=float('nan')), 'the loss is not a number on GPU'),
    (NOT_MEASURED | dict(status='oom'), 'every visit failed on GPU (oom)'),
    (NOT_MEASURED | dict(loss=.1), 'nothing was timed on GPU')])
def test_no_ratio_of_a_broken_side(change, says):
    c = report.compare(visits((64,), ['cpu']), visits((64,), ['cuda'], **change))
    assert c.verdict[0]==f'no ratio: {says}'
    assert np.isnan(c.speedup[0]) and not c.same_work[0]


def test_some_visits_failed():
    c = report.compare(visits((64,), ['cpu']), visits((64,), ['cuda']) + [failed('error')])
    assert (c.n_b[0], c.n_failed_b[0], c.warning[0])==(3, 1, '1 of 4 visits failed on GPU (error).')
    assert c.speedup.notna()[0] and not c.same_work[0]


def test_versions_are_a_note_and_no_warning():
    c = report.compare(visits((64,), ['cpu']), visits((64,), ['cuda'], torch='9.9'))
    assert c.same_work[0] and 'torch 0.0 and 9.9' in c.note[0]


def test_one_visit_a_side():
    c = report.compare(visits((64,), ['cpu'], 1), visits((64,), ['cuda'], 1))
    assert c.verdict[0].endswith('one visit a side: no interval') and np.isnan(c.lo[0])


def test_what_only_one_side_ran_comes_last_and_without_a_ratio():
    c = report.compare(visits((64, 16), ['cpu']), visits((64, 256), ['cuda']))
    assert c.bs.tolist()==[64, 16, 256]
    assert c.verdict.tolist()[1:]==['no ratio: run on CPU only', 'no ratio: run on GPU only']


def test_nothing_in_common():
    with pytest.raises(ValueError, match='differ in .*loader: memory loader against files loader'):
        report.compare(visits(), visits(loader='files'))


def test_default_and_explicit_size_are_two_configurations():
    with pytest.raises(ValueError, match='size: own size against 224 px'):
        report.compare(visits(), visits(size=224))


def test_several_machines_on_each_side():
    a = visits((64,)) + visits((64,), machine='m2', gpu='GPU 2', cpu='CPU 2')
    c = report.compare(a, visits((64,), ['cuda'], machine='m3', gpu='GPU 3'))
    assert set(c.where_a)=={'Made-up GPU', 'GPU 2', 'Made-up CPU, 4 cores', 'CPU 2, 4 cores'}
    assert (len(c), set(c.where_b))==(4, {'GPU 3'})


def test_columns_of_ones_own():
    a = [visit(64, n=v, hidden=h) for v in range(3) for h in (8, 16)]
    assert report.compare(a, a, by=['hidden']).hidden.tolist()==[8, 16]


def test_settings_of_ones_own_are_found():
    "A sweep of another function: the settings are whatever its points hold"
    rows = [dict(trial_id=f'{h}', hidden=h, bs=8, visit=v, machine='m', epoch_s=h+v/100)
            for h in (1, 2) for v in range(3)]
    assert report.summary_table(rows).n_visits.tolist()==[3, 3]
    assert report.compare(rows, rows).hidden.tolist()==[1, 2]
    assert plot.plot_batch_sizes(pd.DataFrame(rows), by='machine').get_legend() is not None


def test_no_ratio_is_not_the_same_work():
    c = report.compare(visits((64,), ['cpu'], epoch_s=0., images_per_s=None), visits((64,), ['cuda'], epoch_s=0., images_per_s=None))
    assert c.verdict[0]=='no ratio: no time above 0 on both' and not c.same_work[0]


def test_two_runs_of_one_machine_are_called_so():
    text = report.comparison_text(report.compare(visits(), visits()))
    assert text.count('the same machine, so each ratio is how much two runs of it differ')==2      # once for each device
    assert 'the same machine' not in report.comparison_text(report.compare(visits(), visits(machine='m2')))
    assert 'the same machine' not in report.comparison_text(report.compare(visits(devices=['cpu']), visits(devices=['cuda'])))


def test_settings_that_one_side_does_not_know_are_never_pooled():
    some = [{k: v for k,v in o.items() if k!='precision'} for o in visits((64,), ['cuda'])]
    both = visits((64,), ['cuda'], precision='fp32') + visits((64,), ['cuda'], precision='bf16')
    assert report.compare(visits((64,), ['cuda'], precision='bf16'), some).n_a.tolist()==[3]
    with pytest.raises(ValueError, match='precision: bf16 and fp32 against default precision'): report.compare(both, some)
    c = report.compare(visits((64,), ['cpu'], max_images=None) + visits((64,), ['cpu'], max_images=100), visits((64,), ['cpu']))
    assert c.n_a.tolist()[0]==3 and c.verdict[1]=='no ratio: run on CPU (A) only'


@pytest.mark.parametrize('change, says', [
    (dict(status=200), 'status is 200 and not text'), (dict(status=['ok']), 'status is a list'), (dict(bs=[64]), 'bs is a list'),
    (dict(machine=dict(a=1)), 'machine is a dict'), (dict(trial_id=3), 'trial_id is 3 and not text'),
    (dict(wait_ms=[1.]), 'wait_ms is a list'), (dict(size=[28, 28]), 'size is a list'), (dict(device=0), 'device is 0')])
def test_damaged_records_are_set_aside_in_words(tmp_path, change, says):
    odd = visit(64) | change
    with pytest.warns(UserWarning, match=re.escape(says)): page = page_of(tmp_path/'run', [*visits(), odd])
    assert page.balanced and '12 visits of 4 configurations' in page.text
    with pytest.warns(UserWarning, match='1 of 13 records cannot be read'): assert len(report.compare([*visits(), odd], visits()))==4
    with pytest.raises(RuntimeError, match='nothing to report'): report.load_records([odd])


@pytest.mark.parametrize('change', [
    dict(trial_id=None), dict(visit=None), dict(visit='first'), dict(twin='yes'), dict(hidden=[1, 2]), dict(losses=dict(a=1)), dict(bs='many'),
    dict(epoch_s='fast'), dict(process_s='no'), dict(not_tight='no'), dict(time_utc='yesterday'), dict(machine=None), dict(n_train=None),
    dict(bs=float('inf')), dict(bs=-3), dict(bs=2.5), dict(epoch_s=-1.), dict(step_ms=-1.), dict(device=None), dict(status=None)])
def test_odd_values_break_neither_page_nor_comparison(tmp_path, change):
    rows = visits((16, 64, 256, 512)) + [visit(64) | change]
    assert page_of(tmp_path/'run', rows).balanced
    report.comparison_text(report.compare(rows, visits()))
    report.summary_text(rows)


# ---- sentences

def said(rows): return ' '.join(report.recommend(rows))


def rates(bs, *values): return [visit(bs, 'cuda', i, images_per_s=o, n_dropped=0) for i,o in enumerate(values)]


def test_smallest_batch_within_two_per_cent():
    rows = rates(64, 90, 91, 92) + rates(128, 100, 101, 99) + rates(256, 101, 100, 99.5)
    assert ('Smallest batch within 2 % of the fastest on the GPU: 128. Batch 256 gains nothing you could measure. '
            'Batch 64 is 9.8') in said(rows)


def test_a_larger_batch_that_does_gain_is_named():
    rows = rates(128, 99.0, 99.01, 98.99) + rates(256, 100., 100.01, 99.99)
    assert report.best_batch(pd.DataFrame(rows)).bs==128
    assert 'Batch 256 is 1.01 % faster (' in said(rows)


def test_a_batch_size_that_the_visits_do_not_tell_is_not_recommended_as_if():
    rows = rates(64, 80, 100, 120) + rates(128, 82, 101, 118) + rates(256, 40, 41, 42)
    text = said(rows)
    assert 'By the medians the smallest batch within 2 % of the fastest on the GPU is 64, but it is not distinguishable from batch 128 (' in text
    assert 'Smallest batch within' not in text and 'Batch 128 gains nothing' not in text and 'Batch 256 gains nothing' in text


def test_one_trial_of_two_labs_is_pooled_and_other_images_are_not():
    again = visits((16, 64), ['cuda'], n=2, visit=7)
    df = report.add_labels(report.load_records(visits((16, 64), ['cuda']) + again))
    assert {bs: len(o) for bs,o in report.best_batch(df).rates.items()}=={16: 5, 64: 5} and df.workload.nunique()==1
    for other in (dict(max_images=500), dict(n_train=2000), dict(size=28)):
        df = report.add_labels(report.load_records(visits((16, 64), ['cuda']) + visits((16, 64), ['cuda'], **other)))
        assert df.workload.nunique()==2 and len(report.say_best_batch(df[df.workload==df.workload.iloc[0]]))==1
        assert {len(o) for o in report.best_batch(df[df.workload==df.workload.iloc[0]]).rates.values()}=={3}
    assert said(visits((16, 64), ['cuda']) + visits((16, 64), ['cuda'], max_images=500)).count('mallest batch within')==2


def pair(ratio, n=3):
    return [visit(64, 'cpu', i, twin=bool(t), step_ms=10*(1+.02*i)*(ratio if t else 1)) for i in range(n) for t in (0, 1)]


@pytest.mark.parametrize('ratio', [.8, 1., 1.03, 1.5])
def test_the_noise_floor_is_that_of_the_sweep(ratio):
    noise_floor = pytest.importorskip('gpubench.sweep').noise_floor
    rows, floor = pair(ratio), noise_floor(pd.DataFrame(pair(ratio)))
    _,found = report._floors(report.add_labels(report.load_records(rows)))[0]
    np.testing.assert_allclose([found.mid, found.lo, found.hi], [floor.mid, floor.lo, floor.hi])
    text = said(rows)
    assert 'judged by its own interval, not by this.' in text and ('leaves 1 out' in text)==(ratio in (.8, 1.5))


def test_the_noise_floor_of_real_records(real): assert 'the same configuration was visited twice a round (batch 128 on the CPU)' in said(real)


def test_what_the_new_fields_say_stands_on_the_page(tmp_path):
    new = dict(PARTS, step_ms=15., twin=False, not_tight=True, half_width_frac=.08, process_s=2., visit_s=9., epoch_check_frac=-.3,
               epoch_whole_s=1., transform_ms=None)
    rows = [o | new | dict(trial_id=f"{o['device']}{o['bs']}", step_ms=10+o['bs']/100) for o in visits((16, 32, 64, 128))]
    twins = [o | dict(twin=True) for o in rows if o['bs']==64 and o['device']=='cpu']
    page = page_of(tmp_path/'run', rows + twins)
    for o in ('visited twice a round (batch 64 on the CPU)', 'of a step is waiting for data (5 ms)', 'By a fit', 'A whole epoch took' ,
              'before the median step was known as well', 'Each visit ran in a fresh process', 'measured, at '):
        assert o.replace('A whole epoch took', 'a whole epoch took') in page.text, o
    assert len(page.all('details'))==3 and not any('open' in o for o in page.all('details'))             # folded
    assert page.balanced and 'optimiser' in page.text and any('Parts of a step on the GPU' in o['alt'] for o in page.all('img'))


def test_left_out_images_disqualify_an_epoch_time():
    text = said(visits((64, 128, 1024), ['cuda']))
    assert 'fastest on the GPU: 128' in text
    assert 'Batch 1024 leaves out 413 of the 1,437 training images each epoch: its time is not comparable.' in text


def test_where_the_gpu_loses():
    rows = visits((8, 16, 64), ['cpu'], epoch_s=1., images_per_s=100.)
    for bs,s in ((8, 2.), (16, 1.5), (64, .5)):
        rows += [visit(bs, 'cuda', n, epoch_s=s+n/100, images_per_s=100/(s+n/100)) for n in range(3)]
    assert 'The GPU is slower than the CPU below batch 64.' in said(rows)


def test_one_run_says_so():
    assert said([visit()]).startswith('Only one run exists')
    assert 'One visit each' in said(visits(n=1))
    assert '1 of 3 configurations have a single visit' in said(visits((16,)) + [visit(64)])


def test_only_failures():
    text = said([failed(n=n) for n in range(2)])
    assert 'Batch 64 ran out of memory on the GPU (2 of 2 visits).' in text and 'No visit succeeded' in text


def test_nothing_is_said_of_numbers_that_are_not_there():
    bare = [dict(bs=o['bs'], device=o['device'], epoch_s=o['epoch_s'], status='ok') for o in visits()]
    assert 'accuracy' not in said(bare) and 'GiB' not in said(bare)


def test_tables_never_make_up_a_number():
    t = report.summary_table([failed()])
    assert t[['epoch_s', 'images_per_s', 'n_images', 'accuracy', 'peak_allocated_mib']].isna().all(axis=None)
    assert report.results_table(t)['blocks'][0]['rows']==[['64', '0, 1 oom']]


@pytest.mark.parametrize('seed', range(12))
def test_records_with_holes(seed):
    "Any column may be missing and any value unknown"
    rng = random.Random(seed)
    lost = rng.sample(sorted(visit()), rng.randrange(12))
    def hole(row): return {k: None if rng.random()<.15 else v for k,v in row.items() if k not in lost}
    rows = [hole(o) | dict(status=rng.choice(['ok', 'ok', 'oom'])) for o in visits((16, 64, 512))]
    df = report.add_labels(report.load_records(rows))
    html = report.render_page(df, {}, 'holes')
    assert Page(html).balanced and 'nan' not in re.sub(r'[a-z]nan|nan[a-z]', '', Page(html).text.lower())
    report.summary_text(rows)


# ---- what is put together

def timed(s, device='cuda', more='', **kw): return visits((16, 64), [device], measure=f'{{"max_s": {s}{more}}}', **kw)


def test_epochs_are_no_knob_of_speed():
    "Three times the epochs at nine times the speed: neither a ranking nor one median"
    rows = timed(1, n_epoch=1) + [o | dict(images_per_s=9*o['images_per_s'], epoch_s=o['epoch_s']/9) for o in timed(1, n_epoch=3)]
    text = said(rows)
    assert 'the fastest is' not in text and '9 times' not in text and text.count('mallest batch within 2 %')==2
    table = report.summary_table(rows)
    assert table.n_visits.tolist()==[3]*4 and [*table.series.unique()]==['GPU']
    assert [*table.workload.unique()]==[f'made-up net on made-up images, {o}' for o in ('1 epoch', '3 epochs')]


def test_visits_measured_in_another_way_are_never_put_together():
    rows = timed(1) + timed(9)
    assert report.summary_table(rows).n_visits.tolist()==[3]*4
    assert [*report.summary_table(rows).workload.unique()]==[f'made-up net on made-up images, measured with max_s={o}' for o in (1, 9)]
    assert report.compare(rows, timed(1, 'cpu')).n_a.dropna().tolist()==[3, 3]
    assert set(report.compare_devices(rows + timed(1, 'cpu')).n_b)=={3}
    with pytest.raises(ValueError, match='measured with max_s=1 against measured with max_s=9'): report.compare(timed(1), timed(9))
    with pytest.raises(ValueError, match='2 series'): report.best_batch(rows)


def test_with_or_without_the_monitor_times_are_put_together():
    rows = timed(1) + timed(1, more=', "monitor": true')
    assert report.summary_table(rows).n_visits.tolist()==[6, 6]
    assert report.compare(timed(1), timed(1, more=', "monitor": true')).n_b.tolist()==[3, 3]


def test_records_that_do_not_say_how_they_were_measured():
    assert report.compare(visits(devices=['cuda']), timed(9)).n_a.tolist()==[3, 3]              # an older gpubench beside a newer
    assert report.summary_table(visits(devices=['cuda']) + timed(9)).n_visits.tolist()==[3]*4  # within one folder: unknown is not the same


def test_the_records_of_labs_1_and_2_on_one_page(repo, tmp_path):
    names = ('01_cpu_vs_gpu', '02_batch_size')
    rows = [o for name in names for o in report.load_records(repo/f'nbs/labs/records/{name}.jsonl').to_dict('records')]
    found = report.sayings(rows)
    assert not re.search(r'fastest is \d+ epoch', ' '.join(report.recommend(rows))) and 1<=len(found.short)<=report.MOST
    df = report.add_labels(report.load_records(rows))
    for _,o in df.groupby(['workload', 'series', 'bs']): assert o.n_epoch.nunique()==o.measure.nunique()==1


# ---- in short, and once

def test_in_short_is_short_and_nothing_is_lost(tmp_path):
    rows = [o | PARTS | dict(step_ms=15.) for m in 'abcde' for o in visits((16, 64, 256, 512), model=m)] + [failed(model=m) for m in 'abcde']
    found = report.sayings(rows)
    assert len(found.short)==report.MOST and [*found.more]==[f'{o} on made-up images' for o in 'abcde']+['']
    assert found.short[0].startswith('5 of 125 visits failed') and sum('against the CPU (intervals' in o for o in found.short)==1
    page = page_of(tmp_path/'run', rows)
    short, rest = page.text.partition('More on all visits')[::2] if found.more[''] else page.text.partition('a on made-up images\n')[::2]
    assert page.balanced and all(o in short for o in found.short) and len(page.all('li'))>=len(report.recommend(rows))
    for texts in found.more.values(): assert all(o in rest for o in texts)


def restless(**kw): return [o | dict(epoch_s=o['epoch_s']*(3 if o['visit']==2 else 1)) | kw for o in visits((16, 64))]


def test_the_warning_of_noise_comes_once_with_what_it_is_of(tmp_path):
    rows = restless() + restless(model='b') + visits((16, 64), model='quiet')
    text = page_of(tmp_path/'run', rows).text
    for o in (text, ' '.join(report.recommend(rows)), report.summary_text(rows)):
        assert o.count('busy with something else')==1 and 'In 8 of 12 configurations' in o and '(b on made-up images)' in o and 'and 4 more' in o
    said = report.comparison_text(report.compare([o for o in rows if o['device']=='cpu'], [o for o in rows if o['device']=='cuda']))
    assert said.count('WARNING')==1 and said.splitlines()[-1].startswith('WARNING: In')
    quiet = visits((16, 64))
    assert 'WARNING' not in report.summary_text(quiet) + report.comparison_text(report.compare(quiet, quiet))


def test_no_percentage_is_called_the_threshold():
    text = report.say_floor(pair(1.03))[0]
    assert re.findall(r'[\d.]+ %', text)==['95 %'] and 'judged by its own interval' in text


# ---- what is no record

JUNK = (None, 3, 1.5, 'nonsense', [1], [None], object(), {}, pd.DataFrame(), pd.DataFrame(dict(x=[1])))


def public(module):
    "The functions of a module, with how many arguments they need"
    found = {o: getattr(module, o) for o in module.__all__}
    return [(o, f, sum(p.default is p.empty for p in inspect.signature(f).parameters.values()))
            for o,f in found.items() if inspect.isfunction(f) and f.__module__==module.__name__]


@pytest.mark.parametrize('junk', JUNK, ids=[repr(o)[:12].split(' at ')[0].replace(chr(10), ' ') for o in JUNK])
@pytest.mark.parametrize('module', [plot, report])
def test_no_raw_error_from_what_is_no_record(module, junk):
    "Whatever is given instead of records, the answer is a sentence about it"
    raw = []
    for name,f,n in public(module):
        if name in ('of_all', 'of_each', 'drawing', 'series_style', 'need_frame', 'need_columns'): continue     # they take no data, or refuse it
        try: f(*[junk]*n)
        except (ValueError, RuntimeError) as e:
            if len(str(e))<30 or 'could not convert' in str(e): raw.append(f'{name}: {e!r}')
        except Exception as e: raw.append(f'{name}: {e!r}')
    assert raw==[]


# ---- the page

def test_the_page_needs_nothing_else(tmp_path):
    page = page_of(tmp_path/'run', visits((16, 64, 256)))
    assert page.balanced
    assert not page.all('script') and not page.all('iframe') and not page.all('object')
    urls = [v for _,attrs in page.tags for k,v in attrs.items() if k in ('src', 'href', 'srcset')]
    assert urls and all(o.startswith(('data:', './')) for o in urls)
    assert {o.get('name') for o in page.all('meta')} >= {'viewport', 'color-scheme'}
    assert "default-src 'none'" in next(o['content'] for o in page.all('meta') if o.get('http-equiv'))
    assert page.all('img') and all(len(o['alt'])>40 for o in page.all('img'))


def test_recommendations_come_first(tmp_path):
    text = page_of(tmp_path/'run', visits((16, 64, 256))).text
    parts = ('In short', 'Smallest batch within', 'images trained', 'The machine', 'How to read')
    places = [text.index(o) for o in parts]
    assert places==sorted(places)


def test_the_numbers_on_the_page_are_those_of_the_records(tmp_path):
    rows = [visit(64, n=i, epoch_s=o) for i,o in enumerate((.4567, .4444, .5))]
    assert '0.457 (0.444 to 0.5, 75 %)' in page_of(tmp_path/'run', rows).text


def test_figures_are_files_too(tmp_path):
    page_of(tmp_path/'run', visits((16, 64, 256)))
    files = sorted((tmp_path/'run'/'figures').glob('*.png'))
    assert len(files)>=4
    for o in files: assert mpimg.imread(o).shape[1]>=1000


def test_a_second_page_replaces_the_first_and_leaves_others_figures(tmp_path):
    folder = folder_of(tmp_path/'run', visits((16, 64)))
    report.write_report(folder)
    (folder/'figures'/'mine.png').write_bytes(b'mine')
    n = len(list((folder/'figures').iterdir()))
    report.write_report(folder)
    assert len(list((folder/'figures').iterdir()))==n and (folder/'figures'/'mine.png').read_bytes()==b'mine'
    assert not list(folder.glob('*.new'))


def test_links_lead_to_files_beside_the_page(tmp_path):
    folder = tmp_path/'run'
    folder.mkdir()
    names = ['#x?.ipynb', '01 lab & more.ipynb', 'javascript:alert(1).ipynb']
    for o in names: (folder/o).write_text('{}')
    links = page_of(folder, visits()).all('a')
    assert [unquote(o['href'].removeprefix('./')) for o in links]==[*names, 'records.jsonl']


def test_everything_from_records_is_escaped(tmp_path):
    names = dict.fromkeys('model dataset gpu cpu os torch loader'.split(), HOSTILE)
    rows = visits((16, 64), **names) + [failed(HOSTILE, 256, error=HOSTILE, model=HOSTILE, machine=HOSTILE)]
    page = page_of(tmp_path/'run', rows, title=HOSTILE)
    assert page.balanced and not page.all('script')
    assert not [attrs for _,attrs in page.tags for k in attrs if k.startswith('on')]
    assert '<script>alert(1)</script>' in page.text and '{{ 7*7 }}' in page.text     # shown as it stands
    assert {o.get('src', '')[:5] for o in page.all('img')}=={'data:'}


def test_an_empty_folder(tmp_path):
    with pytest.raises(RuntimeError, match='no records'): report.write_report(tmp_path)
    (tmp_path/'records.jsonl').touch()
    with pytest.raises(RuntimeError, match='no visit has ended yet'): report.write_report(tmp_path)
    assert not (tmp_path/'report.html').exists()


def test_a_folder_that_cannot_be_written_to(tmp_path):
    folder = folder_of(tmp_path/'run', visits())
    (folder/'figures').write_text('a file where a folder should be')
    with pytest.raises(RuntimeError, match='cannot be written .* Make the folder writable'): report.write_report(folder)


@pytest.mark.parametrize('rows, says', [
    ([visit()], 'Only one run exists'), (visits(devices=['cpu']), 'Only a CPU was measured'),
    ([failed(error='CUDA out of memory.')], 'CUDA out of memory.'), (visits(n=1), 'One visit each'),
    (visits(accuracy=None, epoch_s=float('nan')), 'Smallest batch'), (visits(devices=['cuda']), 'of the GPU'),
    ([dict(status='ok')], 'this machine'), ([dict(bs=8, y=3.)], 'this run')])
def test_every_kind_of_run_has_a_page(tmp_path, rows, says):
    page = page_of(tmp_path/'run', rows)
    assert page.balanced and says in page.text


def test_two_machines_on_one_page(tmp_path):
    other = visits(machine='m2', gpu='Other made-up GPU', cpu='Other made-up CPU', time_utc='2000-01-05T12:00:00+00:00')
    page = page_of(tmp_path/'run', visits(), others=[folder_of(tmp_path/'other', other)])
    assert 'The machines' in page.text and '1 January 2000, 00:00 to 5 January 2000, 12:00 UTC' in page.text
    assert re.search('Other made-up GPU against (Made-up|Other made-up) CPU, 4 cores', page.text)


def test_several_models_are_told_apart(tmp_path):
    text = page_of(tmp_path/'run', visits() + visits(model='second made-up net')).text
    assert text.count('Smallest batch within')>=2 and 'second made-up net on made-up images' in text


# ---- in a browser, where there is one

CHROME = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
LOOK = """<iframe id=f style="border:0;width:{width}px;height:900px" src="{page}"></iframe><pre id=seen></pre><script>
f.onload = () => {{ const d = f.contentDocument, imgs = [...d.images]
  const sizes = [...d.querySelectorAll('p,li,td,th,dd')].map(o => parseFloat(getComputedStyle(o).fontSize))
  seen.textContent = JSON.stringify({{ wide: d.documentElement.scrollWidth, n: imgs.length, small: Math.min(...sizes),
    broken: imgs.filter(o => !o.naturalWidth).length }}) }}
</script>"""


@pytest.mark.skipif(not CHROME, reason='no Chromium here')
@pytest.mark.parametrize('width', [360, 390, 768, 1280])
def test_nothing_sticks_out_of_the_screen(tmp_path, width):
    rows = visits((16, 64, 256)) + [failed('error', 512, error='a reason without a break: '+'x'*300)]
    page = report.write_report(folder_of(tmp_path/('a-folder-with-a-long-name-'*3), rows))
    look = tmp_path/'look.html'
    look.write_text(LOOK.format(width=width, page=page.as_uri()))
    flags = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-background-networking',
             '--allow-file-access-from-files', '--virtual-time-budget=5000']
    out = subprocess.run([CHROME, *flags, f'--user-data-dir={tmp_path/"profile"}', '--dump-dom', look.as_uri()],
                         capture_output=True, text=True, timeout=120).stdout
    found = json.loads(re.search(r'<pre id="seen">(.*?)</pre>', out)[1])
    assert found['wide']<=width, 'the page scrolls sideways'
    assert found['broken']==0 and found['n']>=4
    assert found['small']>=12
