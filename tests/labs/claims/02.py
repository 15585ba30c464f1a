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

# %% The plateau's left end is what is asked for
from gpubench.course.checks import check
assert plateau==sorted(plateau) and fastest in plateau
assert check('02.plateau', plateau[0], plateau=plateau).ok is True and check('02.plateau', None, plateau=plateau).ok is None
