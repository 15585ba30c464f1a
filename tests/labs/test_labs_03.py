"What lab 03 counts by hand, checked where the answer is known without it"
import math
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from fastai.optimizer import Adam
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpubench.core import wait_for
from gpubench.models import get_model
from gpubench.stats import Interval
from test_labs import cell_of

lab = '03_model_size'

def defined(*starts, **known):
    "What these cells define, the rest of the lab left out"
    known |= dict(torch=torch, pd=pd, Adam=Adam, wait_for=wait_for, shape=(1, 28, 28), seed=0, get_model=get_model)
    for o in starts: exec(cell_of(lab, o), known)
    return SimpleNamespace(**known)

def counted(work):
    found = defined('class CountMode', TorchDispatchMode=TorchDispatchMode, tree_leaves=tree_leaves)
    with found.CountMode() as counter: work()
    return counter.n_ops, counter.n_bytes

def test_operations_and_bytes():
    a, b = torch.zeros(8, 4), torch.zeros(4, 2)
    assert counted(lambda: a @ b)==(1, 4*(8*4+4*2+8*2))          # both are read, the product is written
    assert counted(lambda: a.add_(1))==(1, 4*2*32)               # read and written
    assert counted(lambda: a.t()[1:].reshape(-1, 2)[0])==(1, 4*2*24)       # the copy that the reshape needs
    assert counted(lambda: (a.t(), a[1:], a.view(4, 8), torch.empty(9)))==(0, 0)

def test_bytes_on_meta_are_those_on_the_cpu():
    def step(device):
        found = defined('def new_model', 'class Step').Step('cnn_small', device, 4)
        found()
        return counted(found.update), counted(found.gradients)[0]
    assert step('meta')[0]==step('cpu')[0]
    assert abs(step('meta')[1]-step('cpu')[1])<=3                # a backend may name an operation in another way

def test_operations_do_not_depend_on_the_batch():
    known = dict(TorchDispatchMode=TorchDispatchMode, tree_leaves=tree_leaves)
    found = defined('def new_model', 'class Step', 'class CountMode', **known)
    def ops(n):
        step = found.Step('cnn_medium', 'meta', n)
        step()
        with found.CountMode() as counter: step()
        return counter.n_ops, counter.n_bytes
    (few, few_bytes), (many, many_bytes) = ops(4), ops(64)
    assert few==many and many_bytes>3*few_bytes

def test_what_a_forward_pass_keeps():
    "A linear layer keeps its input, a ReLU its result, and no parameter counts"
    def known(*layers): return dict(get_model=lambda name, **kw: torch.nn.Sequential(torch.nn.Flatten(), *layers))
    def kept(*layers):
        space = dict(torch=torch, pd=pd, shape=(1, 8, 8), seed=0) | known(*layers)
        exec(cell_of(lab, 'def new_model'), space)
        source = cell_of(lab, 'def kept_mib').split('\n\nmemory =')[0]
        exec(source, space)
        return space['kept_mib']('any', n=4)*2**20
    assert kept(torch.nn.Linear(64, 32))==4*64
    assert kept(torch.nn.Linear(64, 32), torch.nn.ReLU())==4*(64+32)
    assert kept(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))==4*(64+32)   # both keep the same tensor

@pytest.mark.parametrize('lo,hi,words', [(.9, 1.2, 'mostly a fixed part'), (1.6, 2.1, 'mostly the images'), (1.3, 1.8, 'open'),
                                         (math.nan, math.nan, 'open')])
def test_what_rules_a_step(lo, hi, words):
    source = cell_of(lab, 'def what_rules').split('\n\nrows')[0]
    space = {}
    exec(source, space)
    assert space['what_rules'](Interval(1.4, lo, hi, .95))==words

def test_times_wait_for_the_device():
    "A step whose orders are given at once and which is done later"
    source, log = cell_of(lab, 'def times_ms'), []
    now = iter(range(1000))
    space = dict(perf_counter=lambda: next(now), wait_for=lambda d: log.append('wait'), pd=pd, torch=torch)
    exec(source, space)
    def times_ms(seconds): return space['times_ms'](lambda: log.append('step'), 'cpu', seconds=seconds)
    assert times_ms(.5)==dict(ordered_ms=1e3, done_ms=2e3)
    assert log==['wait', 'step', 'wait']                         # one step at least, from an idle device
    times_ms(9)
    assert log[3:]==['wait', 'step', 'wait']*3                   # it looks at the clock four times a round
