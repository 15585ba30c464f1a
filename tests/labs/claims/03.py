# %% Operations and bytes, where the answer is known without counting
def counted(work):
    with CountMode() as counter: work()
    return counter.n_ops, counter.n_bytes
a, b = torch.zeros(8, 4), torch.zeros(4, 2)
assert counted(lambda: a @ b)==(1, 4*(8*4+4*2+8*2))              # both are read, the product is written
assert counted(lambda: a.add_(1))==(1, 4*2*32)                   # read and written
assert counted(lambda: a.t()[1:].reshape(-1, 2)[0])==(1, 4*2*24) # the copy that the reshape needs
assert counted(lambda: (a.t(), a[1:], a.view(4, 8), torch.empty(9)))==(0, 0)

# %% Bytes on meta are those on the CPU
def counted_on(device):
    step = Step('cnn_small', device, 4)
    step()
    return counted(step.update), counted(step.gradients)[0]
(update, ops), (cpu_update, cpu_ops) = counted_on('meta'), counted_on('cpu')
assert update==cpu_update and abs(ops-cpu_ops)<=3                # a backend may name an operation in another way

# %% Operations do not depend on the batch
few, many = (count('cnn_medium', n) for n in (4, 64))
assert [few[f'{o}_ops'] for o in ('gradients', 'update')]==[many[f'{o}_ops'] for o in ('gradients', 'update')]
assert many['gradients_mib']>3*few['gradients_mib'] and many['update_mib']==few['update_mib']

# %% What a forward pass keeps: a linear layer its input, a ReLU its result, and no parameter counts
from torch import nn
from replay import planted
def kept(*layers):
    with planted(shape=(1, 8, 8), get_model=lambda name, **kw: nn.Sequential(nn.Flatten(), *layers)): return kept_mib('any')*2**20
assert kept(nn.Linear(64, 32))==4*64
assert kept(nn.Linear(64, 32), nn.ReLU())==4*(64+32)
assert kept(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))==4*(64+32)      # both keep the same tensor

# %% What rules a step
from math import nan
from gpubench.stats import Interval
for lo,hi,words in ((.9, 1.2, 'mostly a fixed part'), (1.6, 2.1, 'mostly the images'), (1.3, 1.8, 'open'), (nan, nan, 'open')):
    assert what_rules(Interval(1.4, lo, hi, .95))==words, (lo, hi)

# %% Times wait for the device: a step whose orders are given at once and which is done later
log, now = [], iter(range(1000))
def log_step(): log.append('step')
with planted(perf_counter=lambda: next(now), wait_for=lambda d: log.append('wait')):
    assert times_ms(log_step, 'cpu', seconds=.5)==dict(ordered_ms=1e3, done_ms=2e3)
    assert log==['wait', 'step', 'wait']                         # one step at least, from an idle device
    times_ms(log_step, 'cpu', seconds=9)
    assert log[3:]==['wait', 'step', 'wait']*3                   # it looks at the clock four times a round
