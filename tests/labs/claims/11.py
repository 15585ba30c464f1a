# %% The first record of each device
import numpy as np
from pytest import approx, raises
from replay import again, planted
server = load_records(lab_records('01_cpu_vs_gpu.jsonl'))
def visits_of(*step_ms, **fields):
    return pd.DataFrame([dict(status='ok', device='cpu', model='lenet', dataset='digits', bs=64, step_ms=o, visit=i) | fields
                         for i,o in enumerate(step_ms)])
df = pd.concat([visits_of(9., status='oom'), visits_of(8., bs=16), visits_of(7., model='resnet18'), visits_of(5., 4.),
                visits_of(1., device='cuda')])
assert first_records(df).step_ms.tolist()==[5., 1.]

# %% Fields that differ are named, and no others
a = pd.Series(dict(model='lenet', n_epoch=1, max_images=640., size=None, pretrained=False, n_train=512))
b = pd.Series(dict(model='lenet', n_epoch=2., max_images=np.nan, size=np.nan, pretrained=False, n_train=512., only_there=3))
assert differing(a, b, [*WORK, 'only_there']).to_dict('index')==dict(
    n_epoch=dict(here=1, there=2), max_images=dict(here=640, there=None), only_there=dict(here=None, there=3))
assert len(differing(a, a, WORK))==0

# %% The naive rows are not the same work: the server's first records of lenet have other images than this lab trains
few, first_there = server[server.max_images.eq(max_images)], first_records(server)
assert len(first_there)==2 and first_there.n_images.gt(few.n_images.max()).all()
with raises(ValueError, match='No configuration was run on both sides.*max_images'): compare(few, first_there)

# %% The quick profile has a partner: each network was trained alike on the server's CPU and GPU
found = compare_devices(load_records([mine.assign(machine='ours', cpu='our CPU'), server]))
found = found[found.speedup.notna() & (found.where_a+found.where_b).str.contains('our CPU')]
assert len(found)==2*len(models) and set(found.model)==set(models)

# %% The same work is what one of ours did
ours = visits_of(9., 8., n_images=512, precision='fp32')
theirs = pd.concat([visits_of(1., n_images=512., precision='fp32', device='cuda', size=np.nan),
                    visits_of(2., n_images=512, precision='bf16'), visits_of(3., n_images=1408, precision='fp32'),
                    visits_of(4., n_images=512, precision='fp32', bs=16)])
with planted(mine=ours):
    assert same_work(theirs).step_ms.tolist()==[1.] and same_work(ours).step_ms.tolist()==[9., 8.]
    assert list(same_work(theirs[:0]))==list(theirs)                     # no rows, and all columns
with planted(mine=ours.assign(status='oom')): assert not len(same_work(theirs))

# %% A CPU run and a GPU run are compared even where we have no part in them
def part(device, machine, **fields): # the server's visits of the quick profile on one device as those of another machine
    df = server[(server.device==device) & server.max_images.eq(640)]
    return load_records(df.assign(machine=machine, cpu=f'CPU of {machine}', gpu=f'GPU of {machine}' if device=='cuda' else None, **fields))
def beside_others(mine, price_per_h=None, **others): # the lab's tables for these records: ours, and those in `runs`
    with planted(mine=mine, others=others, price_per_h=price_per_h):
        for o in ('everyone = add_labels', 'pairs = compare_devices', 'aside = ran['): again(o)
        return pairs, aside
found, alone = beside_others(part('cpu', 'here', n_epoch=7), a=part('cpu', 'one'), b=part('cuda', 'two'))
assert set(zip(found.model, found.where_a, found.where_b))=={
    (o, 'CPU of one, 16 cores', 'GPU of two') for o in ('lenet', 'cnn_medium', 'resnet18')}
assert (found.lo<found.speedup).all() and (found.speedup<found.hi).all()
assert set(alone.workload.str.contains('7 epochs'))=={True} and set(alone['where'])=={'CPU of here, 16 cores'}

# %% Any number of machines
slow = part('cpu', 'here').assign(epoch_s=lambda o: 10*o.epoch_s, images_per_s=lambda o: o.images_per_s/10)
found, alone = beside_others(slow, a=part('cpu', 'one'), b=part('cuda', 'two'), c=part('cuda', 'three'))
found = found[found.model=='lenet']
assert set(found.where_a)=={'CPU of here, 16 cores'} and not len(alone)
assert set(found.where_b)=={'CPU of one, 16 cores', 'GPU of two', 'GPU of three'}

# %% Cost and energy where they are known: the CPU needs 10 times the energy of the GPU for an image; no money without prices
a, b = part('cpu', 'here', cpu_energy_j_per_image=.5), part('cuda', 'two', energy_j_per_image=.05)
found, _ = beside_others(a, b=b[b.model!='resnet18'], c=part('cuda', 'two')[lambda o: o.model=='resnet18'])
with planted(pairs=found):
    told = again('energy = pairs.reindex').set_index('workload')
    assert len(told)==3 and (told.epoch_j_a==.5*512).all()
    lenet, resnet18 = (told[told.index.str.startswith(o)].iloc[0] for o in ('lenet', 'resnet18'))
    assert lenet.epoch_j_b==approx(.05*512) and lenet.energy_verdict.startswith('10 times less')
    assert np.isnan(resnet18.epoch_j_b) and resnet18.energy_verdict=='–' and found.money_verdict.eq('–').all()
priced, _ = beside_others(a, dict(cpu=1., gpu=10.), b=b)
assert np.allclose(priced.money_ratio, priced.speedup/10)

# %% What failed stands aside
found, alone = beside_others(part('cpu', 'here'), a=part('cuda', 'two', status='oom'))
assert not len(found) and set(alone.status)=={'ok', 'oom'}

# %% Folders of one machine are sessions
first_day, later_day, day, a, b = *(part('cpu', 'here') for _ in range(3)), part('cuda', 'two'), part('cuda', 'two')
with planted(mine=first_day, first=first_day, later=later_day, others=dict(yesterday=day, a=a, b=b)):
    again('sessions = {}')
    assert {k: len(o) for k,o in sessions.items()}=={('here', 'cpu'): 3, ('two', 'cuda'): 2}

# %% A slower session shows, and noise does not
a = visits_of(10., 10.1, 9.9)
slow, same = itself('later', a, visits_of(12., 12.1, 11.9)), itself('later', a, visits_of(10.05, 9.95, 10.1))
assert slow['verdict']=='slower' and slow['ratio']==approx(1.2, rel=.01) and slow['visits']=='3 and 3'
assert same['verdict']=='not distinguishable' and same['lo']<1<same['hi']
assert itself('later', a, visits_of(5., 5., 5.))['verdict']=='faster'

# %% Visits that failed do not count
failed = visits_of(99., status='error')
assert itself('x', a, pd.concat([a, failed]))['ratio']==approx(1.)
assert itself('x', a, failed)==dict(what='x')

# %% A pair is the twin over its sibling
twins = pd.concat([visits_of(10., 10.1, 9.9, twin=False), visits_of(11., 11.1, 10.9, twin=True)]).assign(trial_id='t', machine='m')
[found] = pair_of(twins, 'here')
assert found['ratio']==approx(1.1, rel=.01) and found['what']=='here, cpu: A/A in one session'

# %% One session has no interval
a, b = [visits_of(10., 11.), visits_of(12., 13.)], [visits_of(1., 1.)]
assert by_session(*a)==[10.5, 12.5]
r = ratio_ci(by_session(*a), by_session(*b))
assert 10<r.mid<13 and np.isnan(r.lo) and not r.is_distinct()

# %% How many minutes apart
a, b = (visits_of(1., 1.).assign(time_utc=[f'2026-01-01T10:{o}:00+00:00' for o in at]) for at in (('00', '09'), ('05', '30')))
assert minutes_apart(a, b)==5.

# %% A price for a machine that is not here is told at once
def priced(**prices):
    with planted(price_per_h=prices, others={}): again('add_prices(load_records([ours')
priced(cpu=1., gpu=2.)
priced()
with raises(ValueError, match="No visit ran on 'tpu', so it cannot have a price"): priced(tpu=3.)

# %% Answers
equal = ['images trained', 'size of the images', 'precision', 'parameters of the network']
for words,right,wrong in (('# Report A: 50,000', 10.2, 23.8/9.3), ('# A GPU is 8 times', 'unknown', 'gpu'),
                          ('# Three visits of one afternoon', False, True), ('# Which of these have to be equal', equal, ['torch version'])):
    assert [again(words, answer=o).ok for o in (None, right, wrong)]==[None, True, False], words
