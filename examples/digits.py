"""Handwritten digits, trained twice: in plain PyTorch, and in less memory under `lean()`.

    python examples/digits.py

Needs scikit-learn (`pip install 'leannorm[demo]'`), which has 1,797 digits. The only difference is the `with`
around the forward pass.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from measure import held, same_weights
from sklearn.datasets import load_digits
from torch import nn

import leannorm


def network():
    """Four convolutions, each with batch norm and an activation, as in most vision models."""
    sizes = [(1, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2)]
    blocks = [
        nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.SiLU(inplace=True))
        for i, o, stride in sizes
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def data():
    """Images (N, 1, 16, 16) and labels; 1,500 for training and 297 for testing."""
    bundled = load_digits()
    images = torch.from_numpy(bundled.images).float().unsqueeze(1) / 8 - 1
    images, labels = F.interpolate(images, (16, 16), mode="bilinear"), torch.from_numpy(bundled.target)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def train(model, images, labels, around, epochs=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    order = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=order).split(125):
            with around:
                loss = F.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def main():
    (images, labels), (test_images, test_labels) = data()
    models = []
    for around in (nullcontext(), leannorm.lean()):
        torch.manual_seed(0)
        models.append(train(network(), images, labels, around))
    same_weights(*models)
    model = models[1]
    with torch.no_grad():
        right = (model.eval()(test_images).argmax(1) == test_labels).float().mean()
    print(f"accuracy on {len(test_labels)} test digits: {right:.3f}")
    model.train()
    held(model, lambda: F.cross_entropy(model(images[:250]), labels[:250]))


if __name__ == "__main__":
    main()
