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

# %% The plateau's left end is what is asked for; where intervals are wide, no size is right
from gpubench.course.checks import check
assert plateau==sorted(plateau)
assert check('02.plateau', plateau[0] if plateau else 'too noisy to tell', plateau=plateau).ok is True
def rates(**images_per_s): return pd.DataFrame([dict(status='ok', bs=int(k[1:]), images_per_s=x, twin=False) for k,xs in images_per_s.items() for x in xs])
noisy = rates(b16=[130, 560, 1900], b32=[500, 510, 505], b64=[2190, 2200, 2210], b256=[2200, 2210, 2190], b1024=[2210, 2200, 2205])
calm = rates(b16=[2200, 2190, 2210], b32=[500, 510, 505], b64=[2190, 2200, 2210], b256=[2200, 2210, 2190], b1024=[2210, 2200, 2205])
for records,right,wrong in [(noisy[noisy.bs!=32], 'too noisy to tell', 16), (noisy, 64, 16), (calm, 64, 16)]:
    with planted(df=records, by_size=records.groupby('bs')):
        again('fastest = by_size')
        assert [check('02.plateau', o, plateau=plateau).ok for o in (right, wrong)]==[True, False], plateau
again('fastest = by_size')
