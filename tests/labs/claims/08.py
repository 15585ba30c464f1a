# %% A forgotten copy learns its batch by heart, and the loss is wonderful
assert losses[-1]<.01<right_losses[-1] and acc<.75<.85<right_acc
[noted] = [o for o in lab.mine if o['part']=='copy']
assert (noted['wrong_accuracy'], noted['right_accuracy'])==(acc, right_acc)

# %% With the copy, the recording trains as the same steps do without one
import torch.nn.functional as F
from pytest import approx
def eager(n_steps, lr=.05):
    net, found = new_net(), []
    for x,y in batches()[:n_steps]:
        loss = F.cross_entropy(net(x), y)
        found.append(loss.item())
        for p,g in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters()))): p.data.sub_(lr*g)
    return found
from replay import again, planted
with planted(batches=lambda kept=batches(): kept):               # they are shuffled anew each time
    replayed, _ = train(replay_all, n_epoch=1)
    assert replayed[:8]==approx(eager(8), rel=1e-4)

# %% Replayed with copies, it learns as the eager steps do, and a short batch is not broadcast
assert abs(copied_acc-right_acc)<.1 and len(copied_losses)==len(right_losses)+1 and copied_losses[:8]!=losses[:8]

# %% What the host computes is a constant; what the device computes is not
assert as_float==[1, 1, 1] and as_tensor==[.5, .25, .125]
assert len(set(by_numpy))==1 and len(set(by_torch))==3

# %% One line, and the same training; undone, the Learner is as before
assert len(stock.recorder.losses)==len(fast.recorder.losses)>0 and away<1e-3
assert {type(o) for o in fast.cbs}=={type(o) for o in stock.cbs}

# %% The rungs each change one thing and keep the rest
from dataclasses import asdict
steps = [{k for k,v in asdict(b).items() if v!=asdict(a)[k]}-{'speed_up'} | {*a.parts} ^ {*b.parts} for a,b in zip(rungs.values(), [*rungs.values()][1:])]
assert steps==[{'loader'}, {'loader'}, {'fused'}, {'channels_last'}, {'keep_pages'}]
assert len(df)==len(rungs)*repeats+repeats and list(dict.fromkeys(df.rung))==list(rungs)

# %% Ratios of epochs against the first rung
import io
from contextlib import redirect_stdout
made = pd.DataFrame([dict(rung=k, epoch_s=s, images_per_s=100/s, step_ms=s, warmup_s=w) for k,s,w in
                     [('files', 8., 1.), ('files', 8., 1.), ('graph', 2., 3.), ('graph', 2., 3.), ('compiled', 1.5, 43.), ('compiled', 1.5, 5.)]])
assert [o.mid for o in ladder_of(made).times_as_fast]==approx([1, 4, 16/3])

# %% Compiling is paid back by what it saves, counted from the first visit
for compiled_s,words in ((1.5, '40 s and saves 0.5 s per epoch: paid back after 80 epochs'), (2.5, '40 s and saves -0.5 s per epoch: never paid back')):
    with redirect_stdout(io.StringIO()) as out, planted(gpu=made.assign(epoch_s=made.epoch_s.where(made.rung!='compiled', compiled_s))):
        again("if 'compiled' in set")
    assert words in out.getvalue(), out.getvalue()

# %% A graph's gain at batch 32 decides at which batch it should gain nothing; a batch that fails says nothing
from unittest.mock import patch
def gains(eager_ms, graph_ms={32: 10, 256: 70}): # the batches tried and the lines printed, for these times of eager steps; no other batch fits
    tried, out = [], io.StringIO()
    def made_sweep(trials, **kwargs):
        tried.append(trials[0].bs)
        return pd.DataFrame([dict(graph='graph' in o.parts, status='ok' if o.bs in eager_ms else 'oom', step_ms=(graph_ms if 'graph' in o.parts else eager_ms).get(o.bs))
                             for o in trials])
    as_if = dict(rungs=dict(bf16=rungs['fused']), sweep=made_sweep, on_gpu=True, look_inside=lambda o: dict(device_ms=graph_ms[o.bs]))
    with redirect_stdout(out), planted(**as_if), patch.object(lab, 'mine', []), patch.object(lab, 'theirs', []): again('def gain_of_graph')
    return tried, [line[:45] for line in out.getvalue().splitlines()]
assert gains({32: 25, 256: 72})==([32, 256], ['Batch 32: predicted gain of a graph 2.50 time', 'Batch 256: predicted gain of a graph 1.00 tim'])
assert gains({32: 25})==([32, 256], ['Batch 32: predicted gain of a graph 2.50 time'])
assert gains({32: 10.5})==([32], ['Batch 32: predicted gain of a graph 1.05 time'])

# %% Every rung has its bound
assert (of_bound>0).all() and len([o for o in lab.mine if o['part']=='bound'])==len(rungs)

# %% A recorded prediction follows its input, and is the network's own
[noted] = [o for o in lab.mine if o['part']=='predict']
assert noted['eager_ms']>0 and noted['replayed_ms']>0
with torch.no_grad():
    x.copy_(torch.rand_like(x))
    replay()
    assert torch.allclose(pred, net(x), atol=1e-4)
