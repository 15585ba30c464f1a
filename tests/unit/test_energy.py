"""Monitored visits above a faked NVML, from the trial to the page. What was timed and learned is as without the monitor,
what was not read is nowhere a number, and throttling is reported"""
import math

import numpy as np
import pytest

import fastai.callback.progress   # noqa: F401  gives Learner its no_bar
import pandas as pd

from fake_nvml import MISMATCH, NOT_SUPPORTED, UNKNOWN, FakeGPU, driver, no_driver
from gpubench.ground import series
from gpubench.show.compare import add_prices, load_records
from gpubench.show.findings import add_labels, compare_devices, recommend, summary_table
from gpubench.ground.record import INHERITED, append_record, plain_record, read_records
from gpubench.show.report import render_page, summary_text, write_report
from gpubench.watch.monitor import MonitorCallback
from gpubench.run.sweep import sweep
from gpubench.watch.timing import StepTimerCallback
from gpubench.run.trial import Trial, look_at_start, make_learner, resolve, run_trial, train_monitored

SMALL = Trial(device='cpu', max_images=500)
QUICK = dict(half_width=.9, max_s=0.)


# ---- the start of a visit

@pytest.mark.parametrize('gpu, start', [
    (dict(temperature_c=71, sm_clock_mhz=1410), (71., 1410.)), (dict(temperature_c=71, errors=dict(ClockInfo=NOT_SUPPORTED)), (71., None)),
    (dict(lost=True), (None, None)), (dict(temperature_c=0, sm_clock_mhz=0), (None, None))])
def test_what_a_gpu_says_at_the_start(gpu, start):
    with driver(FakeGPU(**gpu)): assert tuple(look_at_start('cuda').values())==start

@pytest.mark.parametrize('fails', [lambda: no_driver(MISMATCH), lambda: driver()])
def test_no_nvml_is_no_error(fails):
    with fails(): assert look_at_start('cuda:0')==dict(temperature_start_c=None, sm_clock_start_mhz=None)

@pytest.mark.slow
def test_the_visit_looks_before_its_warm_up(monkeypatch):
    from gpubench.run import trial as library
    order = []
    for name in ('look_at_start', 'warm_up', 'train_monitored'):
        def spy(*args, real=getattr(library, name), name=name, **kwargs):
            order.append(name)
            return real(*args, **kwargs) | (dict(temperature_start_c=33.) if name=='look_at_start' else {})
        monkeypatch.setattr(library, name, spy)
    assert run_trial(SMALL, **QUICK)['temperature_start_c']==33. and order==['look_at_start', 'warm_up']      # monitored or not
    assert run_trial(SMALL, **QUICK, monitor=True)['temperature_start_c']==33. and order[2:]==['look_at_start', 'warm_up', 'train_monitored']


# ---- a monitored visit

def on_fake_gpu(*gpus, trial=SMALL, max_s=20.):
    "What a monitored stretch on the CPU says of GPU 0, and the callback"
    learn, monitor = make_learner(resolve(trial)), MonitorCallback(devices=[0])
    with driver(*gpus), learn.no_bar(), learn.no_logging():
        learn.add_cb(StepTimerCallback())
        learn.fit(1)
        return train_monitored(learn, resolve(trial), max_s, monitor), monitor

def test_energy_of_a_monitored_stretch():
    seen, monitor = on_fake_gpu(FakeGPU(power_w=250, temperature_c=60))
    spans = monitor.epochs_df().query("phase=='train'")
    train_s = (spans.end_s-spans.start_s).sum()
    assert 3<=seen['monitored_s']<30 and seen['monitor_n_images']==spans.n_images.sum()>0
    assert seen['energy_j_per_image']==pytest.approx(250*train_s/seen['monitor_n_images'], rel=.15)      # the counter ticks ten times a second
    assert seen['power_mean_w']==pytest.approx(250) and 'temperature_start_c' not in seen
    assert all(o is None or isinstance(o, (str, bool, int, float)) for o in seen.values())               # flat, as a record is

@pytest.mark.slow
def test_energy_that_cannot_be_read_is_none():
    for gpu in (FakeGPU(errors=dict(TotalEnergyConsumption=NOT_SUPPORTED, PowerUsage=UNKNOWN)), FakeGPU(lost=True)):
        seen, _ = on_fake_gpu(gpu)
        assert (seen['energy_j_per_image'], seen['power_mean_w'])==(None, None) and seen['monitor_note']

def test_a_driver_that_never_fills_the_windows_costs_its_time_and_no_more():
    seen, _ = on_fake_gpu(FakeGPU(), max_s=.5)
    assert .3<seen['monitored_s']<30 and seen['energy_j_per_image'] is None and 'too short for three windows' in seen['monitor_note']

@pytest.mark.slow
def test_what_was_timed_and_learned_is_as_without_the_monitor():
    plain, seen = (run_trial(SMALL, **QUICK, monitor=o) for o in (False, True))
    for o in 'loss valid_loss accuracy n_opt_steps n_timed_steps n_rounds n_images n_dropped status'.split():
        assert seen[o]==plain[o], o
    assert seen['monitor_n_images']>0 and seen['monitored_s']>.5
    assert not any(o.startswith('monitor') or 'energy' in o for o in plain)

def test_a_setting_that_turns_back_in_the_stretch_is_an_error():
    learn = make_learner(resolve(SMALL))
    with learn.no_bar(), learn.no_logging(), pytest.raises(RuntimeError, match='batch size should have been'):
        learn.add_cb(StepTimerCallback())
        learn.fit(1)
        learn.dls.train.bs = 32
        train_monitored(learn, resolve(SMALL), .2)


# ---- a sweep

@pytest.mark.slow
def test_a_monitored_sweep_and_records_without_a_monitor(tmp_path, capsys):
    def go(**measure): return sweep(dict(device='cpu', max_images=300), repeats=1, twin=None, progress=False, isolate=False, out=tmp_path, **QUICK, **measure)
    go()
    assert len(go(monitor=False))==1 and len(read_records(tmp_path))==1 and 'nothing is left to run' in capsys.readouterr().out
    df = go(monitor=True)
    assert df.visit.tolist()==[1] and df.monitored_s.item()>0 and df.measure.item()['monitor'] is True
    assert '1 other visits of these trials' in capsys.readouterr().out
    assert go(monitor=True).monitored_s.item()==df.monitored_s.item() and go().visit.tolist()==[0] and len(read_records(tmp_path))==2

def test_a_monitored_visit_in_a_process_of_its_own(tmp_path):
    df = sweep(dict(device='cpu', max_images=300), repeats=1, twin=None, progress=False, out=tmp_path, **QUICK, monitor=True)
    assert df.status.tolist()==['ok'] and df.monitor_n_samples.item()>3 and df.cpu_mean_frac.item()>0 and df.energy_j_per_image.isna().all()

@pytest.mark.slow
def test_nothing_that_the_monitor_says_is_taken_for_a_setting():
    "Two visits of trials that the settings cannot tell apart, with other measurements"
    seen = plain_record(run_trial(SMALL, **QUICK, monitor=True) | dict(price_per_h=1.))
    settings = {*series.SETTINGS, 'bs', 'seed', 'device', 'machine', *(o.name for o in INHERITED)}
    rows = [{k: v if k in settings else f'{k} {i}' for k,v in seen.items()} for i in (0, 1)]
    assert series.varied_settings(pd.DataFrame(rows))==[]


# ---- the page, from records that are made up

def visit(bs=64, device='cpu', n=0, **kw):
    step_ms = (1.5+.12*bs if device=='cpu' else 3+.006*bs)*(1+.01*n)
    gpu = dict(monitored_s=4., power_mean_w=300., gpu_util_mean_frac=.9, temperature_max_c=70., throttled_frac=0., throttle_seen='')
    energy = dict(monitored_s=1.) if device=='cpu' else gpu | dict(energy_j_per_image=.004*(1+.01*n))
    return dict(trial_id=f'{device}{bs}', visit=n, status='ok', error=None, time_utc=f'2000-01-01T00:{n:02d}:00+00:00', dataset='made-up images',
        model='made-up net', bs=bs, device=device, loader='memory', n_workers=0, precision='fp32', n_epoch=1, lr=.001, seed=0, n_train=1437,
        n_valid=360, n_steps=1437//bs, n_images=1437//bs*bs, n_dropped=1437%bs, loss=.1, accuracy=.9, epoch_s=1437//bs*step_ms/1e3, step_ms=step_ms,
        images_per_s=1e3*bs/step_ms, first_batch_ms=1., machine='madeup01', cpu='Made-up CPU', n_cores=4, gpu='Made-up GPU', gpu_memory_gib=8.) | energy | kw

def visits(sizes=(64, 256), devices=('cpu', 'cuda'), n=3, **kw): return [visit(bs, d, v, **kw) for v in range(n) for bs in sizes for d in devices]
def page_of(folder, rows, **kw):
    for o in rows: append_record(folder, o)
    return write_report(folder, **kw).read_text(encoding='utf-8')
def texts(html):
    import html as library, re
    return library.unescape(re.sub(r'<(style|svg).*?</\1>|<[^>]+>', '\n', html, flags=re.S))

def test_the_page_shows_energy_money_and_what_was_not_read(tmp_path):
    text = texts(page_of(tmp_path/'run', visits(), price_per_h=dict(gpu=2., cpu=.1)))
    for o in ('Cost and benefit', 'GPU: epoch (J)', 'CPU: price of 1,000 epochs', '5.69', '300', 'Energy, load and price',
              'On the GPU at batch'): assert o in text, o
    assert 'CPU: epoch (J)' not in text                       # no column that would be empty

def test_a_cost_that_nobody_knows_is_nowhere(tmp_path):
    bare = [{k: v for k,v in o.items() if not k.startswith(('monitor', 'energy', 'power', 'gpu_util', 'temp', 'thr'))} for o in visits()]
    text = texts(page_of(tmp_path/'run', bare)).split('How to read')[0]
    for o in ('Cost and benefit', '(J)', 'price', 'monitored'): assert o not in text, o

def test_energy_of_zero_or_less_is_unknown():
    df = load_records(visits(energy_j_per_image=0., cpu_energy_j_per_image=-1.))
    assert df[['image_j', 'epoch_j', 'beside_image_j']].isna().all(axis=None)

def test_ratios_of_energy_and_money_hold_the_truth():
    rows = visits((64,), cpu_energy_j_per_image=.01)
    c = compare_devices(add_prices(load_records(rows), dict(gpu=2., cpu=.5))).iloc[0]
    both = np.array([.01+.004*(1+.01*n) for n in range(3)])                # the GPU, and the CPU that feeds it
    assert c.energy_ratio==pytest.approx(float(np.exp(np.mean(np.log(.01/both)))), rel=.01) and c.energy_hi<1
    assert c.epoch_j_b==pytest.approx(np.median(both)*1408) and c.energy_verdict.startswith('1.')
    assert c.money_ratio==pytest.approx(c.speedup/4) and c.money_lo==pytest.approx(c.lo/4) and c.epoch_price_b==pytest.approx(c.epoch_s_b*2/3600)

def test_prices_only_where_they_were_given():
    df = add_labels(add_prices(load_records(visits()), dict(gpu=2.)))
    t = summary_table(df)
    assert t.epoch_price[t['where']=='CPU'].isna().all() and (t.epoch_price[t['where']=='GPU']>0).all()
    c = compare_devices(df)
    assert c.money_ratio.isna().all() and c.epoch_price_a.isna().all() and (c.money_verdict=='–').all()

def test_throttling_that_was_seen_is_said():
    seen = [o | dict(throttle_seen='heat (slowed by software)', throttled_frac=.25) if o['visit']==2 and o['device']=='cuda' else o for o in visits()]
    told = ' '.join(recommend(seen))
    assert 'In 2 of 6 monitored visits, the GPU was throttled, up to 25 % of the time: heat (slowed by software).' in told
    assert 'was throttled' not in ' '.join(recommend(visits()))

@pytest.mark.parametrize('change', [dict(energy_j_per_image='much'), dict(energy_j_per_image=math.inf), dict(throttle_seen=None), dict(monitored_s='4'),
                                    dict(price_per_h='a'), dict(temperature_start_c='warm'), dict(n_images=0), dict(bs=None), dict(device=None)])
def test_odd_values_break_neither_page_nor_comparison(change):
    df = add_labels(add_prices(load_records(visits() + [visit(64, 'cuda', 3) | change]), 1.))
    text = texts(render_page(df, 'odd', figures=False)[0]).split('How to read')[0] + summary_text(df)
    assert 'nan' not in text.lower() and 'inf' not in text.lower()

# ---- the command line

def test_a_monitored_sweep_and_a_report_with_prices(tmp_path):
    from click.testing import CliRunner
    from gpubench.cli import cli
    def call(*args): return CliRunner().invoke(cli, [*map(str, args)])
    said = call('sweep', '--bs', 128, '--max-images', 300, '--repeats', 1, '--device', 'cpu', '--no-progress', '--monitor', '--out', tmp_path/'mine')
    assert said.exit_code==0, said.output
    assert read_records(tmp_path/'mine').monitored_s.item()>0
    said = call('report', tmp_path/'mine', '--price-per-hour', 'cpu=0.25')
    assert said.exit_code==0 and 'price of 1,000 epochs' in said.stdout and 'price of 1,000 epochs' in (tmp_path/'mine'/'report.html').read_text()
    assert 'price of 1,000 epochs' not in call('report', tmp_path/'mine').stdout
    for price,says in (('cpu=x', 'a price is a number'), ('cpu=-1', 'number above 0'), ('cpus=1', "Did you mean 'cpu'?")):
        said = call('report', tmp_path/'mine', '--price-per-hour', price)
        assert said.exit_code==2 and says in said.stderr, said.output

def test_compare_says_energy_and_money(tmp_path):
    from click.testing import CliRunner
    from gpubench.cli import cli
    for o in visits((64,), cpu_energy_j_per_image=.02): append_record(tmp_path/'both', o)
    said = CliRunner().invoke(cli, ['compare', str(tmp_path/'both'), '--price-per-hour', 'gpu=2', '--price-per-hour', 'cpu=.1'])
    assert said.exit_code==0 and '      energy (GPU and CPU together): 1.20 times as much' in said.stdout and 'money: ' in said.stdout
