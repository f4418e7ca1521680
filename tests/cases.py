"""The table: which inputs every per-channel norm is tried on, the float64 oracle, and the error budget."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from leannorm.ops.activation import ACTIVATIONS
from leannorm.report.answers import allowed_error
from leannorm.report.answers import largest_error as error

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ACTS = tuple(ACTIVATIONS)


class ChannelCase(NamedTuple):
    """An input's shape and how it lies in memory."""

    shape: tuple[int, ...]
    layout: str = "contiguous"

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))}-{self.layout}"


CASES = [
    ChannelCase((40, 1)),
    ChannelCase((17, 7)),
    ChannelCase((8, 33), "sliced"),
    ChannelCase((2, 3, 1)),
    ChannelCase((2, 16, 9)),
    ChannelCase((3, 5, 17), "transposed"),
    ChannelCase((2, 8, 7, 7)),
    ChannelCase((1, 3, 15, 17)),
    ChannelCase((4, 5, 3, 3), "channels_last"),
    ChannelCase((2, 6, 4, 4), "sliced"),
    ChannelCase((2, 6, 4, 5), "offset"),
    ChannelCase((3, 4, 2, 2), "expanded"),
    ChannelCase((9, 64, 24, 24)),  # more than the reference works on at a time
    ChannelCase((9, 64, 24, 24), "channels_last"),
    ChannelCase((2, 3, 2, 4, 3)),
    ChannelCase((2, 5, 2, 3, 4), "channels_last"),
]
EMPTY = [(0, 3), (0, 4, 5), (2, 4, 0), (0, 3, 4, 4), (0, 3, 2, 2, 2)]
# how far the mean may be from zero, in standard deviations
GAPS = [(0.0, 1.0), (1.0, 0.0), (10.0, 1.0), (100.0, 1.0), (1e3, 1.0), (1e4, 1.0), (0.0, 1e-6)]


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The same values, lying otherwise in memory (`expanded`: the first sample's, for all)."""
    if layout == "channels_last":
        return x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "sliced":
        return torch.stack((x, x), -1).flatten(-2)[..., ::2]
    if layout == "offset":
        return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)
    if layout == "expanded":
        return x[:1].expand(x.shape)
    return x.contiguous()


def make(case: ChannelCase, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
    values = torch.randn(case.shape, dtype=torch.float64) * std + mean
    return lay_out(values.to(dtype), case.layout)


def exact_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, act: str, eps: float
) -> Tensor:
    """The definition, in float64, differentiable."""
    x = x.double()
    axes = (0, *range(2, x.dim()))
    centred = x - x.mean(axes, keepdim=True)
    y = centred / (centred.square().mean(axes, keepdim=True) + eps).sqrt()
    for parameter, apply in ((weight, torch.mul), (bias, torch.add)):
        if parameter is not None:
            y = apply(y, parameter.double().reshape(-1, *(1,) * (x.dim() - 2)))
    y = y if residual is None else y + residual.double()
    return ACTIVATIONS[act].forward(y)


def stock_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, act: str, eps: float
) -> Tensor:
    """torch's own operations, one after the other."""
    y = torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    return ACTIVATIONS[act].forward(y if residual is None else y + residual)


def run(function, x, weight, bias, residual, dy, act="identity", eps=1e-5):  # type: ignore[no-untyped-def]
    """The output, and the gradients of whichever inputs there are."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias, residual)]
    y = function(*leaves, act, eps)
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], dy.to(y.dtype))]


def run_exact(x, weight, bias, residual, dy, act="identity", eps=1e-5):  # type: ignore[no-untyped-def]
    doubles = [None if t is None else t.double() for t in (x, weight, bias, residual)]
    return run(exact_batch_norm, *doubles, dy, act, eps)


def budget(torchs: Tensor, want: Tensor, direct: Tensor | None = None) -> float:
    """`allowed_error`: one rounding of the arithmetic and one of the output, at its largest value.

    The input's gradient is a difference; `direct`, its first term, is what those roundings are of: a row of
    one value leaves next to nothing of it.
    """
    values = want if direct is None else torch.stack((want, direct))
    largest = values.abs().max().item() if want.numel() else 0.0
    # for float64 the oracle is no wider: its own sums are as far off as ours may be
    roundings = 8 if torchs.dtype == torch.float64 else 2
    return allowed_error(error(torchs, want), torchs.dtype, largest, roundings)


def output_and_gradients(layer, x, dy, second=False):
    """A layer's output, the gradients of x and its parameters; with `second` the gradients of those too."""
    x = x.detach().requires_grad_()
    y = layer(x)
    leaves = [x, *layer.parameters()]
    found = torch.autograd.grad(y, leaves, dy, create_graph=second)
    more = ()
    if second:
        total = sum(g.square().sum() for g in found)
        more = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return y, found, more


def is_fast(node):
    """Was this node made on the fast path (`autograd/fast.py`)? One in C++ was."""
    return not isinstance(node, torch.autograd.function.BackwardCFunction) or node.call.backend.as_given
