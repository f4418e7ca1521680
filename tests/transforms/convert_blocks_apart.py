"""Blocks in which a norm meets an activation in a way that must stay as it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from convert_blocks import Block
from torch import nn


class ResidualAndSilu(Block):
    """The kernel would keep the residual for its backward pass; torch's layers let it be overwritten."""

    def forward(self, x):
        x = x * 1
        y = F.silu(x + self.bn(self.conv(x.clone())))
        x.mul_(2)
        return y + x


class Broadcast(Block):
    """The residual has another shape, which the call notices."""

    def forward(self, x):
        mean = x.mean((2, 3), keepdim=True)
        return F.relu(self.bn(self.conv(x)) + mean)


class OtherSlope(Block):
    def forward(self, x):
        return F.leaky_relu(self.bn(self.conv(x)), 0.2)


class UsedTwice(Block):
    def forward(self, x):
        y = self.bn(self.conv(x))
        return self.act(y.clone()) + y


class Doubled(Block):
    def forward(self, x):
        y = self.bn(self.conv(x))
        return F.relu(y + y)


class IntoTheResidual(Block):
    """`kept` is written by the addition, which a fused norm would not do."""

    def forward(self, x):
        kept = x * 2
        y = kept
        y += self.bn(self.conv(x))
        return F.relu(y) + kept


class WrittenInput(Block):
    """The norm's input changes between the norm and the activation."""

    def forward(self, x):
        x = x * 1
        y = self.bn(x)
        x.data.mul_(2)
        return F.relu(y + x)


class Scaled(Block):
    def forward(self, x):
        return F.relu(torch.add(self.bn(self.conv(x)), x, alpha=2))


class ByValue(Block):
    def forward(self, x):
        y = self.bn(self.conv(x))
        return F.relu(y) if x.sum() > 0 else y


class ByKind(Block):
    def forward(self, x):
        y = self.bn(self.conv(x))
        return F.relu(y) * 2 if isinstance(x, torch.Tensor) else F.relu(y)


class ByMode(Block):
    def forward(self, x):
        y = self.bn(self.conv(x))
        return F.relu(y) if self.training else F.relu(y) * 2


class ByArgument(Block):
    def forward(self, x, skip=None):
        y = self.bn(self.conv(x))
        return F.relu(y) if skip is not None else y


class PartOfASequence(Block):
    """The pair stands in a Sequential, and is called one by one all the same."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x):
        y = self.layers[0](x)
        return self.layers[1](y) + y


class ThroughAMethod(Block):
    """What a method returns may go anywhere."""

    def forward(self, x):
        return self.act(self.normalized(x))


class Closure(Block):
    """A function that is called later reads the name."""

    def forward(self, x):
        y = self.bn(self.conv(x))
        read = lambda: y  # noqa: E731
        before = read()
        y = self.act(y.clone())
        return y + before


class Finally(Block):
    def forward(self, x):
        try:
            y = self.bn(self.conv(x))
            return F.relu(y)
        finally:
            self.feat = y


class Loop(Block):
    """The name's value is read in the next turn."""

    def forward(self, x):
        y = z = x
        for _ in range(2):
            z = z + y
            y = self.bn(self.conv(x))
            x = F.relu(y)
        return z + x


class KeptInABranch(Block):
    """What a branch leaves is read by more than the activation."""

    def forward(self, x):
        if self.training:
            y = self.bn(x)
        else:
            x = x * 2
            y = self.bn(x)
        z = self.act(y.clone())
        return y + z


class BetweenBranchAndActivation(Block):
    def forward(self, x):
        if self.training:
            y = self.bn(x)
        else:
            x = x * 2
            y = self.bn(x)
        x = y + x
        y = self.act(y)
        return x * y


APART = [
    ResidualAndSilu,
    Broadcast,
    OtherSlope,
    UsedTwice,
    Doubled,
    IntoTheResidual,
    WrittenInput,
    Scaled,
    ByValue,
    ByKind,
    ByMode,
    ByArgument,
    PartOfASequence,
    ThroughAMethod,
    Closure,
    Finally,
    Loop,
    KeptInABranch,
    BetweenBranchAndActivation,
]
