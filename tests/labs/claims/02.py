# %% The guess is about images a second, though an epoch of the largest size trains fewer and so is shorter still
from replay import again, planted
few = pd.DataFrame(dict(epoch_s=[4., 2., .2], images_per_s=[100., 200., 800.]), index=[8, 16, 512])
def reply(guess, *sizes):
    with planted(table=few, batch_sizes=[*sizes], my_guess_ratio=guess): return again('check_guess(my_guess_ratio').ok
assert (reply(8, 8, 16, 512), reply(20, 8, 16, 512))==(True, False)
assert reply(8, 8, 16, 4096) is None                                 # no visit of the largest succeeded

# %% One batch size alone is refused
import pytest
with planted(batch_sizes=[64, 64]), pytest.raises(ValueError, match=r'batch_sizes is \[64, 64\], and there is nothing to compare'):
    again('if len(set(batch_sizes))')

# %% The smallest size that is enough is what is asked for; where no interval is narrow, no size is right
from gpubench.course.checks import check
def rates(**images_per_s): return pd.DataFrame([dict(status='ok', bs=int(k[1:]), images_per_s=x, twin=False) for k,xs in images_per_s.items() for x in xs])
above = dict(b64=[2190, 2200, 2210], b256=[2230, 2210, 2220], b1024=[1500, 1510, 1505])
for records,right,wrong in [(rates(b16=[500, 510, 505], **above), 64, 256), (rates(b16=[130, 560, 1900], **above), 64, 16),
                            (rates(b16=[500, 510, 505], b64=[900, 4000, 2200], b256=[700, 5000, 2100]), 'too noisy to tell', 64)]:
    with planted(df=records, by_size=records.groupby('bs')):
        again('against = ratios')
        assert [check('02.plateau', o, choice=choice).ok for o in (right, wrong)]==[True, False], choice
again('against = ratios')
assert check('02.plateau', 7.5, choice=choice).ok is False
