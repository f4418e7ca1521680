"""The outputs of norms, from the statistics that they saved: `lean()` rebuilds them with these.

torch's kernels compute fma(weight * (x - mean), rstd, bias) for each channel and fma(rstd * (x - mean),
weight, bias) for each row. Here an addition and an activation, or a cast, that follow are computed in the
same pass, and rounded as separate kernels would. Both move 2 S for an input of S bytes, and S more for an
added tensor.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from leannorm._types import Epilogue, Maybe
from leannorm.ops.backends.triton.as_torch_kernels import channel_as_torch_kernel, row_as_torch_kernel
from leannorm.ops.backends.triton.channel import check, launch_mapping
from leannorm.ops.backends.triton.launch import launch
from leannorm.ops.backends.triton.tape import empty, empty_like, taped
from leannorm.ops.backends.triton.tiling import power_of_two

_TILE = 4096  # values per program


@taped
def channel_as_torch(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Maybe, bias: Maybe, residual: Maybe, act: str, own: bool,
    signed: bool,
) -> Tensor:  # fmt: skip
    """The output of torch's norm, or of leannorm's `own`, whose statistics may be those of groups. `signed`:
    the activation of -0.0 is -0.0."""
    check(x, Epilogue(weight, bias, residual, act))
    y = empty_like(x)
    tensors = x, residual, y, mean, rstd, weight, bias
    launch_mapping(channel_as_torch_kernel, x, mean, act, *tensors, OWN=own, SIGNED=signed)
    return y


@taped
def row_as_torch(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Maybe, bias: Maybe, kept: int, dtype: torch.dtype
) -> Tensor:
    """The output for rows of `kept` contiguous values; x is contiguous, or `[outer, inner, kept]`."""
    y = empty(x.shape, dtype, x.device)
    # the number of rows one step apart, the step between such blocks, and the step within one, in values
    steps = (1, kept, 0) if x.is_contiguous() else (x.shape[1], x.stride(0), x.stride(1))
    block = min(power_of_two(kept), _TILE)
    rows, together = x.numel() // kept, _TILE // block
    launch(
        row_as_torch_kernel,
        -(-rows // together),
        x.device,
        *(x, y, mean, rstd, weight, bias, rows, *steps),
        V=gcd(16, kept, *steps[1:]),
        KEPT=kept,
        ROWS=together,
        BLOCK=block,
        DOUBLE=x.dtype == torch.float64,
        warps=8,
    )
    return y
