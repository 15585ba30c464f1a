"""The same trainings in other frameworks, for ladder.py: a plain PyTorch loop with
`torch.compile(mode='reduce-overhead')`, and JAX (Flax and Optax): one jitted `lax.scan` over the resident epoch with
donated buffers.

All train the ladder's network from data on the device, in the ladder's precision, channels_last, with cuDNN's search
and AdamW at a constant rate. None has a captured step of its own to offer beyond what its compiler does: in JAX the
scan is one call from Python for an epoch. Each lives in a process of its own."""
import multiprocessing, os
from contextlib import suppress
from functools import partial
from time import perf_counter

from gpubench.ground.core import wait_for
from gpubench.run.models import get_model
import torch
import torch.nn.functional as F

from common import search_kernels

ADAMW = dict(lr=1e-3, betas=(.9, .99), eps=1e-5, weight_decay=.01)

def pixels(case, device):
    "(images, labels, mean, std) of random pixels, as many as the ladder trains on; they lie on the device"
    _, _, size, n_in, _, n, _ = case
    n_train = n*4//5
    x = torch.randint(256, (n_train, n_in, size, size), dtype=torch.uint8, device=device)
    y = torch.randint(10, (n_train,), device=device)
    some = x[:1000].float()/255
    return x, y, some.mean().item(), some.std().item()

def network(case, device):
    search_kernels()
    return get_model(case[0], n_in=case[3]).to(device, memory_format=torch.channels_last)

def indices(n, bs, n_steps, device): return torch.randperm(n, device=device)[:n_steps*bs].view(n_steps, bs)

def plain_loop(case, device):
    x, y, mean, std = pixels(case, device)
    net = network(case, device)
    opt = torch.optim.AdamW(net.parameters(), fused=True, **ADAMW)
    @torch.compile(mode='reduce-overhead', fullgraph=True, dynamic=False)
    def forward(x, y): return F.cross_entropy(net((x.float()-255*mean)/(255*std)).float(), y)
    def epoch(n_steps=case[6]):
        wait_for(device)
        start_s = perf_counter()
        for i in indices(len(x), case[1], n_steps, device):
            torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast('cuda', torch.bfloat16, enabled=case[4]): loss = forward(x[i], y[i])
            loss.backward()
            opt.step()
            opt.zero_grad()
        wait_for(device)
        return 1e6*(perf_counter()-start_s)/n_steps
    epoch(6)
    return epoch

def jax_scan(case, device):
    os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')          # PyTorch needs memory, too
    import flax.linen as nn
    import jax, optax
    import jax.numpy as jnp
    name, bs, size, n_in, is_bf16, _, n_steps = case
    dtype = jnp.bfloat16 if is_bf16 else jnp.float32
    conv = partial(nn.Conv, use_bias=False, dtype=dtype)
    norm = partial(nn.BatchNorm, use_running_average=False, momentum=.9, epsilon=1e-5, dtype=dtype)
    class Block(nn.Module):
        n: int
        stride: int
        wide: bool
        @nn.compact
        def __call__(self, x):
            k, pad = 4 if self.wide else 1, [(1, 1), (1, 1)]
            h = nn.relu(norm()(conv(self.n, (1, 1))(x))) if self.wide else x
            h = nn.relu(norm()(conv(self.n, (3, 3), self.stride, padding=pad)(h)))
            h = norm()(conv(4*self.n, (1, 1))(h) if self.wide else conv(self.n, (3, 3), padding=pad)(h))
            if x.shape[-1]!=k*self.n or self.stride>1: x = norm()(conv(k*self.n, (1, 1), self.stride)(x))
            return nn.relu(x+h)
    class ResNet(nn.Module):
        sizes: tuple
        wide: bool
        @nn.compact
        def __call__(self, x):
            x = nn.relu(norm()(conv(64, (7, 7), 2, padding=[(3, 3)]*2)(x)))
            x = nn.max_pool(x, (3, 3), (2, 2), [(1, 1)]*2)
            for i,n in enumerate(self.sizes):
                for j in range(n): x = Block(64*2**i, 2 if i and j==0 else 1, self.wide)(x)
            return nn.Dense(10, dtype=dtype)(x.mean((1, 2)))
    class LeNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = partial(nn.Dense, precision='highest')         # as torch ships it: TF32 in convolutions, none in matrix products
            for n,pad in (16, 'VALID'), (32, 'VALID'): x = nn.max_pool(nn.relu(conv(n, (3, 3), padding=pad)(x)), (2, 2), (2, 2))
            x = nn.relu(conv(32, (3, 3), padding='SAME')(x))
            return dense(10)(nn.relu(dense(50)(x.reshape(len(x), -1))))
    net = LeNet() if name=='lenet' else ResNet((2, 2, 2, 2) if name=='resnet18' else (3, 4, 6, 3), name=='resnet50')
    x, y, mean, std = pixels(case, device)
    place = jax.devices('gpu')[0]
    x, y = (jax.device_put(o.cpu().numpy(), place) for o in (x.permute(0, 2, 3, 1), y))
    opt = optax.adamw(1e-3, b1=.9, b2=.99, eps=1e-5, weight_decay=.01)
    made = net.init(jax.random.key(0), jnp.zeros((2, size, size, n_in)))
    count = sum(o.size for o in jax.tree.leaves(made['params']))
    if count!=sum(o.numel() for o in network(case, 'cpu').parameters()): raise RuntimeError(f"JAX's {name} has {count} parameters")
    def loss_of(params, stats, xb, yb):
        pred, new = net.apply(dict(params=params, **stats), (xb.astype(dtype)/255-mean)/std, mutable=['batch_stats'])
        return optax.softmax_cross_entropy_with_integer_labels(pred.astype(jnp.float32), yb).mean(), new
    def step(x, y, state, i):
        params, stats, moments = state
        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params, stats, x[i], y[i])
        updates, moments = opt.update(grads, moments, params)
        return (optax.apply_updates(params, updates), stats, moments), loss
    @partial(jax.jit, donate_argnums=0, static_argnums=4)
    def train(state, x, y, key, n_steps):
        order = jax.random.permutation(key, len(x))[:n_steps*bs].reshape(n_steps, bs)
        return jax.lax.scan(partial(step, x, y), state, order)
    params = made['params']
    state, key = [(params, {k: v for k,v in made.items() if k!='params'}, opt.init(params))], jax.random.key(1)
    def epoch(n_steps=n_steps):
        start_s = perf_counter()
        state[0], losses = train(state[0], x, y, jax.random.fold_in(key, n_steps), n_steps)
        losses.block_until_ready()
        return 1e6*(perf_counter()-start_s)/n_steps
    epoch()
    return epoch

PEERS = dict(plain_loop=plain_loop, jax=jax_scan)

def _serve(make, case, device, pipe): # in a process of its own
    try: run = make(case, device)
    except Exception as e: return pipe.send(e)
    pipe.send(None)
    with suppress(EOFError):                                    # the end of the other side
        while True:
            look, *args = pipe.recv()
            pipe.send(look(run, *args))

def in_own_process(make, case, device):
    "What calls functions there with what `make(case, device)` returned there, and further arguments; the process ends with this one"
    context = multiprocessing.get_context('spawn')
    ours, theirs = context.Pipe()
    context.Process(target=_serve, args=(make, case, device, theirs), daemon=True).start()
    def ask(*call):
        if call: ours.send(call)
        if not ours.poll(900): raise RuntimeError(f'{make} does not answer')   # JAX compiles a ResNet-50 for minutes
        return ours.recv()
    if (error := ask()): raise error
    return ask
