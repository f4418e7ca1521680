"""A training loop like timm's `train.py`: a timm model, EMA of the weights, bfloat16 autocast, channels_last.

    python examples/timm_loop.py

Needs timm and scikit-learn. In timm's own script, one line after the model is created does the same:
`model = leannorm.make_lean(model)`. Weights, EMA and gradients equal plain PyTorch's, bit for bit.
"""

import with_torchvision as with_torchvision  # timm imports torchvision

# isort: split
import timm
import torch
import torch.nn.functional as F
from measure import held, same_weights
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

import leannorm

STEPS = 2


def data():
    """Digits as colour images (N, 3, 64, 64) in channels_last, and their labels."""
    bundled = load_digits()
    images = torch.from_numpy(bundled.images[: 16 * STEPS]).float().unsqueeze(1) / 8 - 1
    images = F.interpolate(images, (64, 64), mode="bilinear").expand(-1, 3, -1, -1)
    return images.contiguous(memory_format=torch.channels_last), torch.from_numpy(bundled.target)


def loss_of(model, images, labels):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(images), labels, label_smoothing=0.1)


def train(model, images, labels):
    ema = ModelEmaV3(model, decay=0.99)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    schedule = CosineLRScheduler(optimizer, t_initial=STEPS, t_in_epochs=False)
    model.train()
    for step in range(STEPS):
        rows = slice(16 * step, 16 * (step + 1))
        loss = loss_of(model, images[rows], labels[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update(model, step=step)
        schedule.step_update(step + 1)
    print(f"loss of the last batch: {loss.item():.3f}")
    return ema.module


def main():
    images, labels = data()
    averages = []
    for lean in (False, True):
        torch.manual_seed(0)
        model = timm.create_model("resnet18", num_classes=10).to(memory_format=torch.channels_last)
        if lean:
            model = leannorm.make_lean(model)
        averages.append(train(model, images, labels))
    same_weights(*averages)
    model = leannorm.unmake_lean(model)
    held(model, lambda: loss_of(model, images[:16], labels[:16]))


if __name__ == "__main__":
    main()
