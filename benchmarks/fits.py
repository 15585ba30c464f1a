"""What the benchmarks of training steps share: a Learner that is warm, callbacks that end a fit, ratios to a fit without"""
from statistics import median
from time import perf_counter

import numpy as np
import torch
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.core import Callback, CancelFitException, CancelTrainException, CancelValidException
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

class UntilCallback(Callback):
    "Ends the fit after `seconds` from its first batch and knows how many steps that were; the loss has just been read from the device"
    order, graph_safe = 59, True
    def __init__(self, seconds, validate=False): self.seconds, self.validate, self.n = seconds, validate, 0
    def is_over(self): return perf_counter()-self.start_s>=self.seconds
    def end_if_over(self, how):
        if self.n and self.is_over(): raise how()
    def before_epoch(self): self.end_if_over(CancelFitException)
    def before_batch(self):
        if self.n==0: self.start_s = perf_counter()
    def after_batch(self):
        if not self.training: return
        self.n, self.took_s = self.n+1, perf_counter()-self.start_s
        self.end_if_over(CancelTrainException)
    def before_validate(self):
        self.end_if_over(CancelFitException)
        if not self.validate: raise CancelValidException()

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
