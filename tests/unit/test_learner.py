"A function that returns a `Learner`, in a sweep"
import os
from pathlib import Path
from time import sleep

import numpy as np
import pandas as pd
import pytest
import torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.test_utils import synth_learner
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

import gpubench
from gpubench.learner import time_learner
from gpubench.sweep import sweep


def make_learner(bs, n_trn):
    "`synth_learner` has batches of 16, whatever is asked for"
    return synth_learner(n_trn=n_trn)


def sweep_of(run, capsys, **point):
    df = sweep(point, run=run, repeats=1, isolate=False, progress=False, twin=None)
    return df, capsys.readouterr().out


def test_a_sweep_times_a_learner_and_names_what_it_cannot_verify(capsys):
    df, said = sweep_of(make_learner, capsys, bs=16, n_trn=[10, 20])
    assert (df.status.tolist(), sorted(df.n_images)) == (['ok', 'ok'], [160, 320])
    assert df.unverified.tolist()==['n_trn', 'n_trn'] and "can't be observed during training: n_trn." in said


def test_a_setting_that_did_not_happen_is_an_error(capsys):
    df, _ = sweep_of(make_learner, capsys, bs=[16, 64], n_trn=10)
    assert df.set_index('bs').status.to_dict()=={16: 'ok', 64: 'error'}
    assert 'bs should have been 64, but was 16' in df.set_index('bs').error[64]


def test_the_warm_up_leaves_the_weights_as_they_were(capsys):
    starts = []
    class StartCallback(Callback):
        def before_fit(self): starts.append([o.item() for o in self.model.parameters()])
    def run(n_trn): return synth_learner(n_trn=n_trn, cbs=StartCallback())
    sweep_of(run, capsys, n_trn=10)
    assert len(starts)==2 and starts[0]==pytest.approx(starts[1])


# ---- learners as a practitioner has them

def texts_of(bs, n_hidden):
    "A classifier of made-up texts: AWD-LSTM, tiny and untrained"
    from fastai.text.all import AWD_LSTM, BaseTokenizer, TextDataLoaders, Tokenizer, awd_lstm_clas_config, text_classifier_learner
    rng = np.random.default_rng(0)
    texts = [' '.join(rng.choice(['good', 'bad', 'film', 'plot'], 12)) for _ in range(120)]
    df = pd.DataFrame(dict(text=texts, label=rng.choice(['no', 'yes'], 120)))
    tok = Tokenizer.from_df('text', tok=BaseTokenizer(), n_workers=1)
    dls = TextDataLoaders.from_df(df, text_col='text', label_col='label', tok_tfm=tok, bs=bs, seq_len=16, valid_pct=.2, device='cpu')
    config = awd_lstm_clas_config | dict(emb_sz=8, n_hid=n_hidden, n_layers=1)
    return text_classifier_learner(dls, AWD_LSTM, config=config, pretrained=False)


def masks_of(bs, size):
    "A tiny U-Net that segments made-up squares"
    from fastai.layers import ConvLayer
    from fastai.losses import CrossEntropyLossFlat
    from fastai.vision.core import TensorImage, TensorMask
    from fastai.vision.models.unet import DynamicUnet
    masks = [(torch.arange(size)[:,None]<i%size).expand(size, size) for i in range(40)]
    data = [(TensorImage(o.float().expand(3, size, size)), TensorMask(o.long())) for o in masks]
    body = torch.nn.Sequential(ConvLayer(3, 4, stride=2), ConvLayer(4, 8, stride=2))
    return Learner(DataLoaders.from_dsets(data[:32], data[32:], bs=bs, num_workers=0, device='cpu'), DynamicUnet(body, 2, (size, size)),
                   loss_func=CrossEntropyLossFlat(axis=1))


@pytest.mark.parametrize('run,point,n_images,unverified', [(texts_of, dict(bs=16, n_hidden=6), 96, 'n_hidden'),
                                                           (masks_of, dict(bs=8, size=16), 32, 'size')], ids=['text', 'segmentation'])
def test_text_and_segmentation(run, point, n_images, unverified, capsys):
    df, said = sweep_of(run, capsys, **point)
    assert df.status.tolist()==['ok'], df.error[0]
    assert (df.n_images.tolist(), df.unverified.tolist()) == ([n_images], [unverified])
    assert df.epoch_s[0]>0 and df.loss[0]>0 and f"can't be observed during training: {unverified}." in said
    with pytest.raises(RuntimeError, match=f'bs should have been 3, but was {point["bs"]}'): time_learner(run(**point), dict(bs=3))


def test_a_device_chosen_by_the_machine_and_a_kind_of_float32():
    record = time_learner(synth_learner(n_trn=10), dict(device='auto' if not torch.cuda.is_available() else 'cpu', precision='ieee'))
    assert record['unverified']=='precision'


def test_steps_that_add_up_batches_are_measured_as_rounds():
    class SlowOptimizerCallback(Callback):
        def after_step(self): sleep(.04)
    def run(): return synth_learner(n_trn=24, cbs=[GradientAccumulation(64), SlowOptimizerCallback()])
    record = time_learner(run(), {})
    assert record['n_opt_steps']==6 and .24<=record['epoch_s']<1        # 24 batches of 16


def test_groups_of_batches_that_run_from_one_epoch_into_the_next():
    for n_trn, n_epoch in (11, 2), (11, 1):
        record = time_learner(synth_learner(n_trn=n_trn, cbs=GradientAccumulation(96)), dict(accumulate=6, n_epoch=n_epoch))
        assert record['n_opt_steps']==n_trn*n_epoch//6 and 'accumulate' not in (record['unverified'] or '')


def test_a_short_last_batch_counts_as_part_of_a_step():
    class SlowCallback(Callback):
        def after_pred(self): sleep(.01*len(self.xb[0])*self.training)
    data = [(torch.randn(4), torch.randn(1)) for _ in range(49)]
    dls = DataLoaders.from_dsets(data[:33], data[33:], bs=8, drop_last=False, num_workers=0, device='cpu')
    record = time_learner(Learner(dls, torch.nn.Linear(4, 1), loss_func=torch.nn.MSELoss(), cbs=SlowCallback()), dict(n_epoch=3))
    assert (record['n_steps'], record['n_images'])==(5, 33) and abs(record['epoch_check_frac'])<.12


IN_A_NOTEBOOK = """
from fastai.test_utils import synth_learner
from gpubench.sweep import sweep
here, calls = 20, []                                  # globals of the notebook
def make_learner(bs, lr):
    calls.append(bs)
    return synth_learner(n_trn=here, lr=lr)
df = sweep(dict(bs=[16, 64], lr=.01), run=make_learner, repeats=1, twin=None, progress=False)
found = df.set_index('bs').sort_index()
print(found.status.to_dict(), found.n_images[16], calls)      # called elsewhere: nothing is in this list
""".strip()


def test_a_function_of_a_notebook_runs_in_fresh_processes(tmp_path):
    cells = [new_code_cell(o) for o in (IN_A_NOTEBOOK.split('df = ')[0], 'df = '+IN_A_NOTEBOOK.split('df = ')[1])]
    nb = new_notebook(cells=cells, metadata=dict(kernelspec=dict(display_name='python3', language='python', name='python3')))
    env = os.environ | dict(PYTHONPATH=str(Path(gpubench.__file__).parents[1]))
    env.pop('PYTEST_CURRENT_TEST', None)
    NotebookClient(nb, timeout=300, kernel_name='python3', resources=dict(metadata=dict(path=str(tmp_path)))).execute(env=env)
    said = ''.join(o.text for o in nb.cells[-1].outputs if o.get('name')=='stdout')
    assert said.endswith("{16: 'ok', 64: 'error'} 320.0 []\n"), said


def test_a_training_that_stops_early_is_no_record_of_all_its_epochs():
    class StopCallback(Callback):
        order = 99
        def after_epoch(self): raise CancelFitException()
    with pytest.raises(RuntimeError, match='n_epoch should have been 3, but was 1'):
        time_learner(synth_learner(n_trn=10, cbs=StopCallback()), dict(n_epoch=3))
    with pytest.raises(ValueError, match='n_epoch must be a whole number of at least 1'): time_learner(synth_learner(n_trn=10), dict(n_epoch=0))
