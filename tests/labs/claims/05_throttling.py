# %% Products are timed before, with and after neighbors, which have ended
from pytest import approx
from replay import planted
assert list(found.index)==['before', 'with neighbors', 'after'] and (found>0).all(axis=None)
assert found.loc['before', ['times_by_clock', 'times_by_core']].eq(1).all() and all(o.poll() is not None for o in neighbors)

# %% Heat and a neighbor are told apart; a part's own median counts
def made(clock, core): # 2 s before, 2 s with company, 1 s after
    return pd.DataFrame([dict(time_s=t/10, by_clock_ms=3*(clock if 20<t<=40 else 1), by_core_ms=2*(core if 20<t<=40 else 1)) for t in range(50)])
for clock,core in ((2., 1.), (1.5, 1.5)):
    row = slower(made(clock, core), 2).loc['with neighbors']
    assert (row.times_by_clock, row.times_by_core)==(approx(clock), approx(core))

# %% Two clocks: 20 products each
clock, core = iter([0., 2., 9.]), iter([.5, 1.5])
with planted(perf_counter=lambda: next(clock), process_time=lambda: next(core)): assert products(5)==[(0., approx(2/20), approx(1/20))]

# %% The made-up card throttles after 35 s, and the words come from its bits
assert invented.throttle_words[invented.time_s>=35].eq('heat (slowed by software)').all() and not invented.throttle_words[0]
assert throttle_words(0x64).split(', ')==['heat (slowed by software)', 'heat (slowed by hardware)'] and not throttle_words(0x4)

# %% The refill hides in `other`, and not in its median; none is left out of the record
for o in lab.theirs:
    if o['part']=='refill': assert (ms := pd.DataFrame(o['steps'])).other_ms.max()>1900 and ms.other_ms.median()<100
assert len(lab.mine[-1]['steps']['other_ms'])==len(steps)

# %% A pause of 2 s after every 2.5 s, until 9 s are over, by a clock that ticks at each look
from itertools import count
from types import SimpleNamespace
now, opened = count(0, .5), []
def look(file): return SimpleNamespace(convert=lambda mode: opened.append(file))
with planted(perf_counter=lambda: next(now), Image=SimpleNamespace(open=look)):
    pauses, made = RefillCallback(['a', 'b'], 9), []
    pauses.before_fit()
    try:
        for _ in range(9):
            pauses.before_batch()
            made.append(len(opened))
    except CancelFitException: pass
    assert made==[0, 0, 3, 3, 3, 6] and opened==['a', 'b']*3
