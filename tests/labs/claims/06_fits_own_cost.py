# %% A watch keeps what lies between marks
from pytest import approx
values = iter([0, 3, 4, 4, 9, 10])
watch = Watch(lambda: next(values))
for line in ('a', 'b', 'a', 'b', 'b'): watch.mark(line)
assert watch.rows==[('a', 0, 3), ('b', 3, 4), ('a', 4, 4), ('b', 4, 9), ('b', 9, 10)]
assert watch.per_line().to_dict()==dict(a=1.5, b=1.)

# %% Both loops mark the same lines, once a step, in their order
def lines_of(run):
    run(watch := Watch(lambda: 0))
    return [o[0] for o in watch.rows]
n = len(new_learner().dls.train)
assert lines_of(fit_loop)==[*ENDS.values()]*n and lines_of(plain_loop)==[*ENDS.values(), 'loss.item()']*n
assert [k for k in lines_of(lambda w: not_read(w, 1))]==[*ENDS.values()]*n
assert {*read_records(lab_records('06_lines.jsonl')).line}=={*ENDS.values(), 'loss.item()'}

# %% Calls and operations are counted
with CountCalls() as counter: sorted([2, 1]), len('ab')
with CountCalls() as empty: pass
assert counter.n==empty.n+2
with CountOps() as counter: torch.ones(2)+1
assert counter.n==2

# %% `fit` makes more calls for hardly more operations; an optimizer for all weights halves the operations
together = counts.xs('together', level=1).iloc[0]
assert together['calls', 'fit']>2*together['calls', 'plain loop'] and together['ops', 'fit']<1.2*together['ops', 'plain loop']
assert together['calls', 'fit']==approx(counts.loc[here, ('calls', 'fit')].drop('together').sum())
assert counted.ops['and a fused optimizer']<.7*counted.ops['stock fit']

# %% The plain loop trains what fit trains
def last_loss(run, watch):
    run(watch)
    return watch.loss.item()
class Keep(Callback):
    def after_batch(self): watch.loss = self.learn.loss if self.training else watch.loss
watch = Watch(lambda: 0)
by_hand = last_loss(plain_loop, watch)
learn = new_learner(cbs=Keep())
with learn.no_bar(), learn.no_logging(): learn.fit(1, lr)
assert by_hand==approx(watch.loss.item(), rel=1e-3)

# %% One visit a rung and round, by name
assert len(df)==len(rungs)*repeats and {o['rung'] for o in lab.rows('rung')}==set(rungs)
