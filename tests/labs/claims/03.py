# %% What rules a step
from replay import planted
from math import nan
from gpubench.ground.stats import Interval
for lo,hi,words in ((.9, 1.2, 'mostly a fixed part'), (1.6, 2.1, 'mostly the images'), (1.3, 1.8, 'open'), (1.1, 1.32, 'mostly a fixed part'), (1.34, 1.48, 'mostly the images'), (nan, nan, 'open')):
    assert what_rules(Interval(1.4, lo, hi, .95))==words, (lo, hi)

# %% Times wait for the device: a step whose orders are given at once and which is done later
log, now = [], iter(range(1000))
def log_step(): log.append('step')
with planted(perf_counter=lambda: next(now), wait_for=lambda d: log.append('wait')):
    assert times_ms(log_step, 'cpu', seconds=.5)==dict(launched_ms=1e3, done_ms=2e3)
    assert log==['wait', 'step', 'wait']                         # one step at least, from an idle device
    times_ms(log_step, 'cpu', seconds=9)
    assert log[3:]==['wait', 'step', 'wait']*3                   # it looks at the clock four times a round

# %% Operations are counted, and don't depend on the batch
a = torch.zeros(8, 4)
with CountMode() as counter: (a.t(), a.view(4, 8), torch.empty(9), a @ a.t(), a.add_(1))
assert counter.n_ops==2
assert count_ops('cnn_medium', 4)==count_ops('cnn_medium', 64)>10 and set(nets.ops)=={count_ops(o, bs) for o in models}
