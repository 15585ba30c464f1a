"""Monitored visits above a faked NVML, from the trial to the page. What was timed and learned is as without the monitor,
what was not read is nowhere a number, and throttling is reported"""
import pytest

import fastai.callback.progress   # noqa: F401  gives Learner its no_bar

from fake_nvml import FakeGPU, driver
from gpubench.ground.record import read_records
from gpubench.watch.monitor import MonitorCallback
from gpubench.run.sweep import sweep
from gpubench.watch.timing import StepTimerCallback
from gpubench.run.trial import Trial, make_learner, resolve, run_trial, train_monitored

SMALL = Trial(device='cpu', max_images=500)
QUICK = dict(half_width=.9, max_s=0.)


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
    assert seen['power_mean_w']==pytest.approx(250)
    assert all(o is None or isinstance(o, (str, bool, int, float)) for o in seen.values())               # flat, as a record is

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
    assert df.status.tolist()==['ok'] and df.cpu_mean_frac.item()>0 and df.energy_j_per_image.isna().all()


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
    for price,says in (('cpu=x', 'form [NAME=]PRICE'), ('cpu=-1', 'number above 0'), ('cpus=1', "Did you mean 'cpu'?")):
        said = call('report', tmp_path/'mine', '--price-per-hour', price)
        assert said.exit_code==2 and says in said.stderr, said.output
