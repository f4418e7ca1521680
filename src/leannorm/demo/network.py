"""The digit network; its two convolution-norm pairs are arguments."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = Callable[[int, int, int], nn.Module]


def stock_pair(in_channels: int, out_channels: int, kernel_size: int) -> nn.Module:
    """torch's two layers, with the attribute names of `ConvBatchNorm2d`."""
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(out_channels)))


def lean_pair(in_channels: int, out_channels: int, kernel_size: int) -> nn.Module:
    """leannorm's `ConvBatchNorm2d`."""
    from leannorm.nn import ConvBatchNorm2d

    return ConvBatchNorm2d(in_channels, out_channels, kernel_size)


class DigitNetwork(nn.Module):
    """Two convolution-norm pairs (1 → 32 → 64), pool, dropout, two linear layers, log-softmax.

    Images (N, 1, 28, 28) to log-probabilities (N, 10). Follows the network of PyTorch's tutorial on
    fusing convolution and batch norm. The state_dict is the same whatever `pair` makes it from.

    >>> DigitNetwork(stock_pair)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, pair: Pair) -> None:
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


def loss_of(network: nn.Module, images: Tensor, labels: Tensor, seed: int) -> Tensor:
    """The loss of a batch; `seed` decides the dropout mask."""
    torch.manual_seed(seed)
    return F.nll_loss(network(images), labels)
