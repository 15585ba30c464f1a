"""What the benchmarks of training steps share: a Learner that is warm, ratios to a fit without"""
from statistics import median

import numpy as np
import torch
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.core import Callback, CancelValidException
from fastai.callback.fp16 import MixedPrecision
from gpubench.ground.stats import median_ci
from gpubench.run.trial import Trial, make_learner, resolve, warm_up

def search_kernels(is_on=True):
    "cuDNN times all kernels that it has for a shape, not just the first ten, and keeps the fastest"
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = is_on, 0

def bf16_callbacks(): return [MixedPrecision(amp_mode='bf16'), ChannelsLast()]

class NoValidationCallback(Callback):
    graph_safe = 'counts'                        # it acts in no batch
    def before_validate(self): raise CancelValidException()

def ready_learner(**fields):
    "The learner of a trial, warm, without the callback that looks at what is computed"
    trial = resolve(Trial(**fields))
    learn = make_learner(trial)
    with learn.no_bar(), learn.no_logging(): warm_up(learn, trial)
    learn.remove_cb(learn.seen)
    return learn

CASES = dict(resnet18_32px=dict(dataset='synthetic', model='resnet18', size=32, n_channels=3),
             mnist_cnn=dict(dataset='synthetic', model='lenet', size=28, n_channels=1))

def ratios_to_none(times):
    "Of each variant to 'none', the median of the rounds' own ratios with its interval"
    return {k: vars(median_ci(np.array(v)/times['none'])) for k,v in times.items() if k!='none'}

def step_line(name, times, ratio, width):
    "A variant's step, and by how much it is longer than without"
    more = f"   {100*(ratio['mid']-1):+6.2f} % ({100*(ratio['lo']-1):+.2f} to {100*(ratio['hi']-1):+.2f})" if ratio else ''
    return f'  {name:{width}} {median(times):8.3f} ms a step{more}'
