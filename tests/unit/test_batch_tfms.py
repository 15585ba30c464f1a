"Batch transforms on the device: pipelines as users have them"
import torch
from fastai.data.core import Pipeline
from fastai.data.transforms import IntToFloatTensor, Normalize
from fastai.torch_core import TensorCategory, TensorImageBW
from fastai.vision.augment import aug_transforms

from gpubench.data.batch_tfms import batch_transforms

# float32 samples within 1e-4 of a pixel of the right place: some 50 roundings of 6e-8, times half of 64 pixels
MAX_OFF = 1e-3

def test_gray_images():
    batch = TensorImageBW((torch.rand(4, 1, 28, 28)*255).byte()), TensorCategory(torch.arange(4))
    norm = Normalize.from_stats([.13], [.31], cuda=False)
    fs = [IntToFloatTensor(), *aug_transforms(), norm]
    before, within = batch_transforms(fs)
    assert before==[]
    torch.manual_seed(1)
    a = batch
    for f in within: a = f(a, split_idx=0)
    torch.manual_seed(1)
    b = Pipeline(fs, split_idx=0)(batch)
    assert [type(o) for o in a]==[type(o) for o in b]==[TensorImageBW, TensorCategory]
    assert torch.allclose(a[0], b[0], rtol=0, atol=MAX_OFF) and a[1] is batch[1]
