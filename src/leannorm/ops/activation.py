"""Each activation: forward, and its derivative from the input, and from the output if that determines it.

The derivatives agree with torch's at the kinks (relu'(0) = 0, hardtanh'(±1) = 0), so fusing a norm with
its activation changes no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from textwrap import dedent, fill, indent
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Activation(NamedTuple):
    """`grad(z)` is the derivative at input z; `from_output(y)` the same from the output y, or None.

    `module` computes it in torch, with `parameters`.
    """

    forward: Callable[[Tensor], Tensor]
    grad: Callable[[Tensor], Tensor]
    from_output: Callable[[Tensor], Tensor] | None
    module: type[nn.Module]
    parameters: Mapping[str, Any] = {}


def _between(z: Tensor, low: float, high: float) -> Tensor:
    return ((z > low) & (z < high)).to(z.dtype)


def _gelu_grad(z: Tensor) -> Tensor:
    cdf = 0.5 * (1 + torch.erf(z * math.sqrt(0.5)))
    return cdf + z * torch.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))


def _gelu_tanh_grad(z: Tensor) -> Tensor:
    k, a = math.sqrt(2 / math.pi), 0.044715
    z = z.clamp(-10, 10)  # beyond these it is 0 or 1, and z * z may be infinite
    t = torch.tanh(k * (z + a * z * z * z))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * k * (1 + 3 * a * z * z)


def _silu_grad(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def _mish_grad(z: Tensor) -> Tensor:
    t = torch.tanh(F.softplus(z))
    return t + z * torch.sigmoid(z) * (1 - t * t)


def _hardswish_grad(z: Tensor) -> Tensor:
    inside = torch.where(z >= 3, torch.ones_like(z), z / 3 + 0.5)  # NaN stays NaN
    return torch.where(z <= -3, torch.zeros_like(z), inside)


def _positive(z: Tensor) -> Tensor:
    return (~(z <= 0)).to(z.dtype)  # 1 at NaN, as in torch


# in the order of csrc/activation.h and of Triton's branches, which compute the same
ACTIVATIONS: dict[str, Activation] = {
    "identity": Activation(lambda z: z, torch.ones_like, torch.ones_like, nn.Identity),
    "relu": Activation(torch.relu, _positive, _positive, nn.ReLU),
    "leaky_relu": Activation(
        F.leaky_relu,
        lambda z: torch.where(z > 0, torch.ones_like(z), 0.01),
        lambda y: torch.where(y > 0, torch.ones_like(y), 0.01),
        nn.LeakyReLU,
        {"negative_slope": 0.01},
    ),
    "silu": Activation(F.silu, _silu_grad, None, nn.SiLU),
    "gelu": Activation(F.gelu, _gelu_grad, None, nn.GELU, {"approximate": "none"}),
    "gelu_tanh": Activation(
        lambda z: F.gelu(z, approximate="tanh"), _gelu_tanh_grad, None, nn.GELU, {"approximate": "tanh"}
    ),
    "hardswish": Activation(F.hardswish, _hardswish_grad, None, nn.Hardswish),
    "hardtanh": Activation(
        F.hardtanh,
        lambda z: _between(z, -1, 1),
        lambda y: _between(y, -1, 1),
        nn.Hardtanh,
        {"min_val": -1.0, "max_val": 1.0},
    ),
    "relu6": Activation(F.relu6, lambda z: _between(z, 0, 6), lambda y: _between(y, 0, 6), nn.ReLU6),
    "elu": Activation(
        F.elu,
        lambda z: torch.where(z > 0, torch.ones_like(z), torch.exp(z)),
        lambda y: torch.where(y > 0, torch.ones_like(y), y + 1),
        nn.ELU,
        {"alpha": 1.0},
    ),
    "mish": Activation(F.mish, _mish_grad, None, nn.Mish),
}

_LISTS = {
    "<activations>": [
        f"{name} ({', '.join(f'{k} {v}' for k, v in a.parameters.items())})" if a.parameters else name
        for name, a in ACTIVATIONS.items()
    ],
    "<from_output>": [name for name, a in ACTIVATIONS.items() if a.from_output and name != "identity"],
    "<from_input>": [name for name, a in ACTIVATIONS.items() if not a.from_output],
}
Documented = TypeVar("Documented", bound=Callable[..., object])


def lists_activations(documented: Documented) -> Documented:
    """Replace the marks in a docstring by names of the table: all of them, those with a `from_output`, the
    others."""
    paragraphs = (documented.__doc__ or "").split("\n\n")
    for i, text in enumerate(paragraphs):
        for mark, names in _LISTS.items():
            text = text.replace(mark, ", ".join(names))
        if text != paragraphs[i]:
            paragraphs[i] = indent(fill(dedent(text), 104), "    ")
    documented.__doc__ = "\n\n".join(paragraphs)
    return documented
