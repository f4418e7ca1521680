"""Torch's own norms as verbs on the CPU, if they are as exact as the reference; otherwise None.

Torch rounds a mean to float32, and squares half-precision values in float32. So a mean of many standard
deviations, and values whose squares overflow or vanish, are left to other code. For a group norm torch
returns only 1 / sqrt(var + eps), from which a variance near eps cannot be computed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from leannorm._types import KeptByChannelNorm
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.layout import memory_format
from leannorm.ops.modes import recorded, traced, transformed
from leannorm.ops.precision import compute_dtype, gradient_dtype, statistics_dtype

_ATEN = torch.ops.aten
_batched = torch._C._functorch.is_legacy_batchedtensor
_NEAR = 4.0  # standard deviations between 0 and a mean that costs no digit
LEAST_RSTD, _MOST_RSTD = 1e-10, 1e10  # bounds of rstd: its square is far from the limits of float32
_OF_EPS = 16.0  # times eps: a larger variance is computed from 1 / sqrt(var + eps) to some 1e-7
LEAST_EPS = 1e-20  # from which on no small variance makes rstd unusual
_FEW = 8  # channels of a group: with fewer, torch's backward pass is several times slower in channels_last


def usual(mean: Tensor, rstd: Tensor) -> bool:
    """Whether the statistics are finite and may be squared."""
    if not rstd.numel():
        return False
    low, high = torch.aminmax(rstd)
    return bool(low > LEAST_RSTD) and bool(high < _MOST_RSTD) and bool(mean.sum().isfinite())


def far(mean: Tensor, rstd: Tensor) -> bool:
    return not bool((mean * rstd).abs().max() <= _NEAR)


def near(mean: Tensor, rstd: Tensor) -> bool:
    """Whether the statistics are ordinary, with no mean far from 0."""
    return usual(mean, rstd) and not far(mean, rstd)


def is_exact(mean: Tensor, rstd: Tensor) -> bool:
    """`near` where eps is at least `LEAST_EPS`, in fewer calls of operators."""
    least, most = torch.aminmax(rstd)
    if not least.item() > LEAST_RSTD:
        return False
    low, high = torch.aminmax(mean)
    return max(-low.item(), high.item()) * most.item() <= _NEAR or not far(mean, rstd)


def is_exact_by_variance(mean: Tensor, var: Tensor, eps: float = 0.0) -> bool:
    """The same by the variance, to which eps has not been added."""
    low, high = torch.aminmax(torch.addcmul(var, mean, mean, value=-1 / _NEAR**2))
    return low.item() >= -eps and high.item() < LEAST_RSTD**-2


def behind(y: Tensor, residual: Tensor | None, act: str) -> Tensor:
    """act(y + residual), in y where that is possible."""
    if residual is not None:
        y.add_(residual)
    if act == "identity":
        return y
    return y.relu_() if act == "relu" else ACTIVATIONS[act].forward(y)


def dense(x: Tensor) -> bool:
    return x.is_contiguous() or x.is_contiguous(memory_format=memory_format(x))


def serves(x: Tensor, *others: Tensor | None) -> bool:
    """Whether these are plain tensors and nothing records the computation."""
    if traced() or transformed(x, *others) or recorded(x, *others):
        return False
    given = [t for t in (x, *others) if t is not None]
    if any(
        map(_batched, given)
    ):  # by autograd.grad(is_grads_batched=True): torch's norms have no rule for it
        return False
    return x.numel() > 0 and all(type(t) in (Tensor, Parameter) for t in given)


def adds_in_a_row(x: Tensor) -> bool:
    """Whether torch adds up a channel one value after the other, as it does in channels_last."""
    return x.dtype == compute_dtype(x) and memory_format(x) != torch.contiguous_format


def batch_moments(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Mean and variance of every channel; None if torch's lose digits."""
    if not dense(x) or adds_in_a_row(x):
        return None
    # torch computes half precision in float32 if these are float32
    unused = torch.zeros(x.shape[1], dtype=compute_dtype(x))
    mean, var = _ATEN.batch_norm_update_stats(x, unused, unused.clone(), 1.0)
    if not bool(torch.addcmul(var, mean, mean, value=-1 / _NEAR**2).min() >= 0):
        return None
    low, high = torch.aminmax(var)
    if not bool(high < LEAST_RSTD**-2):
        return None
    if bool(low <= _MOST_RSTD**-2):
        few = var <= _MOST_RSTD**-2
        if bool(var[few].any()) or bool(x[:, few].any()):
            return None  # unless the channels are all zeros
    return mean, var


def group_moments(x: Tensor, eps: float, groups: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Mean, M2 and rstd of every group of every sample; None if torch's lose digits."""
    if not dense(x):
        return None
    dtype, wide, (samples, channels) = compute_dtype(x), statistics_dtype(x), x.shape[:2]
    one, count = torch.ones(channels, dtype=dtype), x.numel() // (samples * channels)
    _, mean, rstd = torch.native_group_norm(x, one, one, samples, channels, count, groups, eps)
    if not near(mean, rstd):
        return None
    mean, rstd = mean.to(wide), rstd.to(wide)
    var = rstd.pow(-2) - eps
    if not bool(var.min() > _OF_EPS * eps):
        return None
    return mean, var * (count * channels // groups), rstd


def channel_backward(dz: Tensor, kept: KeptByChannelNorm) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of batch and group norm, for ordinary statistics that are not far from 0."""
    x, weight, groups = kept.x, kept.weight, kept.norm.groups
    dtype = compute_dtype(x)
    mean, rstd = kept.mean.to(dtype), kept.rstd.to(dtype)
    gamma = torch.ones(x.shape[1], dtype=dtype) if weight is None else weight.to(dtype)
    wanted = [True, True, True]
    if not groups:
        given_by_batch = None, None, mean, rstd, True, 0.0
        made = _ATEN.native_batch_norm_backward(dz, x, gamma, *given_by_batch, wanted)
    else:
        layout, (samples, channels) = memory_format(x), x.shape[:2]
        few = layout != torch.contiguous_format and channels < _FEW * groups
        dz, x = (dz.contiguous(), x.contiguous()) if few else (dz, x)
        size = samples, channels, x.numel() // (samples * channels), groups
        made = _ATEN.native_group_norm_backward(dz, x, mean, rstd, gamma, *size, wanted)
        made = (made[0].contiguous(memory_format=layout), *made[1:])
    dx, dweight, dbias = made
    wide = gradient_dtype(x, weight)
    return dx, dweight.to(wide), dbias.to(wide)
