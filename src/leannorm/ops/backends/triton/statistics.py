"""The steps on per-channel statistics between two kernels, on a GPU: one launch each.

Plain torch (`ops/running.py`, `ops/sums.py`) takes six launches to update running statistics (thirteen if
ranks share them), four for evaluation's constants, ten for the sums that ranks add up, nine for the message
that carries them, twenty for the moments from those sums and four for the means of the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor

from leannorm.ops.backends.triton import statistics_kernels as kernels
from leannorm.ops.backends.triton.launch import launch
from leannorm.ops.backends.triton.tape import empty, taped
from leannorm.ops.sums import HEADER

_BLOCK = 256


def _check(*statistics: Tensor) -> None:
    for v in statistics:
        if v.dtype != torch.float64 or not v.is_contiguous():
            raise RuntimeError("statistics must be float64 and contiguous")


def _new(like: Tensor, *sizes: int) -> list[Tensor]:
    return [empty((n,), torch.float64, like.device) for n in sizes]


def _launch(
    kernel: object, channels: int, *arguments: object, device: torch.device, **constants: Any
) -> None:
    if channels:
        launch(kernel, -(-channels // _BLOCK), device, *arguments, channels, **constants, BLOCK=_BLOCK)


@taped
def move_running_(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches: Tensor | None,
    momentum: float | None,
    mean: Tensor,
    m2: Tensor,
    count: int,
    total_count: Tensor | None,
) -> None:
    _check(mean, m2, *(() if total_count is None else (total_count,)))
    if not running_mean.numel() == running_var.numel() == mean.numel() == m2.numel():
        raise RuntimeError("statistics must have one value a channel")
    high = low = None
    if momentum is not None:  # a kernel takes a plain number as float32, so it is passed as the sum of two
        high = c_float(momentum).value
        low = momentum - high
    buffers = (running_mean, running_var, num_batches, high, low, mean, m2, count, total_count)
    strides = running_mean.stride(0), running_var.stride(0)
    launch(
        kernels.move_running_kernel,
        1,
        mean.device,
        *buffers,
        *strides,
        mean.numel(),
        BLOCK=4 * _BLOCK,
        registers=128,  # without a limit the compiler chooses 96 for 8.6, and spills
    )


@taped
def constants_of(running_mean: Tensor, running_var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if running_mean.numel() != running_var.numel():
        raise RuntimeError("statistics must have one value a channel")
    channels = running_mean.numel()
    mean, rstd = _new(running_mean, channels, channels)
    strides = running_mean.stride(0), running_var.stride(0)
    arguments = (running_mean, running_var, mean, rstd, *strides)
    _launch(kernels.constants_kernel, channels, *arguments, device=mean.device, EPS=eps)
    return mean, rstd


@taped
def sums_of(mean: Tensor, m2: Tensor, count: int) -> Tensor:
    _check(mean, m2)
    channels = mean.numel()
    (sums,) = _new(mean, 4 * channels)
    _launch(kernels.sums_kernel, channels, mean, m2, sums, count, device=mean.device)
    return sums


def message_of(sums: Sequence[Tensor], token: tuple[int, int], asked: int, count: int, size: int) -> Tensor:
    _check(*sums)
    first, second = (*sums, None)[:2]
    lengths = sums[0].numel(), sum(s.numel() for s in sums)
    if HEADER + lengths[1] > size:
        raise RuntimeError("a message must be large enough for its header and its sums")
    (message,) = _new(sums[0], size)
    numbers = (*token, asked, count, *lengths)
    arguments = (message, first, second, *numbers)
    _launch(kernels.message_kernel, size, *arguments, device=message.device, HEADER=HEADER)
    return message


@taped
def moments_of(total: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(total)
    channels = total.numel() // 4
    mean, m2, rstd = _new(total, channels, channels, channels)
    count = empty((), torch.float64, total.device)
    if channels == 0:
        count.copy_(total[0])
    arguments = (total, mean, m2, rstd, count)
    _launch(kernels.moments_kernel, channels, *arguments, device=total.device, EPS=eps)
    return mean, m2, rstd, count


@taped
def means_of(total: Tensor, weight: Tensor | None, count: Tensor) -> tuple[Tensor, Tensor]:
    _check(total, count)
    channels = total.numel() // 2
    if weight is not None and weight.numel() != channels:
        raise RuntimeError("weight must have one value a channel")
    p, q = _new(total, channels, channels)
    arguments = (total, None if weight is None else weight.contiguous(), count, p, q)
    _launch(kernels.means_kernel, channels, *arguments, device=total.device)
    return p, q
