# %% Bits of the types
import io, sys
from contextlib import redirect_stderr, redirect_stdout
from tempfile import TemporaryDirectory
from unittest.mock import patch
from pytest import approx
from torch import nn
from replay import again, planted
assert {k: tuple(bits(o)[n] for n in ('bits', 'exponent', 'fraction')) for k,o in types.items()}==dict(
    float32=(32, 8, 23), float16=(16, 5, 10), bfloat16=(16, 8, 7))

# %% A sum of many small numbers stops
assert (sums['float16'], sums['bfloat16'])==(4., .5) and sums['float32']==approx(10, rel=1e-3)

# %% What the text says of rounding
for number,dtype,rounded in ((1+1/256, torch.bfloat16, 1.), (1+3/256, torch.bfloat16, 1+4/256), (2+1/128, torch.bfloat16, 2.),
                             (65519., torch.float16, 65504.), (65520., torch.float16, math.inf), (2.9e-8, torch.float16, 0.)):
    assert torch.tensor(number).to(dtype).item()==rounded, number

# %% Weights that do not move
with planted(weights=torch.tensor([1., 1., .01, .01])):
    assert stuck_frac(torch.bfloat16, 1e-3)==.5 and stuck_frac(torch.float32, 1e-3)==0

# %% Instructions of a CPU
assert cpu_flags('model name : x\nflags\t\t: fpu avx2 avx512_bf16 avx_vnni_int8\n')==['avx2', 'avx512_bf16']
assert cpu_flags('Features : fp asimddp bf16')==['asimddp', 'bf16']
assert cpu_flags('') is None and cpu_flags('flags : fpu')==[]

# %% Speed and loss against fp32
def visits(**ms):
    return pd.DataFrame([dict(precision=p, status='ok', step_ms=v*(1+.01*i), valid_loss=.1*v+.001*i, accuracy=.9, seed=i)
                         for p,v in ms.items() for i in range(3)])
df = pd.concat([visits(bf16=1., fp32=2., ieee=2.), pd.DataFrame([dict(precision='fp16', status='skipped')])])
table = speed(small(df)).set_index('precision')
assert table.index.tolist()==['fp32', 'ieee', 'bf16'] and table.times_as_fast.round(3).tolist()==[1., 1., 2.]
assert table.verdict.tolist()==['', 'not distinguishable', 'faster than fp32']
table = learned(visits(bf16=1., fp32=2.))
assert table.over_fp32.bf16==approx(.5, abs=.01) and table.verdict.bf16=='lower than fp32'

# %% Gains of types and layouts
df = pd.DataFrame([dict(way=w, status='ok', step_ms=ms+.01*i, images_per_s=1e3/ms, peak_allocated_mib=mib)
                   for w,ms,mib in (('fp32', 4., 800), ('bf16', 2., 500)) for i in range(3)])
table = gains(df)
assert table.of_fp32.bf16==.625 and table.times_as_fast.bf16==approx(2, abs=.01) and table.verdict.bf16=='faster'

# %% Visits that failed are left out in words
rows = [dict(precision=p, channels_last=c, status='ok', error=None) for p,c in (('fp32', False), ('bf16', False), ('bf16', True))]
rows.append(dict(precision='ieee', channels_last=False, status='oom', error='no memory left'))
with redirect_stdout(io.StringIO()) as out: found = with_ways(pd.DataFrame(rows))
assert found.way.tolist()==['fp32', 'bf16', 'bf16, channels last'] and out.getvalue()=='ieee: oom. no memory left\n'
with redirect_stdout(io.StringIO()): assert not len(with_ways(pd.DataFrame(rows[1:])))       # no fp32 to compare with

# %% `to_bf16` changes nothing on a CPU
learn = make()
learn.to_bf16()
assert types_seen(learn)=={'float32': 5}

# %% Memory that the forward pass keeps: linear layers keep their inputs, in the type in which they computed
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

# %% Shares of gradients
g = torch.tensor([1e-9, 1e-3, 1., 1e5])
assert in_float16(g, 1.)==(.25, .25) and in_float16(g, 2.**16)==(0., .5)

# %% Places of waits name no folder of this machine
from fastai.torch_core import apply
found = []
class LookCallback(Callback):
    def before_fit(self): found.append(fastai_line())
    def after_fit(self): apply(lambda _: found.append(fastai_line()), [1])  # by way of torch_core.py
learn = make(cbs=LookCallback())
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
      planted(make=lambda: make_learner(cbs=AskCallback()))):
    found = waits('fp32')
    assert modes==['warn', 'default', 'default']
    assert list(found.values())==[1.] and next(iter(found)).startswith('callback/core.py: ')

# %% Whole numbers
w = torch.randn(8, 3, 3, 3)*torch.logspace(-2, 0, 8)[:, None, None, None]
for each in (False, True):
    q, scale = to_int8(w, each)
    assert q.dtype==torch.int8 and q.abs().max()==127 and (q*scale-w).abs().max()<=.51*torch.as_tensor(scale).max(), each
assert away(w, True)<.7*away(w, False)

# %% Every layer is int8, the file a quarter, and nearly every answer the same
if has_int8:
    assert table8.n_layers.tolist()==[5]*3 and table8.n_int8.tolist()==[0, 0, 5]
    assert table8.file_kib.iloc[2]<.3*table8.file_kib.iloc[1]
    assert table8.same_answer.iloc[1]==1 and table8.same_answer.iloc[2]>.95
    assert set(taken.bs)=={1, 64} and set(taken.way)==set(table8.index)

# %% In numbers: ONNX Runtime's float32 is torch's, and int8 is close, at one image and at many
if has_int8:
    torch.manual_seed(0)
    own, images_in = get_model('cnn_medium', n_in=1).eval(), torch.randn(16, 1, 28, 28)
    with torch.no_grad(): right = own(images_in).numpy()
    with TemporaryDirectory() as d:
        whole, small = f'{d}/whole.onnx', f'{d}/small.onnx'
        to_onnx(own, whole, images_in[:2])
        quantise(whole, small, [images_in.numpy()])
        for path,off in ((whole, 1e-5), (small, .06)):
            for n in (1, 16):
                got = session(path)[0].run(None, dict(x=images_in[:n].numpy()))[0]
                assert abs(got-right[:n]).max()<off*abs(right).max(), (path, n)

# %% Accuracy before and after
import numpy as np
labels = np.arange(100)%10
before, after = labels.copy(), labels.copy()
before[:4], after[2:7] = -1, -2                    # right before: 4 to 99; now: 0, 1 and 7 to 99; 2 and 3 are wrong twice, otherwise
found = judged(after, before, labels)
assert (found['accuracy'], found['lost'], found['won'], found['n_images'])==(.95, 3, 2, 100)
assert found['same_answer']==.93
assert (round(found['accuracy_lo'], 3), round(found['accuracy_hi'], 3))==(.888, .978)      # Wilson 1927, for 95 of 100

# %% Without the packages the lab goes on
with patch.dict(sys.modules, onnxruntime=None), redirect_stdout(io.StringIO()) as out, planted(my_guess_size=None):
    again('try: import onnx')
    assert has_int8 is False and out.getvalue().count('\n')==1 and 'pip install onnxruntime onnx onnxscript' in out.getvalue()
    later = [o for o in In if 'has_int8' in o and o[1:5]!='# %%' and not o.startswith('try: import onnx')]
    for o in later: exec(o)
    assert len(later)==6

# %% What was timed before has come to rest: a rest, a call that does not count, then the median of the others
log, now = [], [0.]
def run_ms(x):
    now[0] += x.pop(0)/1e3
    log.append('call')
with planted(sleep=log.append, perf_counter=lambda: now[0]):
    assert timed_ms(run_ms, [90., 1., 2., 9., 3., 4.])==approx(3) and log==[.1]+6*['call']
    log.clear()
    assert timed_ms(run_ms, [90., 1.], rest_s=0, times=1)==approx(1) and log==[0, 'call', 'call']
