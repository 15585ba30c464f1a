"""A peer of whole_fit.py: what someone writes who doesn't use fastai, a plain loop over torchvision's v2 transforms and
a DataLoader

The same ResNet-18, batch, share of validation, precision as `speed_up(precision='bf16')` and one-cycle schedule; its
augmentations are those that torchvision recommends (flip, rotation, zoom, color), drawn for each image by a worker,
so they resemble `aug_transforms` but aren't the same."""
from time import perf_counter

import torch
import torch.nn.functional as F
from gpubench.ground.core import n_cores, wait_for
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18
from torchvision.transforms import v2

MEAN_STD = [.485, .456, .406], [.229, .224, .225]
LAST = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*MEAN_STD)]
AUGMENTED = v2.Compose([v2.RandomResizedCrop(224, scale=(.6, 1)), v2.RandomHorizontalFlip(),
                        v2.RandomRotation(10), v2.ColorJitter(.2, .2), *LAST])
PLAIN = v2.Compose([v2.Resize(224), v2.CenterCrop(224), *LAST])

def is_image(path): return path.endswith('.jpg')

def loaders(folder, bs, device):
    "Training and validation, a fifth of the images"
    train, valid = (ImageFolder(folder, tfm, is_valid_file=is_image, allow_empty=True) for tfm in (AUGMENTED, PLAIN))
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(42)).tolist()
    n = len(train)//5
    shared = dict(batch_size=bs, num_workers=min(16, n_cores()), pin_memory=device=='cuda', persistent_workers=True)
    return (DataLoader(Subset(train, order[n:]), shuffle=True, drop_last=True, **shared),
            DataLoader(Subset(valid, order[:n]), **shared))

def predict(model, xb, device):
    xb = xb.to(device, non_blocking=True, memory_format=torch.channels_last)
    with torch.autocast('cuda', torch.bfloat16, enabled=device=='cuda'): return model(xb).float()

def train_epoch(model, batches, opt, schedule, device):
    model.train()
    for xb,yb in batches:
        loss = F.cross_entropy(predict(model, xb, device), yb.to(device, non_blocking=True))
        loss.backward()
        opt.step()
        opt.zero_grad()
        schedule.step()

@torch.no_grad()
def accuracy(model, batches, device):
    model.eval()
    right = [predict(model, xb, device).argmax(1)==yb.to(device) for xb,yb in batches]
    return torch.cat(right).float().mean().item()

def torchvision_loop(folder, epochs, device, found, bs=64):
    "Train; `found` gets the seconds by part"
    start_s = perf_counter()
    train, valid = loaders(folder, bs, device)
    found.update(loaders_s=perf_counter()-start_s, n_train=len(train)*bs, n_valid=len(valid.dataset),
                 train_s=[], valid_s=[])
    model = resnet18(num_classes=10).to(device, memory_format=torch.channels_last)
    opt = torch.optim.AdamW(model.parameters(), weight_decay=.01, fused=device=='cuda')
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-3, total_steps=epochs*len(train))
    def timed(part, f, *args):
        begin_s = perf_counter()
        value = f(*args)
        wait_for(device)
        found[part].append(perf_counter()-begin_s)
        return value
    for _ in range(epochs):
        timed('train_s', train_epoch, model, train, opt, schedule, device)
        score = timed('valid_s', accuracy, model, valid, device)
    found.update(metrics=dict(accuracy=score), total_s=perf_counter()-start_s)
