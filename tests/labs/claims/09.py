# %% Three mistakes show in counts or weights; done right, it is the training of one device
alone, right = table.loc['one device'], table.loc['as it should be']
same, larger, summed_up = (table.loc[o] for o in ('the same part on all ranks', f'{bs} on each device', 'gradients summed'))
assert right.away_from_one_device<1e-3<1e-2<min(o.away_from_one_device for o in (summed_up, same, larger))
assert right.images_trained==same.images_trained==alone.images_trained==len(y)//bs*bs
assert right.different_ones==alone.different_ones>same.different_ones
assert larger.steps==len(y)//(bs*n_devices) and right.steps==alone.steps==len(y)//bs

# %% gpubench's training on several devices is that of one, unless the global batch grows
a, b, other = (df[df.way==o].iloc[0] for o in ('one device', 'strong', 'weak'))
assert (a.n_images, a.n_steps)==(b.n_images, b.n_steps) and abs(a.loss-b.loss)<1e-3 and b.process_bs==bs//n_devices
assert other.n_steps==a.n_steps//n_devices and abs(a.loss-other.loss)>1e-2

# %% Weighted by images, ranks with unequal parts train as one device; a plain mean doesn't
assert np.abs(uneven['weighted by images']-one_odd).max()<1e-9<1e-6<np.abs(uneven['averaged']-one_odd).max()

# %% A summed gradient is a doubled rate
from pytest import approx
def doubled(g): g.mul_(n_devices)
twice, _ = train('cpu', my_part, doubled, bs)
twice = torch.cat([o.detach().flatten() for o in twice.parameters()]).numpy()
assert np.abs(twice-ranks[0]['gradients summed']['weights']).max()<1e-3

# %% What was predicted comes from the latency, the bandwidth and the bytes of the gradients
mib_of_all = sum(o.numel()*o.element_size() for o in get_model(model, n_classes=10, n_in=1).parameters())/2**20
assert mib==approx(mib_of_all) and predicted_ms==approx(times['small']+share*mib/(gib_per_s*1.024), rel=1e-6)
assert all(o>0 for o in steps.values()) and efficiency==steps['alone']/steps['averaging']

# %% Each row of the sweep is a training of so many devices
assert set(df.way)==set(trials) and (df.groupby('way').n_devices.first()[['one device', 'weak', 'strong']].tolist())==[1, n_devices, n_devices]
assert (df.process_bs.dropna()*df.n_devices[df.process_bs.notna()]==df.bs[df.process_bs.notna()]).all()

# %% Weak scaling keeps each device's batch, strong scaling the global one; ratios are taken within rounds
sizes = df.groupby('way')[['bs', 'process_bs']].first()
assert sizes.bs.to_dict()=={'one device': bs, 'weak': bs*n_devices, 'strong': bs} and sizes.process_bs['weak']==bs==n_devices*sizes.process_bs['strong']
weak, one_device = (df[df.way==o].set_index('visit').images_per_s for o in ('weak', 'one device'))
assert len(weak)==len(one_device)==repeats and gains.times_as_fast['one device']==1
assert (weak/one_device).min()-.001<=gains.times_as_fast['weak']<=(weak/one_device).max()+.001

# %% The speed-ups follow from a step's time and the message's: weak scaling pays for it once for N batches
assert predicted['weak']==approx(n_devices/(1+predicted_ms/steps['alone'])) and predicted['weak']<n_devices
assert predicted['strong']==approx(steps['alone']/(steps['alone, part of the batch']+predicted_ms))
