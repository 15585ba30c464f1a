"A new quantity takes one line in one place"
import json

import numpy as np
import pandas as pd
import pytest
import torch

from gpubench.show.compare import load_records
from gpubench.show.plot import plot_batch_sizes
from gpubench.ground.record import FIELDS, Field, append_record, read_records
from gpubench.show.report import report


def visit(bs, n, **measured):
    return dict(trial_id=f'bs{bs}', machine='m1', visit=n, status='ok', error=None, device='cpu', dataset='digits', model='lenet', bs=bs,
                n_epoch=1, cpu='Made-up CPU', n_cores=4, n_train=1437, n_images=1408, n_steps=22, epoch_s=2.+.01*n, step_ms=9., **measured)

def test_a_declared_field_appears_everywhere(tmp_path, monkeypatch):
    monkeypatch.setitem(FIELDS, 'frob_ms', Field('frob_ms', 'measured', 'frobbing of a step', 'frobbing', meaning='How long a step frobs.'))
    rows = [visit(bs, n, frob_ms=4321.) for bs in (16, 64) for n in range(3)]
    for o in rows: append_record(tmp_path, o)
    page = report(tmp_path).read_text(encoding='utf-8')
    assert plot_batch_sizes(pd.DataFrame(rows), 'frob_ms').get_ylabel()=='frobbing of a step (ms)'
    assert 'frobbing (ms)' in page and 'How long a step frobs.' in page             # glossary
    assert load_records(tmp_path).frob_ms.tolist()==[4321.]*6

def test_what_nobody_declared_is_kept_and_not_shown(tmp_path):
    rows = [visit(64, n, frob_ms=4321.) for n in range(3)]
    for o in rows: append_record(tmp_path, o)
    assert 'frob' not in report(tmp_path).read_text(encoding='utf-8')
    assert load_records(tmp_path).frob_ms.tolist()==[4321.]*3


def test_arrays_are_lists(tmp_path):
    append_record(tmp_path, dict(losses=np.linspace(2, 1, 1500), ids=torch.arange(3), many=np.zeros(10**6)))
    row = read_records(tmp_path).iloc[0]
    assert row.losses[0]==2 and row.losses[-1]==1 and len(row.losses)==1500 and row.ids==[0, 1, 2] and row.many.startswith('[0.')


def test_a_link_to_records_stays_a_link(tmp_path):
    real, link = tmp_path/'real.jsonl', tmp_path/'records.jsonl'
    append_record(real, visit(16, 0))
    real.write_text(real.read_text()+'{"torn\n')
    real.chmod(0o660)
    link.symlink_to(real)
    with pytest.warns(UserWarning): read_records(link)
    assert link.is_symlink() and real.stat().st_mode & 0o777==0o660 and len(real.read_text().splitlines())==1


def test_a_file_without_any_record_is_left_alone(tmp_path):
    "Such as records that somebody indented"
    path = tmp_path/'records.jsonl'
    path.write_text(before := json.dumps(dict(bs=1), indent=1)+'\n')
    with pytest.raises(RuntimeError, match='it was left as it is'): read_records(path)
    assert path.read_text()==before and [o.name for o in tmp_path.iterdir()]==['records.jsonl']
