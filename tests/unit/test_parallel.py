"One training in two processes: the same images, steps and weights as in one; ranks that fail; two machines; two real GPUs"
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, sleep

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.optimizer import SGD
from fastai.vision.augment import Resize
from fastai.vision.data import ImageDataLoaders
from PIL import Image
from torch.nn import SyncBatchNorm

from gpubench.data import loaders as data
from gpubench.run import trial as trial_module
from gpubench.step.capture import TapeCapture
from gpubench.ground.core import n_cores
from gpubench.data.loaders import get_dls
from gpubench.step.fast import FusedStepCallback, GraphedStepCallback, speed_up, defer
from gpubench.step.group import average_gradients, launch, n_ranks, rank
from gpubench.step.optim import Update
from gpubench.run.models import get_model
from gpubench.step.parallel import ParallelCallback, split
from gpubench.ground.record import record_rows
from gpubench.run.sweep import sweep
from gpubench.run.trial import Trial, resolve, run_trial

pytestmark = pytest.mark.skipif(n_cores()<2, reason='two processes need two cores')
quick = dict(model='lenet', bs=64, max_images=600, device='cpu')

MINE = f'of {os.getpid()}'
@pytest.fixture(autouse=True)
def marked(monkeypatch): monkeypatch.setenv('GPUBENCH_TEST', MINE)     # which ranks inherit
def ranks_alive():
    "Processes that this one started, also those that have lost their parent"
    def is_one(o):
        try: return 'multiprocessing.spawn' in ' '.join(o.cmdline()) and o.environ().get('GPUBENCH_TEST')==MINE
        except psutil.Error: return False
    return [o for o in psutil.process_iter() if is_one(o)]

def all_gone(seconds=60): # a rank may still be importing torch
    "None for two seconds"
    end, last_seen = perf_counter()+seconds, perf_counter()
    while (now := perf_counter())<end and now<last_seen+2:
        if ranks_alive(): last_seen = now
        sleep(.2)
    return now>=last_seen+2

@pytest.mark.parametrize('loader', ['files', 'memory', 'resident'])
@pytest.mark.parametrize('n', [2, 3])
def test_batches_of_all_ranks_are_those_of_one_device(loader, n):
    def batches(bs, part):
        dl = get_dls('digits', bs=bs, loader=loader, device='cpu', max_images=400).train
        dl.part = part
        found = [[x.numpy().tobytes() for x in xb] for xb,_ in dl]
        assert len(found)==len(dl) and all(len(o)==bs for o in found)
        return found
    one, ranks = batches(12*n, (0,1)), [batches(12, (i,n)) for i in range(n)]
    assert [sum(o, []) for o in zip(*ranks, strict=True)]==one
    seen = sum(one, [])
    assert len({*seen})==len(seen)

@pytest.mark.parametrize('change, words', [
    (dict(bs=65, n_devices=2), 'Use bs=64'), (dict(bs=1, n_devices=2), 'Use bs=2'), (dict(n_devices=0), 'at least 1'),
    (dict(all_reduce='ring'), 'buckets'),
    (dict(n_devices=2, speed_up='compile'), "needs all_reduce='flat'"),
    (dict(sync_bn=True), 'Use sync_bn=False'), (dict(n_devices=4096, bs=4096), 'CPU cores on this machine')])
def test_what_cannot_be_shared_is_refused(change, words):
    with pytest.raises(ValueError) as e: resolve(Trial(**quick | change))
    assert words in str(e.value)

@pytest.mark.slow
@pytest.mark.parametrize('how', [dict(loader='files', accumulate=2), dict(loader='cached'),
                                 dict(all_reduce='flat', loader='resident', speed_up='fused defer_losses')], ids=str)
def test_two_devices_train_as_one_does(how):
    one, two = (run_trial(**quick | how, n_devices=n, max_s=.5) for n in (1, 2))
    for o in 'n_steps n_images n_opt_steps n_train n_params bs'.split(): assert one[o]==two[o]
    assert two['loss']==pytest.approx(one['loss'], rel=1e-4) and two['accuracy']==pytest.approx(one['accuracy'], abs=.02)
    assert (two['process_bs'], two['n_devices'], two['device'])==(32, 2, 'cpu')
    assert two['skew_frac']>=0 and two['sync_frac']<1
    assert two['trial_id']==Trial(**quick | how, n_devices=2).trial_id!=one['trial_id'] and 'process_bs' not in one
    assert all_gone()

class As(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype
    def forward(self, x): return torch.Tensor(x).to(self.dtype)

def network(dtype):
    "Without batch norm, and other weights on each rank: what they share they got from each other"
    torch.manual_seed(3 if n_ranks()==1 else 3+rank())
    return torch.nn.Sequential(As(dtype), get_model('lenet', n_classes=10, n_in=1).to(dtype))

class CapturableCallback(FusedStepCallback):
    "The eager side of a captured step: the same arithmetic"
    def before_fit(self):
        super().before_fit()
        opt = self.learn.opt
        opt.step = lambda: Update(opt.plan()).step()

def loader(bs=24): return split(get_dls('digits', bs=bs//n_ranks(), device='cpu', loader='resident', max_images=300))

def other_layers(device):
    "Gradients of the first layer on rank 0, of the second on rank 1"
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    layers[rank()](torch.ones(4)).sum().backward()
    average_gradients(layers.parameters())

@pytest.mark.slow
def test_gradients_of_different_layers_are_never_averaged():
    with pytest.raises(RuntimeError, match='gradients of different parameters'): launch(other_layers, n_devices=2, device='cpu')

def fitted(all_reduce='flat', graph=False, accumulate=1, dtype=torch.float64, first=0):
    "A Learner with clipped gradients and a schedule, two epochs; `first`: one before them, in which so many tensors are frozen"
    cbs = [ParallelCallback(all_reduce), GradientClip(.5)]
    if graph: cbs.append(GraphedStepCallback(capture=TapeCapture()))
    elif dtype==torch.float32: cbs.append(CapturableCallback())
    if accumulate>1: cbs.append(GradientAccumulation(accumulate*24//n_ranks()))
    learn = Learner(loader(), network(dtype), cbs=cbs)
    if graph: defer(learn.recorder)
    with learn.no_bar(), learn.no_logging():
        for o in [*learn.model.parameters()][:first]: o.requires_grad_(False)
        if first: learn.fit(1, .01)
        learn.model.requires_grad_(True)
        learn.fit_one_cycle(2, .01)
    graphs = [o for o in cbs if isinstance(o, GraphedStepCallback)]
    for o in graphs: assert not o.why_not and o.n_replays>4, o.why_not
    return learn.model

def several_ways(device=None): # the weights after each
    "The same trainings, by one process or by several"
    ways = dict(buckets=fitted('buckets'), flat=fitted(), accumulated=fitted(accumulate=2),
                accumulated_buckets=fitted('buckets', accumulate=2), unfrozen_buckets=fitted('buckets', first=3))
    ways |= dict(unfrozen=fitted(first=3))
    if n_ranks()>1: ways |= {f'{kind} {n}': fitted('flat', kind=='graph', n, torch.float32) for n in (1, 2) for kind in ('graph', 'eager')}
    return {k: [o.detach().numpy() for o in m.parameters()] for k,m in ways.items()}

@pytest.mark.slow
def test_the_weights_are_those_of_one_device():
    one, (first, second) = several_ways(), launch(several_ways)
    for way in first:
        for a,b in zip(first[way], second[way]): np.testing.assert_array_equal(a, b, err_msg=way)
    for way in one:
        for a,b in zip(one[way], first[way]): np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-10, err_msg=way)
    for n in (1, 2): # to the bit, if accumulation doesn't divide another number
        for a,b in zip(first[f'graph {n}'], first[f'eager {n}']): np.testing.assert_allclose(a, b, rtol=0, atol=(n-1)*1e-6)

def shared_wrongly(device):
    "What is said of a training in which ranks don't average their gradients"
    with pytest.MonkeyPatch.context() as mp, pytest.raises(RuntimeError) as e:
        mp.setattr(trial_module, 'ParallelCallback', lambda how: Idle())
        run_trial(Trial(**quick, n_devices=2), max_s=.2)
    return str(e.value)

@pytest.mark.slow
def test_a_training_that_is_shared_wrongly_is_no_record():
    for not_averaged in launch(shared_wrongly): assert 'differ between ranks' in not_averaged

class Idle(ParallelCallback):
    "Averages nothing"
    def __init__(self): super().__init__('flat')
    def average(self): pass

def dies(how):
    def work(device):
        if rank()==1:
            if how=='killed': os.kill(os.getpid(), signal.SIGKILL)
            if how=='memory': raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')
            if how=='exits': os._exit(3)
            if how=='hangs': sleep(1000)
        if how=='memory': sleep(1000)                # until torchrun ends this rank, too
        dist.barrier()
    return work

def in_a_visit(how): return dict(found=len(launch(dies(how))))

@pytest.mark.slow
def test_a_rank_that_fails_is_a_record_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def visits(*how, **kwargs): return sweep(dict(how=how), run=in_a_visit, out=tmp_path, repeats=1, twin=None, progress=False,
                                             **kwargs).set_index('how')
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    df = visits('killed', 'memory', 'exits')
    assert df.status.to_dict()==dict(killed='error', memory='oom', exits='error')
    assert not [*tmp_path.glob('torchelastic_*'), *tmp_path.glob('gpubench-ranks-*')]
    assert 'Rank 1 of 2 failed. Signal 9' in df.error['killed'] and 'Rank 1 of 2 failed. It ended with exit code 3' in df.error['exits']
    assert visits('hangs', timeout_s=30).status.hangs=='timeout'
    assert all_gone()

@pytest.mark.slow
def test_an_interrupt_ends_the_ranks_and_is_pythons_own(tmp_path):
    code = ("from gpubench.step.group import launch\nfrom pathlib import Path\nfrom time import sleep\nimport signal\n"
            f"def work(device): Path({str(tmp_path/'begun')!r}).touch(), sleep(1000)\n"
            "try: launch(work)\nexcept KeyboardInterrupt: print('interrupted', signal.getsignal(signal.SIGINT) is signal.default_int_handler)")
    launcher, end = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True), perf_counter()+90
    while not (tmp_path/'begun').exists() and perf_counter()<end: sleep(.2)
    launcher.send_signal(signal.SIGINT)
    assert launcher.communicate(timeout=60)[0]=='interrupted True\n' and all_gone()

@pytest.mark.slow
def test_a_rank_without_a_result():
    def work(device): return sys.exit(0) if rank()==1 else rank()
    with pytest.raises(RuntimeError, match='Rank 1 of 2 failed. SystemExit: 0'): launch(work)

@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_nothing_behind():
    code = "from gpubench.step.group import launch\nfrom time import sleep\nlaunch(lambda device: sleep(1000))"
    launcher, end = subprocess.Popen([sys.executable, '-c', code]), perf_counter()+90
    while len(ranks_alive())<2 and perf_counter()<end: sleep(.2)
    assert len(ranks_alive())>=2
    launcher.kill()
    launcher.wait()
    assert all_gone()

def free_port():
    with socket.socket() as s:
        s.bind(('localhost', 0))
        return s.getsockname()[1]

@pytest.mark.slow
def test_two_machines_meet(monkeypatch):
    monkeypatch.setenv('PET_RDZV_ENDPOINT', f'localhost:{free_port()}')
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(launch, lambda device: (rank(), n_ranks()), n_devices=2, n_nodes=2) for _ in range(2)]
        assert sorted(o.result()[0] for o in jobs)==[(0, 2), (1, 2)]

# ---- two GPUs, skipped elsewhere

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count()<2, reason='needs two GPUs')
on_gpus = dict(model='resnet18', dataset='synthetic', size=32, n_channels=3, bs=64, max_images=1000, loader='resident', device='cuda',
               max_s=.5, whole_epoch=False)

def fit_from_files(device, folder):
    "What a rank's training set was, what it decoded, and what it learned"
    dls = split(ImageDataLoaders.from_folder(folder, valid_pct=.25, seed=42, bs=4, item_tfms=Resize(32), device=device))
    learn = Learner(dls, get_model('lenet', n_classes=2, n_in=3), loss_func=CrossEntropyLossFlat(), metrics=accuracy,
                    cbs=ParallelCallback('flat'))
    sped_up = speed_up(learn)
    with learn.no_bar(), learn.no_logging(): learn.fit(3, .01)
    n_decoded = sum(o.n_decoded for o in learn.feed.pool.sets.values())
    files = {o.name for o in dls.train_ds.tls[0].items}
    weights = [o.detach().cpu() for o in learn.model.parameters()]
    sped_up.undo()
    return files, n_decoded, learn.recorder.values[-1][1:], weights

@pytest.mark.slow
@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=needs_two_gpus)])
def test_each_rank_decodes_its_share_of_the_files_once(device, tmp_path):
    for i in range(32):
        file = tmp_path/'ab'[i%2]/f'{i}.jpg'
        file.parent.mkdir(exist_ok=True)
        Image.effect_noise((40, 40), 20+60*(i%2)).convert('RGB').save(file)
    (files, n, values, weights), (other_files, other_n, other_values, other_weights) = launch(fit_from_files, tmp_path, device=device)
    assert len(files)==len(other_files)==12 and not files&other_files
    assert n==other_n==12+8                       # its share, and the whole validation set, in three epochs
    assert values==other_values and all(map(torch.equal, weights, other_weights))

def with_batch_norm(device, *cbs, dtype=torch.float32, synced=False, **kwargs):
    "What four epochs make of a ResNet-18: its weights and buffers"
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    model = torch.nn.Sequential(As(dtype), get_model('resnet18', n_classes=10, n_in=1).to(dtype))
    if synced: model = SyncBatchNorm.convert_sync_batchnorm(model)
    dls = split(get_dls('digits', bs=32//n_ranks(), device=device, loader='resident', max_images=200))
    learn = Learner(dls, model, cbs=cbs, **kwargs)
    graphs = [o for o in cbs if isinstance(o, GraphedStepCallback)]
    if graphs: defer(learn.recorder)
    with learn.no_bar(), learn.no_logging(): learn.fit(4, .01)
    for o in graphs: assert not o.why_not and o.n_replays>4, o.why_not
    return {k: o.cpu() for k,o in learn.model.state_dict().items()}

def in_float64(device, synced):
    return with_batch_norm(device, ParallelCallback(), dtype=torch.float64, synced=synced, opt_func=SGD)

@pytest.mark.slow
@needs_two_gpus
def test_batch_norm_over_all_devices_trains_as_one_device_does():
    one, (two, _), (apart, _) = in_float64('cuda:0', False), *(launch(in_float64, o, device='cuda') for o in (True, False))
    for k,o in one.items(): torch.testing.assert_close(two[k], o, rtol=1e-6, atol=1e-9, msg=k)
    assert any(not torch.allclose(apart[k], o, rtol=1e-3) for k,o in one.items() if 'weight' in k)

def captured_or_not(device, all_reduce, graph):
    return with_batch_norm(device, ParallelCallback(all_reduce), GraphedStepCallback() if graph else CapturableCallback())

@pytest.mark.slow
@needs_two_gpus
@pytest.mark.parametrize('all_reduce', ['buckets', 'flat'])
def test_captured_steps_of_two_gpus_equal_eager_ones_to_the_bit(all_reduce):
    (graph, other), (eager, _) = (launch(captured_or_not, all_reduce, o, device='cuda') for o in (True, False))
    for k,o in graph.items():
        assert torch.equal(o, other[k]), f'{k} differs between ranks'
        assert torch.equal(o, eager[k]), k

@pytest.mark.slow
@needs_two_gpus
@pytest.mark.parametrize('how', [
    {}, dict(sync_bn=True), dict(all_reduce='flat', precision='bf16', speed_up='channels_last'), dict(speed_up='graph defer_losses'),
    dict(speed_up='graph', sync_bn=True), dict(speed_up='graph compile', all_reduce='flat')])
def test_a_visit_on_two_gpus(how):
    row = run_trial(**on_gpus | how, n_devices=2)
    assert (row['status'], row['n_devices'], row['process_bs'], row['n_gpus'])==('ok', 2, 32, 2)
    assert -.5<row['sync_frac']<1 and row['skew_frac']>=0
    assert all_gone()

@pytest.mark.slow
@needs_two_gpus
def test_a_sweep_side_by_side_on_two_gpus(tmp_path):
    pytest.importorskip('submitit')
    options = '--dataset synthetic --size 32 --max-images 2000 --loader resident --bs 64,256 --repeats 2 --device cuda --on gpus'
    out = subprocess.run([sys.executable, '-m', 'gpubench', 'sweep', *options.split(), '--out', tmp_path], text=True, capture_output=True)
    assert out.returncode==0, out.stderr
    rows = record_rows(tmp_path)
    assert sorted((o['round'], o['bs'], o['status']) for o in rows if not o['twin'])==[(r, bs, 'ok') for r in (0, 1) for bs in (64, 256)]
    assert {o['n_gpus'] for o in rows}=={1} and len({o['machine'] for o in rows})==1
