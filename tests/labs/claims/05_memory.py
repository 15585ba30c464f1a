# %% What a forward pass keeps is counted once, and without weights
from pytest import approx
from replay import planted
linear = nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU())
kept = Kept(linear)
with kept: linear(torch.randn(2, 8, requires_grad=False))
assert sum(o.nbytes() for o in kept.kept.values())==4*(2*8+2*4)      # the input, and what the ReLU put out
assert 1.5<per_image_mib<2 and parts['activations']==approx(bs*per_image_mib) and parts.sum()-parts['activations']==approx(4*w)

# %% Layers add up; activations lie at the beginning and weights at the end
assert layers.activations.sum()==approx(kept_mib(net, x)/len(x)*bs, rel=.05) and layers['weights and Adam'].sum()==approx(4*w)
assert layers.activations.idxmax()=='layer1' and layers['weights and Adam'].idxmax()=='layer4'

# %% The live count: a tensor counts until its last view is gone, and fake tensors count as real ones
with CountBytes() as count:
    a = torch.zeros(256)
    view = a[:2]
    del a
    b = torch.zeros(256)
    del b, view
    c = torch.zeros(64)
assert count.peak==2048 and sum(count.alive.values())==256
class NoFakes:
    def __enter__(self): pass
    def __exit__(self, *_): pass
assert peak_mib(make, 4, (3, 64, 64))==approx(peak_mib(make, 3, (3, 64, 64))+per_image_mib, rel=.03)
faked = peak_mib(make, 4, (3, 32, 32))
with planted(FakeTensorMode=NoFakes): assert peak_mib(make, 4, (3, 32, 32))==approx(faked, rel=.01)

# %% A count is a lower bound, and what real trainings take beyond it is much the same for small ones
assert len(real)>=10 and (real.more_mib>0).all() and real.more_mib[real.bs<=32].between(60, 90).all()
large = real[real.predicted_mib>500]
assert len(large) and (large.peak_allocated_mib/large.predicted_mib<1.3).all()

# %% Recomputing saves, blocks save more than parts
of_it = saved.peak_mib/saved.peak_mib.iloc[0]
assert of_it['recompute layer1']<.9 and of_it['recompute each of their blocks']<of_it['recompute all of these']

# %% Over a step, memory climbs in the forward pass and comes down in the backward pass; the peak lies in between
forward, backward = (o-start for o in phase_ends)
assert line.iloc[forward-1]>2*line.iloc[0] and line.iloc[backward]<line.iloc[0]*1.1 and forward<=line.idxmax()<(forward+backward)/2
assert line.max()==approx(peaks[bs], rel=.01) and line.iloc[backward:].max()<line.max()/2

# %% A card of 8 GB: the largest batch whose count fits, and twice as many images don't
assert fixed+predicted_bs*per_image<1024*limit_gib<fixed+2*predicted_bs*per_image
