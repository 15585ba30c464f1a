# %% Without the packages the notebook goes on
import io, sys
from contextlib import redirect_stdout
from tempfile import TemporaryDirectory
from unittest.mock import patch
import numpy as np
from pytest import approx
from replay import again, planted
with patch.dict(sys.modules, onnxruntime=None), redirect_stdout(io.StringIO()) as said, planted(my_guess_size=None, my_guess_speed=None):
    again('try: import onnx')
    assert has_int8 is False and said.getvalue().count('\n')==1 and 'pip install onnxruntime onnx onnxscript' in said.getvalue()
    later = [o for o in In if 'has_int8' in o and not o.startswith(('# %%', repr('# %%')[:5])) and not o.startswith('try: import onnx')]
    for o in later: exec(o)
    assert len(later)==7

# %% Linear layers alone are hardly anything of a network for images
assert times_smaller(net, nn.Linear)<1.01 and times_smaller(net, nn.Linear, nn.Conv2d)>3.9
assert times_smaller(nn.Linear(10, 10, bias=False), nn.Linear)==4

# %% Whole numbers
w = torch.randn(8, 3, 3, 3)*torch.logspace(-2, 0, 8)[:, None, None, None]
for each in (False, True):
    q, scale = to_int8(w, each)
    assert q.dtype==torch.int8 and q.abs().max()==127 and (q*scale-w).abs().max()<=.51*torch.as_tensor(scale).max(), each
assert rounding_error(w, True)<.7*rounding_error(w, False)

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
        quantize(whole, small, [images_in.numpy()])
        for path,off in ((whole, 1e-5), (small, .06)):
            for n in (1, 16):
                got = session(path)[0].run(None, dict(x=images_in[:n].numpy()))[0]
                assert abs(got-right[:n]).max()<off*abs(right).max(), (path, n)

# %% Accuracy before and after
labels = np.arange(100)%10
before, after = labels.copy(), labels.copy()
before[:4], after[2:7] = -1, -2                    # right before: 4 to 99; now: 0, 1 and 7 to 99; 2 and 3 are wrong twice, otherwise
found = judged(after, before, labels)
assert (found['accuracy'], found['lost'], found['won'], found['n_images'])==(.95, 3, 2, 100)
assert found['same_answer']==.93
assert (round(found['accuracy_lo'], 3), round(found['accuracy_hi'], 3))==(.888, .978)      # Wilson 1927, for 95 of 100

# %% What was timed before has come to rest: a rest, a call that does not count, then the median of the others
log, now = [], [0.]
def run_ms(x):
    now[0] += x.pop(0)/1e3
    log.append('call')
with planted(sleep=log.append, perf_counter=lambda: now[0]):
    assert timed_ms(run_ms, [90., 1., 2., 9., 3., 4.])==approx(3) and log==[.1]+6*['call']
    log.clear()
    assert timed_ms(run_ms, [90., 1.], rest_s=0, times=1)==approx(1) and log==[0, 'call', 'call']
