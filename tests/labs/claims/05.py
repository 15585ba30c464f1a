# %% Each part leaves what the figures and tables need, in the form of the records that come with the lab
from pytest import approx
from replay import again, planted
theirs = {o['part'] for o in lab.recorded('05_parts.jsonl', with_cpu=True)}
mine = {o['part']: o for o in lab.mine}
assert theirs-{'refill', 'phases', '8 GB', 'fit on the CPU'}==set(mine)-{'nothing', 'trace'} and len(mine)==len(lab.mine)
recorded = {o['part']: o for o in lab.recorded('05_parts.jsonl', with_cpu=True)}
for part,row in mine.items():
    lacks = {*recorded.get(part, {})} - {*row} - {'schema', 'fed_from', 'omp_wait_policy', 'monitor_n_samples', 'monitor_interval_s', 'throttle_seen',
                                                    'cpu_energy_j', 'cpu_energy_j_per_image', 'ram_max_mib'}         # of older versions
    assert not lacks, (part, lacks)

# %% One busy multiprocessor shows as much as all of them, which do 100 times as much for three times the power
one, many, product = (recorded[o] for o in ('one_row', 'many_rows', 'product'))
assert min(o['gpu_util_mean_frac'] for o in (one, many, product))>.95
assert many['numbers_per_us']/one['numbers_per_us']>100 and product['power_mean_w']/one['power_mean_w']>4
assert one['mem_util_mean_frac']<.01

# %% A core that looks at a clock is as busy as one that searches, unless others use the machine
assert mine['nothing']['numbers_per_us']==0 and mine['nothing']['cpu_mean_frac']>.9/n_cores()
assert mine['one_row']['numbers_per_us']>0 and mine['one_row']['process_mean_cores']<1.5

# %% Middles are counted, and found on every number
assert middles(.01, 4)%n_numbers==0 and nothing(.01)==0
seen = []
class X: shape = (1, 7); numel = lambda self: 7; kthvalue = lambda self, k: seen.append(k)
class FakeTorch: randn = lambda *args, **kw: X()
now = iter([0., .5, 2.])
with planted(torch=FakeTorch, perf_counter=lambda: next(now), wait_for=lambda d: seen.append('wait')): assert middles(1, 1)==7
assert seen==[3, 'wait']

# %% By hand and gpubench count the same cores
row = mine['with gpubench']
assert row['by_hand_cores']==approx(row['process_mean_cores'], abs=.15)

# %% Readings as often as possible hold few values on a GPU
hand = recorded['by hand']['hand']
assert len(hand['percent'])>1000 and len(set(hand['percent']))<10 and len(mine['by hand']['hand']['percent'])>100

# %% A training that decodes its batches waits for them, and one that has them does not
def waits(row): return sum(row['steps']['wait_ms'])/sum(row['steps']['step_ms'])
for rows in (mine, recorded): assert waits(rows['files'])>2*waits(rows['smooth']) and waits(rows['smooth'])<.05
assert recorded['smooth']['images_per_s']>2*recorded['workers']['images_per_s']>4*recorded['files']['images_per_s']
assert recorded['workers']['gpu_util_mean_frac']>2*recorded['files']['gpu_util_mean_frac']

# %% Memory grows with the batch; a step doesn't
rows = memory.groupby('bs')[['step_ms', 'peak_allocated_mib', 'peak_reserved_mib', 'device_used_mib']].median()
assert rows.peak_allocated_mib.is_monotonic_increasing and (rows.peak_allocated_mib<rows.peak_reserved_mib).all()
assert (rows.peak_reserved_mib<rows.device_used_mib).all() and rows.step_ms[1024]<1.3*rows.step_ms[16]

# %% Energy: joules an image, and how far they may be off; nothing where nobody knows
assert energy(dict(device='cuda', energy_j=200., energy_error_j=4., energy_j_per_image=.5, energy_source='counter'))==(.5, 'counter', .02)
assert energy(dict(device='cuda', energy_source='power', energy_j_per_image=.5, energy_j=200.))==(.5, 'power', None)
assert energy(dict(device='cpu'))[0] is None
fit = recorded['fit']
assert energy(fit)[0]==approx(fit['power_mean_w']/fit['images_per_s'], rel=.05)

# %% The lab makes sense where no records come with it
had, lab.theirs = lab.theirs, []
try:
    assert again('one, many = lab.of_gpu').text.startswith('No guess yet')
    assert list(table(['one_row', 'nothing'], ['gpu_util_mean_frac', 'cpu_mean_frac']))==['cpu_mean_frac']
finally: lab.theirs = had

# %% The trace of a CPU: its operations
assert len(g.idle()) and set(work.cat)=={'cpu_op'}
assert check('05.longest', 1e-3*work.groupby('name').dur.sum().max(), work_ms=mine['trace']['work_ms']).ok
assert not check('05.longest', 1e-3*work.dur.max(), work_ms=work_ms).ok

# %% The trace of a GPU, from a file of PyTorch's profiler: kernels and copies count, whatever the host does
def event(cat, name, ts, dur): return dict(ph='X', cat=cat, name=name, ts=ts, dur=dur, pid=1, tid=1, args={})
events, seen = [], []
for t in (0, 60_000, 120_000): # three steps of 60 ms
    events += [event('cpu_op', 'aten::conv2d', t+48_000, 3000), event('gpu_memcpy', 'Memcpy HtoD', t+47_000, 1000),
               event('kernel', 'conv', t+49_000, 4000), event('kernel', 'relu', t+53_000, 3000)]
with gzip.open(lab.folder/'made.json.gz', 'wt') as f: json.dump(dict(traceEvents=events), f)
class Noting: note = staticmethod(lambda part, **found: seen.append(found))
with planted(trace=lab.folder/'made.json.gz', lab=Noting, **dict.fromkeys('events slices kinds work work_ms'.split())):
    again('with gzip.open(trace)')
(lab.folder/'made.json.gz').unlink()
assert seen==[dict(work_ms={'conv': 12., 'relu': 9., 'Memcpy HtoD': 3.})], seen
