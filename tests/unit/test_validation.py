"""Validation gets larger batches only from loaders that can have them; that metrics stay is shown in `nbs/step/10_fast.ipynb`."""
import pytest
from fastai.data.core import TfmdDL
from fastai.learner import Learner
from torch import nn

from gpubench.data.loaders import get_dls
from gpubench.step.fast import SpeedUp


class OwnDL(TfmdDL): "May rely on its batch size"

@pytest.mark.parametrize('valid', [lambda dl: dl.new(bs=5, drop_last=True), lambda dl: OwnDL(list(range(8)), bs=4), lambda dl: [1, 2]],
                         ids=['drops the rest', 'own', 'no loader'])
def test_a_loader_that_may_rely_on_its_batch_size_keeps_it(valid):
    dls = get_dls('digits', bs=32, loader='resident', device='cpu', max_images=410, size=8)
    dls.loaders[1] = valid(dls.valid)
    done, before = SpeedUp(Learner(dls, nn.Linear(1, 1))), getattr(dls.valid, 'bs', None)
    done.enlarge_validation()
    assert done.rows==[] and getattr(dls.valid, 'bs', None)==before
