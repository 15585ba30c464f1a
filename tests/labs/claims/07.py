# %% Bits of the types, and sums that stop growing
import math
from pytest import approx
assert formats.exponent.astype(int).tolist()==[8, 8, 5, 8] and formats.fraction.astype(int).tolist()==[23, 7, 10, 10]
assert torch.tensor(formats.smallest.float16).half().item()>0 and torch.tensor(formats.smallest.float16/2.01).half().item()==0
assert (sums['float16'], sums['bfloat16'])==(4., .5) and sums['float32']==approx(10, rel=1e-3)

# %% What the text says of rounding
for number,dtype,rounded in ((2+1/128, torch.bfloat16, 2.), (2.9e-8, torch.float16, 0.), (3.1e-8, torch.float16, 2.**-24), (.5*2**18, torch.float16, math.inf)):
    assert torch.tensor(number).to(dtype).item()==rounded, number

# %% Everything in float16 is NaN from the second step on, and in bfloat16 many weights stand still
assert not math.isnan(cast['float16']['losses'][0]) and all(map(math.isnan, cast['float16']['losses'][1:])) and cast['float16']['right']<.2
assert cast['bfloat16']['stuck']>2*cast['float32']['stuck'] and cast['bfloat16']['right']>.85
assert [len(o['losses']) for o in cast.values()]==[64]*3

# %% Weights that do not move, gradients that vanish, squares that do
assert stuck_frac(torch.tensor([1., 1., .01, .01]), 1e-3)==dict(float32=0, bfloat16=.5, float16=0)
assert in_float16(torch.tensor([1e-9, 1e-3, 1., 1e5]))==(.25, .25)
g = gradients(make()[1], *next(batches(make()[0].train)))
assert (g!=0).all() and in_float16(.001*g**2)[0]>.9>in_float16(g)[0] and torch.tensor(1e-8).half()==0

# %% Mixed precision learns as float32 does, with each type, and the library's bf16 is the one by hand
assert list(found)==['float32', 'bfloat16', 'float16, no scaler', 'float16, scaler'] and all(o[2]>.85 for o in found.values())
assert {str(p.dtype) for o in found.values() for p in o[0].parameters()}=={'torch.float32'}
assert record['dtype_seen']=='bfloat16' and record['accuracy']==approx(found['bfloat16'][2]) and record['valid_loss']==approx(found['bfloat16'][3], rel=1e-4)
assert found['bfloat16'][3]!=found['float32'][3] and not found['bfloat16'][1].skipped.any()

# %% The function that students write, and its use
from replay import again, planted
def mine(grads, scale, n_good, grow_after=2000): return (None, scale/2, 0) if not torch.cat([o.flatten() for o in grads]).isfinite().all() \
    else ([o/scale for o in grads], scale if n_good+1<grow_after else 2*scale, (n_good+1)%grow_after)
from gpubench.course.checks import check
assert check('07.unscaled', mine).ok
with planted(unscaled=mine):
    again('unscaled = ')
    assert unscaled is mine and mixed(torch.float16, 2.**28, n_epoch=1)[1].skipped.tolist()[:3]==[True]*3

# %% Steps are skipped until the scale fits
few = mixed(torch.float16, 2.**30, n_epoch=1)[1]
assert few.skipped.tolist()[:4]==[True]*4 and few.scale.tolist()[:4]==[2.**o for o in (30, 29, 28, 27)]
assert not mixed(torch.float16, 2.**10, n_epoch=1)[1].skipped.any()
before = flat(mixed(torch.float16, 2.**60, n_epoch=1)[0])                    # every step is skipped
assert torch.equal(before, flat(make()[1]))

# %% `to_bf16` changes nothing on a CPU
assert types_seen(Learner(*make()).to_bf16())=={'float32': 5}

# %% A product's error is that of its type
fine, coarse = product(torch.float32, 'ieee', 128, 2), product(torch.bfloat16, 'ieee', 128, 2)
assert fine['error']<1e-5 and 1e-3<coarse['error']<1e-2

# %% Ratios are taken within rounds: a slow round does no harm
made = pd.DataFrame([dict(device='cuda', gpu='A GPU', size=128, way=w, visit=i, step_ms=ms*slow, peak_allocated_mib=mib) for i,slow in enumerate((1., 3., 1.1))
                     for w,ms,mib in (('fp32', 4., 800), ('bf16', 2., 500))])
seen = gains(made.assign(way=pd.Categorical(made.way, order))).loc['A GPU', 128]
assert seen.index.tolist()==['fp32', 'bf16'] and seen.mib_of_fp32.bf16==.625
assert seen.times_as_fast.bf16==approx(2) and seen.lo.bf16==approx(2) and seen.verdict.tolist()==['', 'faster']

# %% Losses are compared seed by seed
made = pd.DataFrame([dict(precision=p, seed=s, step_ms=ms+.01*s, valid_loss=loss*(1+s)) for s in range(3) for p,ms,loss in
                     (('bf16', 2., .11), ('fp32', 4., .1))])
row = learned(made).loc['bf16']
assert row.loss_over_fp32==approx(1.1) and row.loss_lo==approx(1.1) and row['loss']=='higher' and row.speed=='faster'
