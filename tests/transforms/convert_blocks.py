"""Blocks in which a norm meets an activation, and how many pairs are computed as one."""

from __future__ import annotations

import copy
import random

import torch
import torch.nn.functional as F
from torch import nn


def fused(outputs: torch.Tensor) -> int:
    """How many calls of a norm, of those that led to these outputs, computed an activation too."""
    seen, left, count = set(), [outputs.grad_fn], 0
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            count += getattr(node, "act", "identity") != "identity"
            left += [function for function, _ in node.next_functions]
    return count


def count(model, x=None):
    """The pairs that a forward pass computes as one."""
    model = copy.deepcopy(model).train()
    with nodes_of_python():
        return fused(model(torch.randn(3, 4, 5, 5) if x is None else x))


def nodes_of_python():
    """Nodes under hooks of saved tensors are Python's, which say their activation."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def results(model, x):
    """Outputs, gradients and buffers after a step of training and an evaluation, from the same start."""
    leaf = x.clone().requires_grad_()
    y = model.train()(leaf)
    gradients = torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()], materialize_grads=True)
    with torch.no_grad():
        return [y, *gradients, *model.buffers(), model.eval()(x)]


def assert_same(model, original, x):
    for got, want in zip(results(model, x), results(original, x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


class Block(nn.Module):
    """Convolution and norm; subclasses say what comes behind. `fused` is how many `fuse="trace"` joins."""

    fused = 0

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)

    def normalized(self, x):
        return self.bn(self.conv(x))


class Modules(Block):
    fused = 1

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class Function(Block):
    fused = 1

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Method(Block):
    fused = 1

    def forward(self, x):
        return self.bn(self.conv(x)).relu_()


class LeakyFunction(Block):
    fused = 1

    def forward(self, x):
        return F.leaky_relu(self.bn(self.conv(x)))


class Gelu(Block):
    fused = 1

    def forward(self, x):
        return F.gelu(self.bn(self.conv(x)), approximate="tanh")


class Shared(Block):
    fused = 2

    def __init__(self):
        super().__init__()
        self.second = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.act(self.second(self.conv(self.act(self.bn(self.conv(x))))))


class Residual(Block):
    fused = 1

    def forward(self, x):
        y = self.bn(self.conv(x))
        y += x
        return self.act(y)


class ResidualFirst(Block):
    fused = 1

    def forward(self, x):
        return F.relu(x + self.bn(self.conv(x)))


class Downsampled(Block):
    """The residual is computed after the norm, and is a norm itself."""

    fused = 1

    def __init__(self):
        super().__init__()
        self.shortcut = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        y = self.bn(self.conv(x))
        y += self.shortcut(x)
        return self.act(y)


class ThroughIdentity(Block):
    fused = 1

    def __init__(self):
        super().__init__()
        self.drop, self.skip = nn.Identity(), nn.Identity()

    def forward(self, x):
        y = self.bn(self.conv(x))
        y = self.drop(y)
        y += self.skip(x)
        return self.act(self.drop(y))


class Optional(Block):
    """As in a ResNet: what stands between the norm and the addition may be there or not."""

    fused = 1

    def __init__(self):
        super().__init__()
        self.se, self.downsample = None, nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        shortcut = x
        x = self.conv(x)
        x = self.bn(x)
        if self.se is not None:
            x = self.se(x)
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        x = self.act(x)
        return x


class Chained(Block):
    """The residual of one fusion is the output of another."""

    fused = 2

    def __init__(self):
        super().__init__()
        self.second = nn.BatchNorm2d(4)

    def forward(self, x):
        y = F.relu(self.bn(self.conv(x)))
        return F.relu(self.second(self.conv(y)) + y)


class CalledTwice(Block):
    fused = 2

    def forward(self, x):
        return self.act(self.bn(self.conv(self.act(self.bn(self.conv(x))))))


class ByGradMode(Block):
    fused = 1

    def forward(self, x):
        y = F.relu(self.bn(self.conv(x)))
        return y if torch.is_grad_enabled() else y * 2


class ByChance(Block):
    fused = 1

    def forward(self, x):
        return F.relu(self.bn(self.conv(x))) * random.choice((1.0, 1.0))


class Counts(Block):
    """Writes attributes."""

    fused = 1

    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, None

    def forward(self, x):
        self.calls += 1
        self.seen = F.relu(self.bn(self.conv(x)))
        return self.seen * self.calls


class CountsInABuffer(Block):
    fused = 1

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return F.relu(self.bn(self.conv(x))) + self.calls


class Given(Block):
    """A parameter of its own."""

    fused = 1

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x):
        return F.relu(self.bn(self.conv(x))) * self.scale


class ByModeWithModules(Block):
    """What is done differently lies behind the pair."""

    fused = 1

    def forward(self, x):
        y = self.act(self.bn(self.conv(x)))
        return y if self.training else y * 2


class Pair(Block):
    """The norm is the last layer of a Sequential (of a Sequential), the activation stands behind it."""

    fused = 3

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
    """As `Pair`, with an addition, a part that is called alone, a second use."""

    fused = 3

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

    fused = 1

    def __init__(self):
        super().__init__()
        self.inner = Modules()

    def forward(self, x):
        return self.inner(x) + self.inner.bn(x)


class ListOfLayers(Block):
    """Neighbours by the names of a loop."""

    fused = 2

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])

    def forward(self, x):
        for norm in self.norms:
            x = norm(x)
            x = self.act(x)
        return x


class InBranches(Block):
    """Each way ends with a norm, or with none, and the activation stands behind all of them."""

    fused = 2

    def __init__(self):
        super().__init__()
        self.second, self.how = nn.BatchNorm2d(4), "norm"

    def forward(self, x):
        for _ in range(2):
            y = self.conv(x)
            if self.how == "sum":
                y = self.bn(y) + x
            elif self.how == "norm":
                if x is None:
                    raise ValueError("x")
                y = self.second(y)
            else:
                y = y * 2
            y = self.act(y)
            x, self.how = y, "norm" if self.how == "sum" else "sum"
        return x


class InOneBranch(Block):
    fused = 1

    def forward(self, x):
        y = self.conv(x)
        if self.training or x.shape[0] > 2:
            z = self.bn(y)
            y = z + x
        return F.relu(y)


BLOCKS = [
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
    Optional,
    Chained,
    CalledTwice,
    ByGradMode,
    ByChance,
    Counts,
    CountsInABuffer,
    Given,
    ByModeWithModules,
    Pair,
    PairWithMore,
    OfAnother,
    ListOfLayers,
    InBranches,
    InOneBranch,
]
