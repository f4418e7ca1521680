"""Real handwritten digits, a network for them, and its training, in plain PyTorch or under `lean()`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leannorm._errors import InputError, MissingDependencyError
from leannorm.saving import lean

SIZE = 28
WAYS: dict[str, Callable[[], AbstractContextManager[object]]] = {"stock": nullcontext, "lean()": lean}


class Digits(NamedTuple):
    """Images (N, 1, 28, 28), float32 of mean 0 and variance 1 over the training images; labels 0 to 9."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def to(self, device: str) -> Digits:
        return Digits(*(part.to(device) for part in self))


def load() -> Digits:
    """Scikit-learn's 1,797 digits, in a fixed split; they need no download.

    Raises MissingDependencyError if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise MissingDependencyError(
            "the digits come with scikit-learn, which is not installed: pip install 'leannorm[demo]'"
        ) from None
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    images, test_images, labels, test_labels = (torch.from_numpy(part) for part in split)
    images, test_images = (
        F.interpolate(part.float().view(-1, 1, 8, 8), (SIZE, SIZE), mode="bilinear")
        for part in (images, test_images)
    )
    std, mean = torch.std_mean(images)
    return Digits((images - mean) / std, labels, (test_images - mean) / std, test_labels)


def pair(in_channels: int, out_channels: int, kernel_size: int) -> nn.Module:
    """torch's convolution and batch norm."""
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels))


class DigitNetwork(nn.Module):
    """Two convolution-norm pairs (1 → 32 → 64), pool, dropout, two linear layers, log-softmax.

    Images (N, 1, 28, 28) to log-probabilities (N, 10). Follows the network of PyTorch's tutorial on
    fusing convolution and batch norm; `pair` makes its pairs.

    >>> DigitNetwork()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, pair: Callable[[int, int, int], nn.Module] = pair) -> None:
        super().__init__()
        self.pair1 = pair(1, 32, 3)
        self.pair2 = pair(32, 64, 3)
        self.fc1 = nn.Linear(9216, 128)
        self.dropout = nn.Dropout(0.5)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.pair1(images), inplace=True)
        x = F.relu(self.pair2(x), inplace=True)
        x = F.max_pool2d(x, 2).flatten(1)
        x = F.relu(self.dropout(self.fc1(x)), inplace=True)
        return F.log_softmax(self.fc2(x), dim=1)


class Trained(NamedTuple):
    """One way to train: the mean loss and the test accuracy of each epoch."""

    name: str
    loss: list[float]
    accuracy: list[float]


def check(digits: Digits, epochs: int, batch_size: int, seed: int) -> None:
    """Raises InputError for numbers out of range."""
    most = len(digits.labels)
    if epochs < 1:
        raise InputError(f"--epochs must be at least 1; got {epochs}")
    if batch_size < 2:
        raise InputError(f"--batch-size must be at least 2; got {batch_size}")
    if batch_size > most:
        raise InputError(
            f"--batch-size must be at most {most}, the number of training images; got {batch_size}"
        )
    if not 0 <= seed < 1 << 63:
        raise InputError(f"--seed must be at least 0 and below 2**63; got {seed}")


def train(
    digits: Digits, epochs: int, batch_size: int, seed: int, name: str, progress: Callable[[str], None]
) -> tuple[Trained, dict[str, Tensor]]:
    """Train in one of the `WAYS`; returns the weights and buffers at the end. torch's random state is
    unchanged."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = DigitNetwork().to(digits.images.device)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
        side = Trained(name, [], [])
        for epoch in range(1, epochs + 1):
            progress(f"training digits, {name}, epoch {epoch} of {epochs}")
            losses = []
            for rows in torch.randperm(len(digits.labels)).split(batch_size):
                if len(rows) == batch_size:
                    with WAYS[name]():
                        loss = F.nll_loss(network(digits.images[rows]), digits.labels[rows])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
            side.loss.append(sum(losses) / len(losses))
            side.accuracy.append(_accuracy(network, digits))
    return side, network.state_dict()


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(value.equal(b[name]) for name, value in a.items())


@torch.no_grad()
def _accuracy(network: nn.Module, digits: Digits) -> float:
    right = network.eval()(digits.test_images).argmax(1) == digits.test_labels
    network.train()
    return float(right.float().mean())
