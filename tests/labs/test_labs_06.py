"What lab 06 claims about loops: its own functions, run on few steps"
import pandas as pd
import pytest
import torch
from fastai.basics import Learner
from fastai.callback.training import GradientAccumulation
from torch import nn

from test_labs import definitions


@pytest.fixture(scope='module')
def defined(): return definitions('06_training_loops', 'LOOPS', here='cpu', on_gpu=False)


def first_batch(d, bs=1000):
    dls, net = d['make'](bs)
    return net, *next(d['batches'](dls.train))


# ---- the same training

def test_both_loops_do_the_same_training(defined):
    d = defined
    fitted, _ = d['fit_losses'](64, 1)
    dls, net = d['make'](64)
    plain = d['plain_losses'](d['same_adam'](net), net, dls, 1)
    assert len(fitted)==len(plain)==22 and d['apart'](fitted, plain)<1e-4
    dls, net = d['make'](64)
    usual = d['plain_losses'](torch.optim.Adam(net.parameters(), lr=d['lr']), net, dls, 1)
    assert usual[0]==pytest.approx(fitted[0], rel=1e-5) and d['apart'](fitted, usual)>1e-2     # torch's numbers train something else

def test_every_rung_of_the_ladder_does_the_same_training(defined):
    d = defined
    found = [d['time_loop'](o, 64, 'cpu', 'digits', None, 'lenet', 0, n_epoch=2) for o in d['LOOPS']]
    assert len(found)==5 and all(o['epoch_s']>0 and o['n_images']==22*64 for o in found)
    assert all(o['loss']==pytest.approx(found[0]['loss'], rel=5e-3) for o in found)

def test_large_batches_are_timed_over_several_steps(defined):
    "One step an epoch would be mostly the start of the epoch"
    found = defined['time_loop']('plain loop', 1000, 'cpu', 'synthetic', 6250, 'lenet', 0, n_epoch=2)
    assert (found['n_steps'], found['n_images'])==(5, 5000)

def test_a_schedule_is_the_same_in_both_loops(defined):
    d = defined
    fitted, _ = d['fit_losses'](64, 1, one_cycle=1e-3)
    def losses(*schedule):
        dls, net = d['make'](64)
        return d['plain_losses'](d['same_adam'](net), net, dls, 1, *schedule)
    assert d['apart'](fitted, losses(d['one_cycle'](1e-3)))<1e-4 and d['apart'](fitted, losses())>1e-2


# ---- gradients in pieces

def test_pieces_give_the_gradients_of_the_whole_batch(defined):
    d, (net, x, y) = defined, first_batch(defined)
    whole = d['gradients'](net, x, y, 1000)
    def away(*args, **kw): return d['away'](d['gradients'](net, x, y, *args, **kw), whole)
    assert away(50)<1e-5 and away(64)<1e-5
    assert away(50, weigh=1.)==pytest.approx(19, rel=1e-3)                 # added up, 20 times too long
    assert away(64, weigh=1/16)>1e-3                                       # 15 pieces of 64 and one of 40: the mean of means is another

def test_fastai_accumulates_the_same_gradients(defined):
    d, (net, x, y) = defined, first_batch(defined)
    whole = d['gradients'](net, x, y, 1000)
    def kept(n_acc):
        dls, net = d['make'](50)
        learn = Learner(dls, net, cbs=[GradientAccumulation(n_acc), d['KeepGradientsCallback']()])
        with learn.no_bar(), learn.no_logging(): learn.fit(1, d['lr'])
        return learn.keep_gradients.kept
    assert len(kept(1000))==1 and d['away'](kept(1000)[0], whole)<1e-5     # 28 batches an epoch, so one step
    assert d['away'](kept(20)[0], whole)>.1                                # it counts images, not batches


# ---- what is learned

def test_batch_64_learns_the_digits(defined):
    d = defined
    found = d['learn_digits']('batch 64', 64, 1e-3, False, 0., 'cpu', 'digits', 'lenet', 0, 20)
    assert found['n_steps']==440 and found['accuracy']>=.96

def test_batch_1000_makes_a_step_an_epoch(defined):
    d = defined
    dls, net = d['make'](1000)
    assert len(d['plain_losses'](d['same_adam'](net), net, dls, 3))==3

def test_dropout_goes_before_the_last_layer_and_is_off_in_evaluation(defined):
    d = defined
    for name in ('lenet', 'resnet18'):
        net = d['get_model'](name, n_in=1)
        d['add_dropout'](net, .5)
        [p] = [o for o in net.modules() if isinstance(o, nn.Dropout)]
        kinds = [type(o) for o in net.modules() if not list(o.children())]
        assert p.p==.5 and kinds[-2:]==[nn.Dropout, nn.Linear]
    dls, net = d['make'](64)
    d['add_dropout'](net, .9)
    assert d['share_right'](net, dls.valid)==d['share_right'](net, dls.valid)
    assert len({d['share_right'](net, dls.valid, eval=False) for _ in range(3)})>1 and net.training


# ---- what is shown

def test_a_ladder_compares_with_fit_of_the_same_batch_size(defined):
    rows = [dict(bs=bs, loop=loop, status='ok', loss=1., step_ms=ms*(1+.01*i)) for bs,loop,ms in
            [(64, '+ images on the device', 1.), (64, 'fit', 4.), (1000, 'fit', 9.), (1000, "+ torch's AdamW", 9.)] for i in range(3)]
    df = defined['ladder'](pd.DataFrame(rows))
    assert df.loop.tolist()==['fit', '+ images on the device', 'fit', "+ torch's AdamW"]
    assert df.times_as_fast.round(3).tolist()==[1., 4., 1., 1.]
    assert df.verdict.tolist()==['', 'faster than fit', '', 'not distinguishable']
    nothing = defined['ladder'](pd.DataFrame([o | dict(status='error') for o in rows]))
    assert len(nothing)==0 and list(nothing)==list(df)

def test_marks_tell_lines_apart(defined):
    watch = defined['LineWatch']()
    watch.begin()
    watch.mark('a')
    watch.mark('b')
    df = watch.to_df()
    assert df.line.tolist()==['a', 'b'] and df.step.tolist()==[0, 0] and (df[['host_ms', 'device_ms']]>=0).all(axis=None)
