"""Memory by kind on a CPU with what plugs into a step, and on a GPU against torch's allocator and the driver"""
import gc
import warnings
from functools import partial

import pytest
import torch
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import OptimWrapper
from torch import nn
from torch.utils.data import TensorDataset

from gpubench.run.memory import (OF_TENSORS, STEPS_DOWN, WatchMemoryCallback, explain_oom, largest_batch, memory_by_kind, memory_line,
                                 real_batch, resize_batch, room_bytes, tensor_bytes)
from gpubench.run.twins import Twins, copy_training
from gpubench.step.fast import speed_up

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
GPU = torch.device('cuda:0')
MIB = 2**20


def small_cnn(width=8, n_blocks=1):
    "Blocks of convolution, norm and ReLU"
    sizes = [3, *[width]*n_blocks]
    blocks = [[nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()] for a,b in zip(sizes, sizes[1:])]
    return nn.Sequential(*[o for b in blocks for o in b], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

def make_learner(net=None, size=16, bs=16, n=64, device='cpu', **kwargs):
    "A Learner of a network on random images"
    data = TensorDataset(torch.randn(n, 3, size, size), torch.arange(n)%10)
    dls = DataLoaders.from_dsets(data, data, bs=bs, device=device, num_workers=0)
    return Learner(dls, net or small_cnn(), **(dict(loss_func=CrossEntropyLossFlat()) | kwargs))

def n_hooks(net):
    "Hooks of a network's modules and parameters"
    of_modules = sum(len(o) for m in net.modules() for o in (m._forward_hooks, m._forward_pre_hooks))
    return of_modules+sum(len(p._post_accumulate_grad_hooks or ()) for p in net.parameters())


# ---- on any machine

@pytest.mark.parametrize('cbs', [[MixUp()], [CutMix()], [GradientClip()], [MixedPrecision()], [GradientAccumulation(64)], [GradientAccumulation(10**4)]],
                         ids=lambda o: type(o[0]).__name__)
def test_callbacks_of_a_step(cbs):
    learn = make_learner(cbs=cbs)
    m = memory_by_kind(learn)
    n = sum(o.numel() for o in learn.model.parameters())
    has_state = not (isinstance(cbs[0], GradientAccumulation) and cbs[0].n_acc>64*16)      # it never steps
    assert (m.kinds['weights'], m.kinds['gradients'], m.kinds['optimizer'])==(4*n, 4*n, 2*4*n*has_state)
    assert m.kinds['activations']>2*16*8*16*16*4 and n_hooks(learn.model)==0

def test_sped_up(tmp_path):
    learn, plain = make_learner(), memory_by_kind(make_learner())
    speed_up(learn)
    m = memory_by_kind(copy_training(learn, tmp_path)[0])
    for o in ('weights', 'gradients', 'optimizer', 'activations'): assert m.kinds[o]==pytest.approx(plain.kinds[o], rel=.2), o

def test_no_step_runs():
    class Cancel(Callback):
        def before_batch(self): raise CancelBatchException()
    learn = make_learner(cbs=Cancel())
    with pytest.raises(RuntimeError, match='No training step ran'): memory_by_kind(learn)
    assert n_hooks(learn.model)==0

def test_names_of_a_network():
    "Some have attributes that a callback could shadow, of which fastai warns"
    net = small_cnn()
    net.device, net.batch, net.layers, net.is_on = 'cpu', 1, 2, 3
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        memory_by_kind(make_learner(net))

def test_plain_torch_loader():
    data = TensorDataset(torch.randn(32, 3, 8, 8), torch.arange(32)%10)
    dl = torch.utils.data.DataLoader(data, batch_size=8)
    m = memory_by_kind(Learner(DataLoaders(dl, dl), small_cnn(), nn.CrossEntropyLoss()))
    assert (m.bs, m.kinds['batch'])==(8, 8*3*8*8*4+8*8)

def test_prediction_is_exact_where_only_tensors_count():
    line = memory_line(make_learner)
    for bs in (1, 5, 48):
        twin = make_learner()
        assert line.at(bs).peak_bytes==memory_by_kind(twin, resize_batch(real_batch(twin), bs)).peak_bytes

def test_nothing_is_kept():
    "Neither the network nor its activations outlive their Learner"
    learn = make_learner()
    memory_by_kind(learn)
    del learn
    gc.collect()
    assert not any(isinstance(o, WatchMemoryCallback) for o in gc.get_objects())

def test_nothing_fits(monkeypatch):
    def fails(*_): raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')
    monkeypatch.setattr('gpubench.run.memory.memory_by_kind', fails)
    with pytest.raises(RuntimeError, match='Not even a training step with two items'): memory_line(make_learner)
    def fails(*_): raise RuntimeError('mat1 and mat2 shapes cannot be multiplied')
    monkeypatch.setattr('gpubench.run.memory.memory_by_kind', fails)
    with pytest.raises(RuntimeError, match='cannot be multiplied'): memory_line(make_learner)


# ---- on a GPU

gpu_learner = partial(make_learner, size=64, bs=64, n=512, device=GPU)
def gpu_cnn(): return small_cnn(32, 4).to(GPU)

@needs_gpu
@pytest.mark.parametrize('cbs', [[], [MixedPrecision()], [MixedPrecision(amp_mode='bf16')], [MixUp()]], ids=lambda o: '-'.join(type(c).__name__ for c in o))
def test_gpu_kinds_add_up(cbs):
    m = memory_by_kind(gpu_learner(gpu_cnn(), cbs=cbs))
    for kinds in m.peaks.values():
        assert sum(o or 0 for o in kinds.values())==m.total_bytes==torch.cuda.mem_get_info(GPU)[1]
        assert all(o is None or o>=0 for o in kinds.values()), kinds
    assert m.kinds['activations']>m.peak_bytes/3 and m.kinds['context']>100*MIB
    assert (m.kinds['weights_16bit']>0)==any(isinstance(o, MixedPrecision) for o in cbs)

@needs_gpu
def test_gpu_same_activations_as_on_a_cpu():
    "In fp32, autograd keeps the same tensors; cuDNN's norm keeps some bytes of its own"
    on_gpu, on_cpu = (memory_by_kind(make_learner(small_cnn().to(o), device=o)) for o in (GPU, 'cpu'))
    for o in ('weights', 'gradients', 'optimizer', 'buffers', 'batch'): assert on_gpu.kinds[o]==on_cpu.kinds[o], o
    assert on_gpu.kinds['activations']==pytest.approx(on_cpu.kinds['activations'], rel=.05, abs=4096)

@needs_gpu
def test_gpu_other_tensors_and_layers():
    kept = torch.empty(300*MIB, dtype=torch.uint8, device=GPU)
    m = memory_by_kind(gpu_learner(gpu_cnn()))
    assert 300*MIB<=m.kinds['others']<500*MIB and len(m.layers)==10
    one_map = 64*32*64*64*4
    assert max(m.layers.values())==pytest.approx(one_map, rel=.05)
    del kept

@needs_gpu
def test_gpu_gradients_that_torch_frees():
    m = memory_by_kind(gpu_learner(gpu_cnn(), opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)))
    n = sum(o.numel() for o in gpu_cnn().parameters())
    assert m.peaks['step']['gradients']==4*n and m.peaks['backward']['gradients']<4*n

@needs_gpu
@pytest.mark.parametrize('cbs', [[], [MixedPrecision()]], ids=['fp32', 'fp16'])
def test_gpu_third_size_within_10_percent(cbs):
    def make_twin(): return gpu_learner(gpu_cnn(), cbs=[type(o)() for o in cbs])
    line, twin = memory_line(make_twin, (64, 128)), make_twin()
    measured = memory_by_kind(twin, resize_batch(real_batch(twin), 384))
    assert line.at(384).peak_bytes==pytest.approx(measured.peak_bytes, rel=.1)

@needs_gpu
def test_gpu_largest_batch_within_a_fraction():
    def make_twin(): return gpu_learner(gpu_cnn(), n=10**4)
    total, before = torch.cuda.mem_get_info(GPU)[1], torch.cuda.get_per_process_memory_fraction(GPU)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated(GPU)+2048*MIB)/total, GPU)
    try:
        assert room_bytes(GPU)<=2100*MIB
        found = largest_batch(make_twin)
        assert found.limit_bytes<=2100*MIB and found.verified and found.verified in [int(o*found.predicted) for o in STEPS_DOWN]
        smaller = largest_batch(make_twin, limit_bytes=1024*MIB, line=found.line)
        assert smaller.verified<found.verified<=2.5*smaller.verified
    finally: torch.cuda.set_per_process_memory_fraction(before, GPU)
    assert torch.cuda.get_per_process_memory_fraction(GPU)==before

@needs_gpu
def test_gpu_out_of_memory_is_explained():
    learn = gpu_learner(gpu_cnn(), bs=512, n=512)
    total, before = torch.cuda.mem_get_info(GPU)[1], torch.cuda.get_per_process_memory_fraction(GPU)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated(GPU)+2048*MIB)/total, GPU)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError) as caught, learn.no_bar(), learn.no_logging(): learn.fit(1)
        found = explain_oom(learn, caught.value)
    finally: torch.cuda.set_per_process_memory_fraction(before, GPU)
    assert found.needed.bs==512 and 0<found.largest.verified<512
    assert 'activations for the backward pass' in found.text and 'GradientAccumulation(512)' in found.text
    assert tensor_bytes(found.needed.kinds)>2048*MIB and set(OF_TENSORS)<=set(found.needed.kinds)
    measured = memory_by_kind(Twins(learn)())                 # now it fits
    assert found.needed.kinds['activations']==pytest.approx(measured.kinds['activations'], rel=.1)
