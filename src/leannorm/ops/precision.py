"""The dtypes of arithmetic and of statistics, sums of squares that do not overflow, and roots."""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm.ops.modes import recording

_POWERS = {-0.5: torch.rsqrt, 0.5: torch.sqrt, -1.0: torch.reciprocal}


def compute_dtype(x: Tensor) -> torch.dtype:
    """Element arithmetic: float64 for float64 input, float32 for everything else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype) for what an autograd function returns: no call if there is nothing to cast.

    torch 2.11 compiles such a function to one that also returns all intermediate tensors. A tensor that
    occurs twice, before and after a cast that does nothing, gets the gradient of the second occurrence: zero.
    """
    return x if x.dtype == dtype else x.to(dtype)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Per-channel statistics: float64 (they are few), float32 on devices that have no float64."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def gradient_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """Gradients of per-channel parameters: the weight's dtype, but on the CPU not less than float32.

    On a device a cast is one more launch, so the kernels there store the dtype that autograd takes.
    """
    if weight is None or weight.dtype == torch.float64:
        return statistics_dtype(x)
    return torch.float32 if x.device.type == "cpu" else weight.dtype


def row_gradient_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """Gradients of per-row parameters: the weight's dtype, but on the CPU the arithmetic's."""
    return compute_dtype(x) if weight is None or x.device.type == "cpu" else weight.dtype


def sum_of_squares(deviation: Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Sum of squares over `dims` (kept as 1), scaled by the largest so that 1e30 does not overflow."""
    if deviation.numel() == 0:
        return deviation.sum(dims, keepdim=True).to(dtype)
    scale = deviation.detach().abs().amax(dims, keepdim=True)
    scale = torch.where((scale > 0) & scale.isfinite(), scale, torch.ones_like(scale))
    # not a norm, which has no second derivative at 0, the value of constant input
    squares: Tensor = (deviation / scale).square().sum(dims, keepdim=True)
    return squares.to(dtype) * scale.to(dtype).square()


def power(v: Tensor, exponent: float) -> Tensor:
    """v ** exponent, for -0.5, 0.5 or -1.

    torch's functions for these save their result, which a tracer below autograd records detached: a graph
    with a backward pass in it would lack terms of the second derivative. torch.pow, which gives the same
    values, saves its input.
    """
    return v.pow(exponent) if recording() else _POWERS[exponent](v)
