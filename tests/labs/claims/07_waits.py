# %% Memory that the forward pass keeps: linear layers keep their inputs, in the type in which they computed
import io
from contextlib import redirect_stderr
from unittest.mock import patch
from pytest import approx
from torch import nn
from replay import planted
def two_layers(*args, **kw): return nn.Sequential(nn.Flatten(), nn.Linear(32*32, 64), nn.Linear(64, 10))
with planted(get_model=two_layers):
    full, half = (growth('any', o) for o in (torch.float32, torch.bfloat16))
    assert (full['mib_an_image']*2**20, half['mib_an_image']*2**20)==approx((4*(32*32+64), 2*(32*32+64)))
    assert half['mib_besides']>full['mib_besides']                          # copies of the weights

# %% Questions to the device are counted
x = torch.ones(3)
with AskMode() as asked: (x*2).sum()
assert asked.n==0
with AskMode() as asked: x.sum().item(), float(x[0]), bool(x[0]>0)
assert asked.n==3

# %% Steps are skipped until the scale fits
tried = fp16_steps(2.**30, n=4)
assert not tried.moved.any() and tried.scale.tolist()==[2.**o for o in (30, 29, 28, 27)]
assert fp16_steps(2.**10, n=2).moved.all()
assert tried.asked_by_step.tolist()==[1]*4 and tried.asked_by_get_scale.tolist()==[1]*4

# %% Places of waits name no folder of this machine
from fastai.torch_core import apply
found = []
class LookCallback(Callback):
    def before_fit(self): found.append(fastai_line())
    def after_fit(self): apply(lambda _: found.append(fastai_line()), [1])  # by way of torch_core.py
learn = make().add_cb(LookCallback())
with learn.no_bar(), learn.no_logging(): learn.fit(1)
assert len(found)==2 and len({*found})==1 and found[0].startswith('callback/core.py: ') and 'event_name' in found[0]
assert fastai_line()=='outside fastai'

# %% Waits are counted by step and by line
class AskCallback(Callback):
    def after_loss(self):
        if self.training: warnings.warn('called a synchronizing CUDA operation')
    def after_pred(self): warnings.warn('something else')
modes, make_learner = [], make
with (patch.object(torch.cuda, 'set_sync_debug_mode', modes.append), redirect_stderr(io.StringIO()),
      planted(make=lambda: make_learner().add_cb(AskCallback()))):
    found = waits('fp32')
    assert modes==['warn', 'default', 'default']
    assert list(found.values())==[1.] and next(iter(found)).startswith('callback/core.py: ')
