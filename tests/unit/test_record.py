"A new quantity takes one line in one place"
import pandas as pd

from gpubench.show.compare import load_records
from gpubench.show.plot import plot_batch_sizes
from gpubench.ground.record import FIELDS, Field, append_record
from gpubench.show.report import report


def visit(bs, n, **measured):
    return dict(trial_id=f'bs{bs}', machine='m1', visit=n, status='ok', error=None, device='cpu', dataset='digits', model='lenet', bs=bs,
                n_epoch=1, cpu='Made-up CPU', n_cores=4, n_train=1437, n_images=1408, n_steps=22, epoch_s=2.+.01*n, step_ms=9., **measured)

def test_a_declared_field_appears_everywhere(tmp_path, monkeypatch):
    monkeypatch.setitem(FIELDS, 'frob_ms', Field('frob_ms', 'measured', 'frobbing of a step', 'How long a step frobs.'))
    rows = [visit(bs, n, frob_ms=4321.) for bs in (16, 64) for n in range(3)]
    for o in rows: append_record(tmp_path, o)
    page = report(tmp_path).read_text(encoding='utf-8')
    assert plot_batch_sizes(pd.DataFrame(rows), 'frob_ms').get_ylabel()=='frobbing of a step (ms)'
    assert 'frobbing of a step (ms)' in page and 'How long a step frobs.' in page             # glossary
    assert load_records(tmp_path).frob_ms.tolist()==[4321.]*6

def test_what_nobody_declared_is_kept_and_not_shown(tmp_path):
    rows = [visit(64, n, frob_ms=4321.) for n in range(3)]
    for o in rows: append_record(tmp_path, o)
    assert 'frob' not in report(tmp_path).read_text(encoding='utf-8')
    assert load_records(tmp_path).frob_ms.tolist()==[4321.]*3
