"Monitored sweeps, from the trial to the page"
import pytest

from gpubench.ground.record import read_records
from gpubench.run.sweep import sweep

QUICK = dict(half_width=.9, max_s=0.)

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

def test_a_monitored_sweep_and_a_report_with_prices(tmp_path):
    from click.testing import CliRunner
    from gpubench.cli import cli
    def call(*args): return CliRunner().invoke(cli, [*map(str, args)])
    said = call('sweep', '--bs', 128, '--max-images', 300, '--repeats', 1, '--device', 'cpu', '--no-progress', '--monitor', '--out', tmp_path/'mine')
    assert said.exit_code==0, said.output
    assert read_records(tmp_path/'mine').monitored_s.item()>0
    said = call('report', tmp_path/'mine', '--price-per-hour', 'cpu=0.25')
    assert said.exit_code==0 and 'price of a million images' in said.stdout and 'price of a million images' in (tmp_path/'mine'/'report.html').read_text()
    assert 'price of a million images' not in call('report', tmp_path/'mine').stdout
    for price,says in (('cpu=x', 'form [NAME=]PRICE'), ('cpu=-1', 'number above 0'), ('cpus=1', "Did you mean 'cpu'?")):
        said = call('report', tmp_path/'mine', '--price-per-hour', price)
        assert said.exit_code==2 and says in said.stderr, said.output
