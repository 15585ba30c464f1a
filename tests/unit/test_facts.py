"Which of the driver's rows the doctor takes for a GPU of torch's"
import pytest

from gpubench.watch.facts import Facts, watched

def row(uuid, index=0): return dict(index=index, name='A', uuid=uuid, ok=True, code=None, mig=False)

@pytest.mark.parametrize('torch_uuid, rows, expected', [
    ('1', [row('GPU-1'), row('GPU-2', 1)], 'GPU-1'), ('2', [row('GPU-1'), row('GPU-2', 1)], 'GPU-2'),
    ('', [row('GPU-1')], 'GPU-1'),                                   # there is no other
    ('', [row('GPU-1'), row('GPU-2', 1)], None),                     # any of two: their sensors would be somebody else's
    ('3', [row('GPU-1'), row('GPU-2', 1)], None), ('1', [], None)])
def test_a_gpu_gets_its_own_row_or_none(torch_uuid, rows, expected):
    gpu = dict(index=0, name='A', uuid=torch_uuid, ok=True)
    facts = Facts(dict(nvml=dict(ok=True, gpus=rows), cuda=dict(ok=True, gpus=[gpu])))
    assert watched(facts, gpu).get('uuid')==expected
