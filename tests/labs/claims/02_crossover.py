# %% A curve whose parameters are known, one that five points don't determine, and no curve at all
from pytest import approx
made = fit(epoch_curve, few, epoch_curve(few, 100, 1, 5)*[1, .999, 1.001, .999, 1], c=50, alpha=.5, t_min=1)
assert made.known.all() and made.value.t_min==approx(5, rel=.01)
assert n_known==0 and fits['A'].value.t_min==approx(20.2, abs=.1)
assert not fit(epoch_curve, few[:2], few[:2], c=1, alpha=1, t_min=1).known.any()

# %% A step whose overhead no size shows
rising = fit(step_curve, few, 1+.1*few, overhead=1, fixed=1, per_image=.2)
assert not rising.known.any() and np.isinf(rising.plus_minus).all()
assert left_out_off(line, pd.Series(few), pd.Series(1+.1*few), fixed=1, per_image=1)==approx(0, abs=1e-6)

# %% Where a line meets the overhead, and where the measured verdicts change
assert meeting_bs(4, 1, .1)==approx(30) and meeting_bs(4, 5, .1)==0 and meeting_bs(4, 1, 0)==np.inf
def of(*words): return overtaken(pd.Series(words, [2, 4, 8][:len(words)]))
assert of('CPU faster', 'not distinguishable', 'GPU faster')==(2, 8) and of('GPU faster', 'GPU faster')==(0, 0)
assert of('not distinguishable', 'GPU faster') is None and of('GPU faster', 'CPU faster') is None
assert of('CPU faster', 'CPU faster') is None
