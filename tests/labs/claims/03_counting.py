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


# %% A roof has two slopes
made = pd.DataFrame([dict(device='cpu', model=models[0], bs=bs, step_ms=ms) for ms in (1., 2.)])
with planted(tops=pd.DataFrame(dict(peak_flop_per_s=[1e15], peak_bytes_per_s=[1e9]), ['cpu'])):
    found = roofline_frame(made)
    assert (found.flop_per_s[0]/found.flop_per_s[1], found.of_the_roof[0]/found.of_the_roof[1])==(2, 2)
    moved = 2**20*(counts.gradients_mib+counts.update_mib)[models[0]]
    assert abs(found.of_the_roof[0]/(moved/1e-3/1e9)-1)<1e-9      # left of the corner, the bytes a second count
