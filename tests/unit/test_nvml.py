"A GPU that has to be reset is gone, like one that fell off the bus"
import pytest

from gpubench.watch.nvml import GPU_COLUMNS, Answer, GpuSource


@pytest.mark.parametrize('code, is_lost', [(15, True), (16, True), (3, False), (999, False)])
def test_which_errors_end_the_rows_of_a_gpu(code, is_lost):
    asked = []
    def ask(column):
        asked.append(column)
        return Answer(None, code, 'made up') if column=='power_w' else Answer(1)
    source = GpuSource('cuda:0', ask)
    row = source.read(0.)
    assert (row is None, source.alive, asked[-1]=='power_w')==(is_lost, not is_lost, is_lost)     # a lost one is asked nothing more
    if not is_lost: assert [o for o in GPU_COLUMNS if row[o] is None]==['power_w']
    assert ('was lost' in ' '.join(source.notes))==is_lost
