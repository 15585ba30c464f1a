"What lab 07 claims about rounding, scalers and int8: its own functions, on numbers whose answer is known"
import sys
import warnings

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from fastai.callback.core import Callback
from fastai.torch_core import apply
from torch import nn

from gpubench.models import get_model
from test_labs import cell_of, definitions

from helpers import root

lab = root/'nbs'/'labs'/'07_precision.ipynb'
constants = {'types', 'precisions', 'INT8', 'LAYERS', 'WANTED', 'low'}    # assigned by name; all else that a cell does is left out


@pytest.fixture(scope='module')
def defined(tmp_path_factory):
    return definitions('07_precision', *constants, here='cpu', kind='cpu', on_gpu=False, folder=tmp_path_factory.mktemp('lab07'))


# ---- rounding

def test_bits_of_the_types(defined):
    found = {k: (o['bits'], o['exponent'], o['fraction']) for k,o in ((k, defined['bits'](o)) for k,o in defined['types'].items())}
    assert found==dict(float32=(32, 8, 23), float16=(16, 5, 10), bfloat16=(16, 8, 7))

def test_a_sum_of_many_small_numbers_stops(defined):
    assert [defined['add_up'](o) for o in (torch.float16, torch.bfloat16)]==[4., .5]
    assert defined['add_up'](torch.float32)==pytest.approx(10, rel=1e-3)

@pytest.mark.parametrize('x,dtype,rounded', [(1+1/256, torch.bfloat16, 1.), (1+3/256, torch.bfloat16, 1+4/256), (2+1/128, torch.bfloat16, 2.),
    (65519., torch.float16, 65504.), (65520., torch.float16, float('inf')), (2.9e-8, torch.float16, 0.)])
def test_what_the_text_says_of_rounding(x, dtype, rounded): assert torch.tensor(x).to(dtype).item()==rounded

def test_weights_that_do_not_move(defined):
    stuck = defined['stuck_frac']
    stuck.__globals__['weights'] = torch.tensor([1., 1., .01, .01])
    assert stuck(torch.bfloat16, 1e-3)==.5 and stuck(torch.float32, 1e-3)==0

def test_instructions_of_a_cpu(defined):
    assert defined['cpu_flags']('model name : x\nflags\t\t: fpu avx2 avx512_bf16 avx_vnni_int8\n')==['avx2', 'avx512_bf16']
    assert defined['cpu_flags']('Features : fp asimddp bf16')==['asimddp', 'bf16']
    assert defined['cpu_flags']('') is None and defined['cpu_flags']('flags : fpu')==[]


# ---- what was compared

def visits(**ms):
    return pd.DataFrame([dict(precision=p, status='ok', step_ms=x*(1+.01*i), valid_loss=.1*x+.001*i, accuracy=.9, seed=i)
                         for p,x in ms.items() for i in range(3)])

def test_speed_against_fp32(defined):
    df = pd.concat([visits(bf16=1., fp32=2., ieee=2.), pd.DataFrame([dict(precision='fp16', status='skipped')])])
    table = defined['speed'](defined['small'](df)).set_index('precision')
    assert table.index.tolist()==['fp32', 'ieee', 'bf16'] and table.times_as_fast.round(3).tolist()==[1., 1., 2.]
    assert table.verdict.tolist()==['', 'not distinguishable', 'faster than fp32']

def test_loss_against_fp32(defined):
    table = defined['learned'](visits(bf16=1., fp32=2.))
    assert table.over_fp32.bf16==pytest.approx(.5, abs=.01) and table.verdict.bf16=='lower than fp32'

def test_gains_of_types_and_layouts(defined):
    rows = [dict(way=w, status='ok', step_ms=ms+.01*i, images_per_s=1e3/ms, peak_allocated_mib=mib)
            for w,ms,mib in (('fp32', 4., 800), ('bf16', 2., 500)) for i in range(3)]
    space = defined['gains'].__globals__
    space['ways'] = {'fp32': 0, 'bf16': 0}
    table = defined['gains'](pd.DataFrame(rows))
    assert table.of_fp32.bf16==.625 and table.times_as_fast.bf16==pytest.approx(2, abs=.01) and table.verdict.bf16=='faster'


def test_visits_that_failed_are_left_out_in_words(defined, capsys):
    rows = [dict(precision=p, channels_last=c, status='ok', error=None) for p,c in (('fp32', False), ('bf16', False), ('bf16', True))]
    rows.append(dict(precision='ieee', channels_last=False, status='oom', error='no memory left'))
    found = defined['with_ways'](pd.DataFrame(rows))
    assert found.way.tolist()==['fp32', 'bf16', 'bf16, channels last']
    assert capsys.readouterr().out=='ieee: oom. no memory left\n'
    assert not len(defined['with_ways'](pd.DataFrame(rows[1:])))                              # no fp32 to compare with


# ---- types that were at work

def test_to_bf16_changes_nothing_on_a_cpu(defined):
    learn = defined['make']()
    learn.to_bf16()
    assert defined['types_seen'](learn)=={'float32': 5}

def test_memory_that_the_forward_pass_keeps(defined):
    "Linear layers keep their inputs, in the type in which they computed"
    defined['growth'].__globals__['get_model'] = lambda *a, **kw: nn.Sequential(nn.Flatten(), nn.Linear(32*32, 64), nn.Linear(64, 10))
    try: found = {o: defined['growth']('any', o) for o in (torch.float32, torch.bfloat16)}
    finally: defined['growth'].__globals__['get_model'] = get_model
    assert found[torch.float32]['mib_an_image']*2**20==pytest.approx(4*(32*32+64))
    assert found[torch.bfloat16]['mib_an_image']*2**20==pytest.approx(2*(32*32+64))
    assert found[torch.bfloat16]['mib_besides']>found[torch.float32]['mib_besides']           # copies of the weights


# ---- the scaler

def test_questions_to_the_device_are_counted(defined):
    x = torch.ones(3)
    with defined['AskMode']() as asked: (x*2).sum()
    assert asked.n==0
    with defined['AskMode']() as asked: x.sum().item(), float(x[0]), bool(x[0]>0)
    assert asked.n==3

def test_steps_are_skipped_until_the_scale_fits(defined):
    tried = defined['fp16_steps'](2.**30, n=4)
    assert not tried.moved.any() and tried.scale.tolist()==[2.**o for o in (30, 29, 28, 27)]
    assert defined['fp16_steps'](2.**10, n=2).moved.all()
    assert tried.asked_by_step.tolist()==[1]*4 and tried.asked_by_get_scale.tolist()==[1]*4

def test_shares_of_gradients(defined):
    g = torch.tensor([1e-9, 1e-3, 1., 1e5])
    assert defined['in_float16'](g, 1.)==(.25, .25) and defined['in_float16'](g, 2.**16)==(0., .5)

def test_places_of_waits_name_no_folder_of_this_machine(defined):
    found = []
    class LookCallback(Callback):
        def before_fit(self): found.append(defined['fastai_line']())
        def after_fit(self): apply(lambda _: found.append(defined['fastai_line']()), [1])        # by way of torch_core.py
    learn = defined['make'](cbs=LookCallback())
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert len(found)==2 and len({*found})==1 and found[0].startswith('callback/core.py: ') and 'event_name' in found[0]
    assert defined['fastai_line']()=='outside fastai'


def test_waits_are_counted_by_step_and_by_line(defined, monkeypatch):
    class AskCallback(Callback):
        def after_loss(self):
            if self.training: warnings.warn('called a synchronizing CUDA operation')
        def after_pred(self): warnings.warn('something else')
    modes, make = [], defined['make']
    monkeypatch.setattr(torch.cuda, 'set_sync_debug_mode', modes.append)
    monkeypatch.setitem(defined, 'make', lambda: make(cbs=AskCallback()))
    found = defined['waits']('fp32')
    assert modes==['warn', 'default', 'default']
    assert list(found.values())==[1.] and next(iter(found)).startswith('callback/core.py: ')


# ---- int8

def test_whole_numbers(defined):
    w = torch.randn(8, 3, 3, 3)*torch.logspace(-2, 0, 8)[:, None, None, None]
    for each in (False, True):
        q, scale = defined['to_int8'](w, each)
        assert q.dtype==torch.int8 and q.abs().max()==127 and (q*scale-w).abs().max()<=.51*torch.as_tensor(scale).max()
    assert defined['away'](w, True)<.7*defined['away'](w, False)

def test_every_layer_is_int8_and_the_file_a_quarter(defined, tmp_path):
    for o in ('onnx', 'onnxruntime', 'onnxscript'): defined[o] = pytest.importorskip(o)
    torch.manual_seed(0)
    d, x = defined, torch.randn(16, 1, 28, 28)
    net = get_model('cnn_medium', n_in=1).eval()
    d['to_onnx'](net, tmp_path/'a.onnx', x[:2])
    d['quantise'](tmp_path/'a.onnx', tmp_path/'b.onnx', [x.numpy()])
    (whole, ops), (small, ops8) = d['session'](tmp_path/'a.onnx'), d['session'](tmp_path/'b.onnx')
    assert sum(ops.values())==sum(ops8.values())==5 and not d['INT8'] & set(ops) and set(ops8)<=d['INT8']
    assert (tmp_path/'b.onnx').stat().st_size<.3*(tmp_path/'a.onnx').stat().st_size
    with torch.no_grad(): right = net(x).numpy()
    for session,off in ((whole, 1e-5), (small, .06)):
        for n in (1, 16): assert abs(session.run(None, dict(x=x[:n].numpy()))[0]-right[:n]).max()<off*abs(right).max()

def test_accuracy_before_and_after(defined):
    labels = np.arange(100)%10
    before, after = labels.copy(), labels.copy()
    before[:4], after[2:7] = -1, -2                    # right before: 4 to 99; now: 0, 1 and 7 to 99; 2 and 3 are wrong twice, otherwise
    found = defined['judged'](after, before, labels)
    assert (found['accuracy'], found['lost'], found['won'], found['n_images'])==(.95, 3, 2, 100)
    assert found['same_answer']==.93
    assert (round(found['accuracy_lo'], 3), round(found['accuracy_hi'], 3))==(.888, .978)      # Wilson 1927, for 95 of 100

def test_without_the_packages_the_lab_goes_on(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'onnxruntime', None)
    space = dict(display=None, torch=torch, my_guess_size=None, check_guess=lambda *a, **kw: a)
    exec(cell_of('07_precision', 'try: import onnx'), space)
    said = capsys.readouterr().out
    assert space['has_int8'] is False and said.count('\n')==1 and 'pip install onnxruntime onnx onnxscript' in said
    cells = [o.source for o in nbformat.read(lab, 4).cells if o.cell_type=='code' and 'has_int8' in o.source]
    for o in cells[1:]: exec(o, space)
    assert len(cells)==7

def test_what_was_timed_before_has_come_to_rest():
    "A rest, a call that does not count, then the median of the others"
    log, now = [], [0.]
    def run(x):
        now[0] += x.pop(0)/1e3
        log.append('call')
    space = dict(pd=pd, sleep=lambda s: log.append(s), perf_counter=lambda: now[0])
    exec(cell_of('07_precision', 'def timed_ms'), space)
    assert space['timed_ms'](run, [90., 1., 2., 9., 3., 4.])==pytest.approx(3) and log==[.1]+6*['call']
    log.clear()
    assert space['timed_ms'](run, [90., 1.], rest_s=0, times=1)==pytest.approx(1) and log==[0, 'call', 'call']

def test_the_extra_holds_what_the_lab_imports():
    import configparser
    parser = configparser.ConfigParser(delimiters=['='], interpolation=None)
    parser.read(root/'settings.ini', encoding='utf-8')
    named = [o.split('>')[0] for o in parser['DEFAULT']['int8_requirements'].split()]
    [line] = [o for o in cell_of('07_precision', 'try: import onnx').splitlines() if o.startswith('try: import ')]
    assert sorted(named)==sorted(line.removeprefix('try: import ').split(', '))
