# %% The surprise: one server's epochs are 2.6 times apart, and a CPU beats an H200, because the work differs in these fields alone
from pytest import approx, raises
from replay import again, planted
seconds = first.epoch_s
assert seconds['server', 'cuda']/seconds['server later', 'cuda']==approx(2.6, abs=.05)
assert seconds['server later', 'cpu']<seconds['server', 'cuda']<seconds['server', 'cpu']
assert [*again('WORK = ').index]==['n_train', 'n_images', 'n_epoch', 'n_steps']
assert first.images_per_s['server', 'cuda']==approx(18_741, abs=1) and first.images_per_s['server later', 'cuda']==approx(17_700, abs=1)

# %% Made-up visits
def visits_of(*step_ms, **fields):
    return pd.DataFrame([dict(status='ok', device='cpu', model='lenet', dataset='digits', bs=64, step_ms=o, epoch_s=o, n_images=512,
                              images_per_s=512/o, visit=i, machine='m', run='x', time_utc=f'2000-01-01T00:{i:02}:00+00:00') | fields
                         for i,o in enumerate(step_ms)])

# %% Rates are those of equal work that ended well
planted_runs = pd.concat([visits_of(1., model=models[-1]), visits_of(2., model=models[-1], status='oom'), visits_of(4., model=models[-1], n_images=1408),
                                 visits_of(8.), visits_of(16., model=models[-1], device='cuda')])
with planted(everything=planted_runs): assert rates('x', 'cpu').tolist()==[512.] and rates('x', 'cuda').tolist()==[32.]

# %% The quick profile has partners: each network did the same work in both sessions, on CPU and GPU, and no sessions are pooled
names = {'here · CPU', *(f'{o} · {where}' for o in server for where in ('CPU', 'GPU'))}
for model in models:
    table = found[found.model==model]
    assert {*table.where_a, *table.where_b}==names and table.same_work.all(), model
assert pooled.size==rates('server', 'cuda').size+rates('server later', 'cuda').size

# %% By hand and in one line, the same ratios and intervals
table = found[found.model==models[-1]].set_index('where_b')
for name,r in by_hand.items(): assert table.loc[f'{name} · GPU', ['speedup', 'lo', 'hi']].tolist()==approx([r.mid, r.lo, r.hi])
assert len(by_hand)==2

# %% No ratio shows more than two digits if its interval leaves the third open
for name,r in by_hand.items():
    shown = fmt_ratio(r).split(' ')[0]
    digit = 10.**(-len(shown.partition('.')[2])) if '.' in shown else 10.**(len(shown)-len(shown.rstrip('0')))
    assert digit>=min((r.hi-r.lo)/2, r.lo)/10 or len(shown.replace('.', '').strip('0'))<=2, (shown, r)

# %% Two sessions on alike servers differ by more than the visits of either explain
assert 1<night.lo<night.mid==approx(1.1, abs=.01)

# %% A difference that no record holds is the same work without a note
assert all('n_threads' not in df for df in hidden.values()) and len(hidden)==len(counts)
if len(hidden)>1:
    table = compare(hidden)
    assert table.same_work.all() and table.note.eq('').all() and len(table)==1

# %% Round by round, as the library computes it
if len(counts)>1:
    r = ratio_ci(ms[counts[0]], ms[counts[-1]], paired=True)
    assert (mid, lo, hi)==approx((r.mid, r.lo, r.hi))

# %% A price of a run is money
for side,o in paid.iterrows():
    run = side.split(' · ')[0]
    assert o.price_of_a_million==approx(1e6*price_per_h[run]/3600/o.images_per_s), side
assert {*paid.index}==names

# %% A price for a machine that is not here is refused before anything is measured
with planted(price_per_h=dict(tpu=3.), sweep=None), raises(ValueError, match="price_per_h names {'tpu'}"): again('others = dict(server)')

# %% The page holds every machine
text = page.read_text(encoding='utf-8')
assert all(o in text for o in names) and text.count('<img ')>=2
