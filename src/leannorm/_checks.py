"""One function per rule on the inputs; called by `functional/` only, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leannorm._errors import DtypeError, InputError

_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_floating(name: str, tensor: Tensor | None) -> None:
    """The tensor has one of the four floating dtypes that norms are defined for."""
    if tensor is not None and tensor.dtype not in _FLOATING:
        raise DtypeError(
            f"{name} must be float32, float64, bfloat16 or float16, got {tensor.dtype}; "
            f"convert it first, for example with {name}.float()"
        )


def check_row_eps(eps: float) -> None:
    """Layer and RMS norm take any eps that is not negative."""
    if not eps >= 0:
        raise InputError(f"eps must not be negative, got {eps}; the usual value is 1e-5")


def check_single_axis(normalized_shape: Sequence[int], dim: int | None) -> None:
    """`dim` names one axis, so `normalized_shape` is one size."""
    if dim is not None and len(normalized_shape) != 1:
        raise InputError(
            f"dim normalizes a single axis, got normalized_shape={tuple(normalized_shape)}; "
            f"leave dim out for several"
        )


def normalized_axes(input: Tensor, normalized_shape: Sequence[int], dim: int | None) -> tuple[int, int]:
    """First and one past the last normalized axis; raises where `normalized_shape` does not fit there."""
    wanted, rank = tuple(normalized_shape), input.dim()
    if not wanted:
        raise InputError("normalized_shape must name at least one axis, got (); pass the size of the last")
    if dim is None:
        start, place = rank - len(wanted), f"the last {len(wanted)} sizes"
    else:
        check_single_axis(wanted, dim)
        start, place = dim + rank if dim < 0 else dim, f"the size of axis {dim}"
    stop = start + len(wanted)
    if start < 0 or stop > rank or tuple(input.shape[start:stop]) != wanted:
        raise InputError(
            f"normalized_shape {wanted} must equal {place} of the input, got an input of shape "
            f"{tuple(input.shape)}; change normalized_shape or move the axes of the input"
        )
    return start, stop


def check_normalized_parameter(name: str, parameter: Tensor | None, normalized_shape: Sequence[int]) -> None:
    """weight and bias of a row norm have the normalized shape."""
    if parameter is not None and tuple(parameter.shape) != tuple(normalized_shape):
        raise InputError(
            f"{name} must have the shape normalized_shape = {tuple(normalized_shape)}, "
            f"got {tuple(parameter.shape)}; reshape it or leave it out"
        )


def check_row_residual(input: Tensor, residual: Tensor) -> None:
    """What is added to the input has its shape: the sum is kept, so nothing is broadcast."""
    if residual.shape != input.shape:
        raise InputError(
            f"residual must have the input's shape {tuple(input.shape)}, got {tuple(residual.shape)}; "
            f"expand it first"
        )
