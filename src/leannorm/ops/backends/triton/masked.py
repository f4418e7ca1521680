"""The per-channel operators with a mask on a GPU: the kernels of `channel.py`, which then look at the mask.

It is read as the input is, a byte a position for each block of channels. What it says is no data is not
loaded: such elements are switched off in each load, whatever they hold. Launches and bytes stand in
`channel.py`; results at padding are written once, as 0.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from leannorm.ops.backends.triton import channel, channel_gradients
from leannorm.ops.backends.triton.tape import empty, empty_like, taped
from leannorm.ops.plan import statistics_shape


def _checked(x: Tensor, mask: Tensor, groups: int = 0) -> None:
    if groups < 0:
        raise RuntimeError("a mask goes with no groups of samples")
    shape = (x.shape[0], prod(x.shape[2:]))
    if mask.dtype != torch.bool or mask.shape != shape or not mask.is_contiguous():
        raise RuntimeError(f"mask must be bool, contiguous and of shape {shape}, got {tuple(mask.shape)}")


def _new_count(x: Tensor, mask: Tensor, groups: int) -> Tensor:
    """Of the values of each statistic: of all, or of every sample. The kernels write it."""
    shape = (x.shape[0], 1) if groups else ()
    if x.numel() == 0:
        return torch.zeros(shape, dtype=torch.float64, device=x.device)
    return empty(shape, torch.float64, x.device)


@taped
def masked_moments(x: Tensor, mask: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    _checked(x, mask, groups)
    channel.check("identity", x)
    count = _new_count(x, mask, groups)
    if x.numel() == 0:
        shape = statistics_shape(x.shape, groups)
        return channel.zeros(x, shape), channel.zeros(x, shape), count
    mean, m2, _ = channel.moments(x, groups, None, mask, count)
    return mean, m2, count


@taped
def masked_normalize(
    x: Tensor,
    mask: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    act: str,
) -> Tensor:
    _checked(x, mask)
    return channel.normalized(x, mask, mean, rstd, None, weight, bias, residual, act)


@taped
def masked_forward(
    x: Tensor,
    mask: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    act: str,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _checked(x, mask, groups)
    count = _new_count(x, mask, groups)
    return *channel.forward(x, mask, weight, bias, residual, eps, act, groups, count), count


@taped
def masked_grad_sums(
    dy: Tensor,
    x: Tensor,
    mask: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    act: str,
) -> tuple[Tensor, Tensor]:
    _checked(x, mask)
    return channel_gradients.grad_sums(dy, x, mask, mean, rstd, weight, bias, residual, out, act)


@taped
def masked_input_grad(
    dy: Tensor,
    x: Tensor,
    mask: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    p: Tensor | None,
    q: Tensor | None,
    act: str,
    want_dz: bool,
) -> tuple[Tensor, Tensor]:
    _checked(x, mask)
    saved = mean, rstd, weight, bias, residual, out
    return channel_gradients.input_grad(dy, x, mask, *saved, p, q, act, want_dz)


@taped
def masked_backward(
    dy: Tensor,
    x: Tensor,
    mask: Tensor,
    mean: Tensor,
    rstd: Tensor,
    count: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    act: str,
    groups: int,
    want_dz: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _checked(x, mask, groups)
    dx, saved = empty_like(x), (mean, rstd, weight, bias, residual, out)
    return dx, *channel_gradients.backward(dy, x, mask, count, dx, *saved, act, groups, want_dz)
