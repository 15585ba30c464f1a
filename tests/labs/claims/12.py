# %% What the text says of the server's records: the pooled table recommends the opposite of what equal work shows
from pathlib import Path
from tempfile import TemporaryDirectory
from pytest import approx
from replay import again, planted
def medians(found, name): return found[name].images_per_s
assert medians(pooled, 'n_workers')[0]>5*medians(pooled, 'n_workers')[2] and medians(pooled, 'precision')['ieee']>medians(pooled, 'precision')['fp32']
assert medians(equal, 'n_workers')[0]<medians(equal, 'n_workers')[2] and medians(equal, 'precision')['ieee']<medians(equal, 'precision')['fp32']/1.5
best = gpu.loc[gpu.images_per_s.idxmax()]
assert (best.model, best.bs, best.n_train, best.n_train-best.n_images)==('lenet', 1024, 1437, 413) and best.n_params==gpu.n_params[gpu.dataset=='digits'].min()

# %% Each visit alone names another way of loading
assert each.shape==(7, 3) and each.notna().all(axis=None) and each.idxmax().nunique()==3

# %% By hand and in one line
[line] = [o for o in recorded if o.decision=='workers']
assert choice.missing=='rounds' and line.kind=='measure again' and line.do=="The visits don't decide between 4 workers and 2 workers. Measure more rounds."
assert line.ratio==ratios(files, 'n_workers', base=2).ratio[4] and line.than=='2 workers' and line.session.startswith('04_data_loading')

# %% What visits don't show to be enough is never recommended, and what nobody measured names its lab
def fair(advice):
    for o in advice:
        assert o.kind!='recommended' or o.visits and o.ratio.is_distinct(), o
        assert o.kind!='measure again' or o.do.startswith("The visits don't decide between "), o
        assert o.visits or 'Not measured here: run lab ' in o.do
        assert not o.visits or min(o.visits)>0 and o.session
    return {o.decision: o.kind for o in advice}
every = ['device', 'batch size', 'workers', 'loader', 'precision', 'fast path', 'second GPU']
assert [*fair(recorded)]==every and fair(found)

# %% One visit recommends nothing, apart from lab 07's three seeds
assert {o.kind for o in advise(gpu[gpu.visit<1]) if not o.session.startswith('07')}<={'measure again', 'not measured'}

# %% With no records at all, with those of labs 01 and 02, and with copies of all
with TemporaryDirectory() as empty, planted(folders=[empty]):
    again('own = read_lab_records')
    assert len(own)==0 and {*fair(found).values()}=={'not measured'} and len(found)==len(every)
    again('import matplotlib.pyplot as plt')
shipped = Path(lab_records('01_cpu_vs_gpu.jsonl')).parent
with planted(folders=[str(shipped/f'{o}.jsonl') for o in ('01_cpu_vs_gpu', '02_batch_size')]):
    again('own = read_lab_records')
    kinds = fair(found)
    assert [k for k in every if kinds[k]!='not measured']==['device', 'batch size']
    table = advice_table(found)
    assert 'run lab 04' in table['what to do']['workers'] and '02_batch_size of 2026-11-21: 6 and 3 visits' in [*table['rests on']]
with planted(folders=[str(shipped)]):
    again('own = read_lab_records')
    assert advise(own[own.gpu=='NVIDIA H200'])==recorded

# %% The price of a training, and the slowest it may be is the dearest
prices = pd.DataFrame(costs).T
assert list(prices.index)==[f'{o} workers' for o in (0, 2, 4, 8)] and (prices.lo<=prices.price).all() and (prices.price<=prices.hi).all()
assert prices.price.iloc[0]==approx(500_000/prices.images_per_s.iloc[0]/3600*server_price_per_h)

# %% What `gain` tried stands beside what the records advise, or "not tried"
assert of_gain('images decoded') in {f'images decoded once: {tried["images decoded once"]}'} | {'not tried'}
assert of_gain('no such change')=='not tried' and of_gain('speed_up(learn)').startswith('speed_up(learn): ')
