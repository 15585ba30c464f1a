# %% Every training is there, with the same seeds, and all of it is counted
from pytest import approx
from replay import again, planted
assert [*by]==['as it was', 'speed_up', 'speed_up and batch × 2'] and all([*o.index]==[*range(seed, seed+n_seeds)] for o in by.values())
noted = {o['part']: o for o in lab.mine}
assert 0<noted['wall']['network_frac']<1 and len(pd.read_csv(lab.folder/'13_trainings.csv'))==3*n_seeds
assert 12<chance<20                                              # eight kinds, about as many of each

# %% What `gain` predicted for the fit stands beside what came
assert noted['fit']['predicted_s']==g.got[0].mid and noted['fit']['got_s']==g.got[1] and 'got_s' in g.to_df()
assert {'as it is', 'no wait for images', 'images decoded once', 'speed_up(learn)'}<={*g.to_df().what}

# %% The page has every sentence that the lab printed, the student's own, and the table
assert all(o in page.read_text(encoding='utf-8') for o in (*ways_said, *costs_said, one_said, said, str(g)))
assert len(ways_said)==2 and len(costs_said)==3 and [o.endswith(' accurate.') for o in costs_said]==[False, True, True]
again('my_words = None', my_words='I changed <nothing>.')
assert page.read_text(encoding='utf-8').startswith('I changed <nothing>.\n')

# %% One change by itself, beside its prediction
assert noted['one change']['change'] in {*g.to_df().what}-{'as it is', 'speed_up(learn)'} and noted['one change']['got_s']==one_s>0

# %% What was learned is counted on birds that no training has seen
assert len(aside)==1000==sum(len(y) for _,y in tests) and not {*aside} & {*one.dls.train.items, *one.dls.valid.items}

# %% A difference of accuracies with its interval: 1, 2 and 3 points, t = 4.303, a standard deviation of 1
found = difference(pd.Series([50., 60., 70.]), pd.Series([51., 62., 73.]))
assert found==approx((2, 2-4.3027/3**.5, 2+4.3027/3**.5), rel=1e-4)
assert isnan(difference(pd.Series([50.]), pd.Series([51.]))[1])

# %% The honest sentence
assert honest(.1, -1, 1.2, 80, 50)=='equal to within 5 points, +0.1 points (-1.0 to +1.2)' and honest(-3, -5, -1, 80, 50).startswith('it learns less')
assert honest(3, 1, 5, 80, 50).startswith('it learns more') and honest(1, -9, 11, 80, 50).startswith("can't be told")
assert 'neither has learned much' in honest(0, -1, 1, 55, 50) and 'one seed' in honest(0, nan, nan, 80, 50)

# %% The clock on the wall starts before the folder is read, and stops after the last metric
calls, now, kept = [], iter((1., 4.5)), list(lab.mine)
class FakeLearner:
    def validate(self, dl): return calls.append(('validate', len(dl))) or [.2, .75]
    def add_cbs(self, cbs): return self
    def no_bar(self): return planted()
    no_logging = no_bar
    def fine_tune(self, epochs, lr): calls.append(('fine_tune', epochs, lr))
with planted(make_learner=lambda seed, bs: calls.append(('make', seed, bs)) or FakeLearner(), perf_counter=lambda: next(now),
             wait_for=lambda d: calls.append('wait'), tests=[1, 2]):
    watched('tried', 7, lambda learn: calls.append('change'), 5)
assert calls==[('make', 7, 5), 'change', ('fine_tune', epochs, lr), 'wait', ('validate', 2)]
assert (lab.mine[-1]['wall_s'], lab.mine[-1]['accuracy'], lab.mine[-1]['way'])==(3.5, .75, 'tried')
lab.mine = kept

# %% Without the student's function, the lab goes on with ours
assert trainings(60, 12, 8)==15 and trainings(60, 8, 12) is None
again('# After how many trainings is a cost', **{})
with planted(paid_back=lambda cost_s, before_s, after_s: 7):
    assert again("trainings = mine_or_ours") is None and trainings(60, 12, 8)==15
