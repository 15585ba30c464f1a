# %% A meeting that is not determined
from math import inf, nan
from gpubench.ground.stats import Interval
verdicts = pd.Series(['not distinguishable', 'GPU faster'])
for limits in ((nan, nan, nan), (30., nan, nan), (30., 0., 40.), (30., 20., inf)):
    c = Interval(*limits, .95)
    assert meeting_words(c).startswith('not determined'), c
    assert meeting_bs(c, verdicts) is None, c
    reply = check_guess(20, meeting_bs(c, verdicts), unit='images')
    assert reply.ok is None and 'the measurement is' not in reply.text, c

# %% A meeting that is determined
c, verdicts = Interval(30., 20., 40., .95), pd.Series(['CPU faster', 'GPU faster'])
assert meeting_words(c)=="at batch 30. From 20 to 40 they can't be told apart." and meeting_bs(c, verdicts)==30
assert meeting_bs(Interval(nan, nan, nan, 0.), verdicts[1:])==0      # the GPU was faster at every size

# %% A prediction without a curve
from types import SimpleNamespace
from replay import again, planted
measured = read_records(lab_records('02_crossover.jsonl')).query('status=="ok"')
no_curve, no_change = SimpleNamespace(predict=lambda bs: nan), SimpleNamespace(predict=lambda bs: 1.)
with planted(cpu=no_curve, gpu=no_change, recorded=measured, far=measured[measured.bs>16]):
    shown = again('both = pd.concat([on_both(smaller), far])')
    assert set(shown.cpu_predicted)=={'no curve'} and shown.gpu_predicted.between(.01, 100).all()
