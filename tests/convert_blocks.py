"""Blocks in which a norm may meet an activation, and what `convert` may make of each."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Convolution and norm; subclasses say what comes behind. `fused` is what `fuse="trace"` joins."""

    fused = 0
    rewritten = False

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)

    def normalized(self, x):
        return self.bn(self.conv(x))


class Modules(Block):
    fused = 1

    def forward(self, x):
        return self.act(self.normalized(x))


class Function(Block):
    fused, rewritten = 1, True

    def forward(self, x):
        return F.relu(self.normalized(x), inplace=True)


class Method(Block):
    fused, rewritten = 1, True

    def forward(self, x):
        return self.normalized(x).relu_()


class LeakyFunction(Block):
    fused, rewritten = 1, True

    def forward(self, x):
        return F.leaky_relu(self.normalized(x))


class Gelu(Block):
    fused, rewritten = 1, True

    def forward(self, x):
        return F.gelu(self.normalized(x), approximate="tanh")


class Shared(Block):
    fused, rewritten = 2, True

    def __init__(self):
        super().__init__()
        self.second = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.act(self.second(self.conv(self.act(self.normalized(x)))))


class Residual(Block):
    fused, rewritten = 1, True

    def forward(self, x):
        y = self.normalized(x)
        y += x
        return self.act(y)


class ResidualFirst(Block):
    fused, rewritten = 1, True

    def forward(self, x):
        return F.silu(x + self.normalized(x))


class Downsampled(Block):
    """The residual is computed after the norm, and is a norm itself."""

    fused, rewritten = 1, True

    def __init__(self):
        super().__init__()
        self.shortcut = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        y = self.normalized(x)
        y += self.shortcut(x)
        return self.act(y)


class ThroughIdentity(Block):
    fused, rewritten = 1, True

    def __init__(self):
        super().__init__()
        self.drop, self.skip = nn.Identity(), nn.Identity()

    def forward(self, x):
        return self.act(self.drop(self.normalized(x)) + self.skip(x))


class Chained(Block):
    """The residual of one fusion is the output of another."""

    fused, rewritten = 2, True

    def __init__(self):
        super().__init__()
        self.second = nn.BatchNorm2d(4)

    def forward(self, x):
        y = F.relu(self.normalized(x))
        return F.relu(self.second(self.conv(y)) + y)


class Broadcast(Block):
    """The residual has another shape: the norm is fused by the text, and computed apart by the shape."""

    fused, rewritten = 1, True

    def forward(self, x):
        return F.relu(self.normalized(x) + x.mean((2, 3), keepdim=True))


class OtherSlope(Block):
    def forward(self, x):
        return F.leaky_relu(self.normalized(x), 0.2)


class UsedTwice(Block):
    def forward(self, x):
        y = self.normalized(x)
        return self.act(y.clone()) + y


class Doubled(Block):
    def forward(self, x):
        y = self.normalized(x)
        return F.relu(y + y)


class CalledTwice(Block):
    def forward(self, x):
        return self.act(self.normalized(self.act(self.normalized(x))))


class IntoTheResidual(Block):
    """`kept` is written by the addition, which a fused norm would not do."""

    def forward(self, x):
        kept = x * 2
        y = kept
        y += self.normalized(x)
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
        return F.relu(torch.add(self.normalized(x), x, alpha=2))


class ByValue(Block):
    def forward(self, x):
        y = self.normalized(x)
        return F.relu(y) if x.sum() > 0 else y


class ByKind(Block):
    def forward(self, x):
        y = self.normalized(x)
        return F.relu(y) * 2 if isinstance(x, torch.Tensor) else F.relu(y)


class ByMode(Block):
    def forward(self, x):
        y = self.normalized(x)
        return F.relu(y) if self.training else F.relu(y) * 2


class ByGradMode(Block):
    def forward(self, x):
        y = F.relu(self.normalized(x))
        return y if torch.is_grad_enabled() else y * 2


class ByChance(Block):
    def forward(self, x):
        return F.relu(self.normalized(x)) * random.choice((1.0, 1.0))


class ByArgument(Block):
    def forward(self, x, skip=None):
        y = self.normalized(x)
        return F.relu(y) if skip is not None else y


class Counts(Block):
    """Writes attributes, which a traced forward would not."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, None

    def forward(self, x):
        self.calls += 1
        self.seen = F.relu(self.normalized(x))
        return self.seen * self.calls


class CountsInABuffer(Block):
    fused, rewritten = 1, True

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return F.relu(self.normalized(x)) + self.calls


class Given(Block):
    """A parameter of its own in the text."""

    fused, rewritten = 1, True

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x):
        return F.relu(self.normalized(x)) * self.scale


class ByModeWithModules(Block):
    """What is done differently lies behind the pair: the pair is joined, the forward stays."""

    fused = 1

    def forward(self, x):
        y = self.act(self.normalized(x))
        return y if self.training else y * 2


class PartOfASequence(Block):
    """The pair stands in a Sequential, and is called one by one all the same."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x):
        y = self.layers[0](x)
        return self.layers[1](y) + y


class Pair(Block):
    """The norm is the last layer of a Sequential (of a Sequential), the activation stands behind it."""

    fused, rewritten = 3, True

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(self.conv, self.bn)
        del self.conv, self.bn
        self.outer = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))
        self.last = nn.Sequential(nn.BatchNorm2d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.inner(x), inplace=True)
        return self.act(self.last(F.silu(self.outer(x))))


class PairWithMore(Block):
    """As `Pair`, where it must not be: an addition, a part that is called alone, a second use."""

    def __init__(self):
        super().__init__()
        self.added = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.parts = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.twice = nn.Sequential(nn.BatchNorm2d(4))

    def forward(self, x):
        x = F.relu(self.added(x) + x)
        x = F.relu(self.parts(x)) + self.parts[1](x)
        return F.relu(self.twice(x)) + self.twice(x)


class OfAnother(Block):
    """The norm belongs to a block that activates; here it is called without."""

    def __init__(self):
        super().__init__()
        self.inner = Modules()

    def forward(self, x):
        return self.inner(x) + self.inner.bn(x)


BLOCKS = [
    Pair,
    PairWithMore,
    Modules,
    Function,
    Method,
    LeakyFunction,
    Gelu,
    Shared,
    Residual,
    ResidualFirst,
    Downsampled,
    ThroughIdentity,
    Chained,
    Broadcast,
    OtherSlope,
    UsedTwice,
    Doubled,
    CalledTwice,
    IntoTheResidual,
    WrittenInput,
    Scaled,
    ByValue,
    ByKind,
    ByMode,
    ByGradMode,
    ByChance,
    ByArgument,
    Counts,
    CountsInABuffer,
    Given,
    ByModeWithModules,
    PartOfASequence,
    OfAnother,
]
