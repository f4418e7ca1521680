"""Each activation: forward, derivative from its input, derivative from its output where that exists.

The derivatives agree with torch's at the kinks (relu'(0) = 0, hardtanh'(±1) = 0), so fusing a norm with
its activation changes no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Activation(NamedTuple):
    """`grad(z)` is the derivative at input z; `grad_from_output(y)`, where the output y tells it."""

    forward: Callable[[Tensor], Tensor]
    grad: Callable[[Tensor], Tensor]
    grad_from_output: Callable[[Tensor], Tensor] | None = None


def _between(z: Tensor, low: float, high: float) -> Tensor:
    return ((z > low) & (z < high)).to(z.dtype)


def _gelu_grad(z: Tensor) -> Tensor:
    cdf = 0.5 * (1 + torch.erf(z * math.sqrt(0.5)))
    return cdf + z * torch.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))


def _gelu_tanh_grad(z: Tensor) -> Tensor:
    k, a = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(k * (z + a * z * z * z))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * k * (1 + 3 * a * z * z)


def _silu_grad(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def _mish_grad(z: Tensor) -> Tensor:
    t = torch.tanh(F.softplus(z))
    return t + z * torch.sigmoid(z) * (1 - t * t)


def _hardswish_grad(z: Tensor) -> Tensor:
    inside = torch.where(z < 3, z / 3 + 0.5, torch.ones_like(z))
    return torch.where(z <= -3, torch.zeros_like(z), inside)


def _positive(z: Tensor) -> Tensor:
    return (~(z <= 0)).to(z.dtype)  # at NaN 1, as torch's


ACTIVATIONS: dict[str, Activation] = {
    "identity": Activation(lambda z: z, torch.ones_like, torch.ones_like),
    "relu": Activation(torch.relu, _positive, _positive),
    "leaky_relu": Activation(
        F.leaky_relu,
        lambda z: torch.where(z > 0, torch.ones_like(z), 0.01),
        lambda y: torch.where(y > 0, torch.ones_like(y), 0.01),
    ),
    "silu": Activation(F.silu, _silu_grad),
    "gelu": Activation(F.gelu, _gelu_grad),
    "gelu_tanh": Activation(lambda z: F.gelu(z, approximate="tanh"), _gelu_tanh_grad),
    "hardswish": Activation(F.hardswish, _hardswish_grad),
    "hardtanh": Activation(F.hardtanh, lambda z: _between(z, -1, 1), lambda y: _between(y, -1, 1)),
    "relu6": Activation(F.relu6, lambda z: _between(z, 0, 6), lambda y: _between(y, 0, 6)),
    "elu": Activation(
        F.elu,
        lambda z: torch.where(z > 0, torch.ones_like(z), torch.exp(z)),
        lambda y: torch.where(y > 0, torch.ones_like(y), y + 1),
    ),
    "mish": Activation(F.mish, _mish_grad),
}
