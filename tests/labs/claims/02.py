# %% A meeting that is not determined
from math import inf, nan
from gpubench.stats import Interval
verdicts = pd.Series(['not distinguishable', 'GPU faster'])
for limits in ((nan, nan, nan), (30., nan, nan), (30., 0., 40.), (30., 20., inf)):
    c = Interval(*limits, .95)
    assert say_meeting(c).startswith('not determined'), c
    assert meeting_bs(c, verdicts) is None, c
    reply = check_guess(20, meeting_bs(c, verdicts), unit='images')
    assert reply.ok is None and 'measured were' not in reply.text, c

# %% A meeting that is determined
c, verdicts = Interval(30., 20., 40., .95), pd.Series(['CPU faster', 'GPU faster'])
assert say_meeting(c)=='at batch 30. From 20 to 40 they cannot be told apart.' and meeting_bs(c, verdicts)==30
assert meeting_bs(Interval(nan, nan, nan, 0.), verdicts[1:])==0      # the GPU was faster at every size

# %% A prediction without a curve
from types import SimpleNamespace
from replay import again, planted
measured = read_records(lab_records('02_crossover.jsonl')).query('status=="ok"')
no_curve, no_change = SimpleNamespace(predict=lambda bs: nan), SimpleNamespace(predict=lambda bs: 1.)
with planted(cpu=no_curve, gpu=no_change, recorded=measured, far=measured[measured.bs>16]):
    shown = again('both = pd.concat([on_both(smaller), far])')
    assert set(shown.cpu_predicted)=={'no curve'} and shown.gpu_predicted.between(.01, 100).all()

# %% The guess is about images a second, though an epoch of the largest size trains fewer and so is shorter still
few = pd.DataFrame(dict(epoch_s=[4., 2., .2], images_per_s=[100., 200., 800.]), index=[8, 16, 512])
def reply(guess, *sizes):
    with planted(table=few, batch_sizes=[*sizes], my_guess_ratio=guess): return again('check_guess(my_guess_ratio').ok
assert (reply(8, 8, 16, 512), reply(20, 8, 16, 512))==(True, False)
assert reply(8, 8, 16, 4096) is None                                 # no visit of the largest succeeded

# %% One batch size alone is refused
import pytest
with planted(batch_sizes=[64, 64]), pytest.raises(ValueError, match=r'batch_sizes is \[64, 64\], and there is nothing to compare'):
    again('if len(set(batch_sizes))')
