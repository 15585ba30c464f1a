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

# %% What the text says of the recorded H200, and of the H100 at 224 px
theirs = pd.DataFrame(lab.recorded('07_precision.jsonl'))
if len(theirs):
    big_ones, small = theirs[theirs['size']==128], theirs[theirs.loader=='memory']
    def way(p, last=False): return big_ones[(big_ones.precision==p) & (big_ones.channels_last==last)].sort_values('visit')
    assert way('bf16', True).step_ms.round(1).tolist()==[13.7, 17.0, 13.3]
    assert way('bf16', True).optimizer_ms.between(3.1, 5.1).all() and way('fp16').optimizer_ms.between(4.95, 7.7).all()
    for p in ('ieee', 'fp32', 'tf32', 'bf16'): assert way(p).optimizer_ms.between(1.3, 1.5).all(), p
    passes = {k: way(*k).forward_ms+way(*k).backward_ms for k in (('bf16', True), ('bf16', False), ('fp16', False))}
    assert passes['bf16', True].between(9, 10.3).all() and passes['bf16', False].between(15, 15.2).all() and passes['fp16', False].between(12.6, 14).all()
    r, at_224 = (table.sort_index().loc[o] for o in (('NVIDIA H200', 128), ('NVIDIA H100 80GB HBM3', 224)))
    assert r.mib_of_fp32.bf16==approx(.65, abs=.01) and at_224.mib_of_fp32.bf16==approx(.61, abs=.01)
    assert r.verdict['bf16, channels last']==r.verdict.fp16=='not distinguishable'
    assert at_224.times_as_fast.bf16==approx(1.1, abs=.005) and 1/at_224.times_as_fast.ieee==approx(1.7, abs=.05)
    assert at_224.times_as_fast['bf16, channels last']==approx(1.98, abs=.005) and at_224.verdict['bf16, channels last']=='faster'
    slow, *others = [small[(small.precision=='fp32') & (small.seed==o)].iloc[0] for o in (2, 0, 1)]
    phases = [o for o in small if o in 'wait_ms copy_ms transform_ms forward_ms loss_ms backward_ms optimizer_ms other_ms'.split()]
    assert round(slow.step_ms, 1)==4.8 and (slow[phases]>1.2*others[0][phases]).all() and (slow[phases]>1.2*others[1][phases]).all()
    assert set(learned(small).speed)=={'not distinguishable'}
