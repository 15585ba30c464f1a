# %% The first cell that does anything here refuses parameters that no lab can use
from pytest import raises
from replay import again, planted
for name,value in dict(device='gpu', model='lenett', bs=0, repeats=0, seed='3').items():
    if name in __annotations__:
        with planted(**{name: value}), raises(ValueError): again('from gpubench import LabSession')
