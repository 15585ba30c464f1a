"""Models: bad input, the network, and that counting operations leaves a model alone"""
import copy, hashlib, socket, sys
from pathlib import Path

from gpubench.run.models import MODELS, PRETRAINED, find_factory, get_model, train_flops
import pytest
import torch
import torchvision.models as zoo
from torch import nn

small = 'lenet', 'cnn_small', 'cnn_medium', 'cnn_large'

@pytest.mark.parametrize('name', MODELS)
def test_trains_on_any_usual_image(name):
    "A gradient for every parameter, whatever the size and channels"
    shapes = ((1,16), (3,28), (1,33), (3,64)) if name in small else ((1,16), (3,33))
    for n_in,size in shapes:
        m = get_model(name, 4, n_in)
        assert m.training
        nn.functional.cross_entropy(m(torch.randn(3,n_in,size,size)), torch.tensor([0,3,1])).backward()
        assert all(o.grad is not None for o in m.parameters())

@pytest.mark.parametrize('kwargs,match', [
    (dict(name='resnet8'), "no model named 'resnet8'. Did you mean 'resnet18'"),
    (dict(name=None), 'no model named None'), (dict(n_classes=0), 'n_classes must be'),
    (dict(n_classes=2.), 'n_classes must be .*not 2.0'), (dict(n_in=-1), 'n_in must be'),
    (dict(name='lenet', pretrained=True), "no pretrained weights for 'lenet', only for resnet18, resnet50"),
    (dict(name='resnet18_cifar', pretrained=True), 'no pretrained weights'),
    (dict(name='json:loads', pretrained=True), 'no pretrained weights'),
    (dict(name='resnet18', pretrained=True, n_in=1), '3 channels, not 1. Use n_channels=3')], ids=str)
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match): get_model(**kwargs)

# ---- pretrained weights

@pytest.fixture
def hub(tmp_path, monkeypatch):
    "An empty folder where torch looks for weights"
    before = torch.hub.get_dir()
    torch.hub.set_dir(tmp_path/'hub')
    yield tmp_path/'hub'
    torch.hub.set_dir(before)

def no_network(*args, **kwargs): raise socket.gaierror(-3, 'Temporary failure in name resolution')

def test_weights_from_the_folder(hub, monkeypatch):
    "A file that lies in torch's folder is used; the head is new"
    monkeypatch.setattr(socket, 'getaddrinfo', no_network)
    source = zoo.resnet18()
    (hub/'checkpoints').mkdir(parents=True)
    torch.save(source.state_dict(), hub/'checkpoints'/Path(PRETRAINED['resnet18'].url).name)
    colour = get_model('resnet18', 7, pretrained=True)
    for k,v in colour.state_dict().items():
        if not k.startswith('fc.'): assert torch.equal(v, source.state_dict()[k])
    assert colour.fc.out_features==7

# ---- a network of your own

@pytest.fixture
def here(tmp_path, monkeypatch):
    "The current folder, with a module of which only this test knows"
    name = 'own_'+hashlib.sha1(str(tmp_path).encode()).hexdigest()[:8]
    (tmp_path/f'{name}.py').write_text("""
from torch import nn
def net(n_classes, n_in): import helper_of_own; return helper_of_own.make(n_in, n_classes)
class Net(nn.Linear):
    def __init__(self, n_classes, n_in): super().__init__(n_in, n_classes)
""")
    (tmp_path/'helper_of_own.py').write_text('from torch import nn\ndef make(i, o): return nn.Linear(i, o)\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [o for o in sys.path if o])
    yield name
    for o in (name, 'helper_of_own'): sys.modules.pop(o, None)

def test_own_model(here):
    before = list(sys.path)
    for o in ('net', 'Net'):
        m = get_model(f'{here}:{o}', 5, 2)
        assert (m.in_features, m.out_features)==(2, 5)
    assert sys.path==before

def test_find_factory(here):
    "Whatever keeps the module from being imported is found before a visit, with the line of the user's file"
    assert find_factory(f'{here}:net').__name__=='net'
    with pytest.raises(ValueError, match="imported from .*No module named 'not_there'"): find_factory('not_there.at_all:net')
    for name,text,match in (('needs', '\nimport a_package_that_nobody_has\n', rf"ModuleNotFoundError: .*has.* \({here}_needs.py:2\)"),
                            ('ends', 'raise SystemExit(3)\n', rf"SystemExit: 3 \({here}_ends.py:1\)"),
                            ('torn', 'def net(:\n', rf"SyntaxError: .*\({here}_torn.py, line 1\)")):
        Path(f'{here}_{name}.py').write_text(text)
        with pytest.raises(ValueError, match=match): find_factory(f'{here}_{name}:net')

def test_files_of_one_name_in_two_folders(here):
    for folder in 'before', 'after':
        Path(folder).mkdir()
        Path(folder, f'{here}.py').write_text(f"def make(): return '{folder}'\n")
    assert [find_factory(f'{o}/{here}.py:make')() for o in ('before', 'after', 'before')]==['before', 'after', 'before']

# ---- operations

class Branchy(nn.Module):
    "Looks at its input, which works on real tensors only"
    def __init__(self): super().__init__(); self.linear = nn.Linear(12, 3)
    def forward(self, x): return self.linear(x.flatten(1)) if x.sum().item()==0 else None

@pytest.mark.parametrize('make', [lambda: get_model('cnn_small'), lambda: get_model('resnet18').eval(), Branchy],
                         ids=['cnn', 'eval', 'branchy'])
def test_train_flops_changes_nothing(make):
    m = make()
    for o in m.parameters(): o.grad = torch.ones_like(o)
    mode, state, random = m.training, copy.deepcopy(m.state_dict()), torch.get_rng_state()
    shape = (3,2,2) if isinstance(m, Branchy) else (3,32,32)
    assert train_flops(m, shape)==train_flops(m, shape)>0
    assert m.training==mode and torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, state[k]) for k,v in m.state_dict().items())
    assert all(torch.equal(o.grad, torch.ones_like(o)) for o in m.parameters())

def test_resnet50_at_224_px():
    "4.1 GMAC forward, as is commonly stated, three times that in training"
    assert abs(train_flops(get_model('resnet50', 1000), (3,224,224))/(3*2*4.09e9)-1)<.02
