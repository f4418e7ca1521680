"""Batch norm as functions: checks, then one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function_variadic

from leannorm import _checks
from leannorm._types import Pool
from leannorm.autograd import fast
from leannorm.autograd.sync import Sharing
from leannorm.distributed.membership import group_in_words
from leannorm.functional.channels import normalized_channels
from leannorm.functional.declare import AffineNames, Arguments, in_training
from leannorm.functional.door import call_operator, declares, public, run
from leannorm.functional.jagged import channels
from leannorm.functional.valid import Lengths
from leannorm.ops.activation import lists_activations


def _as_batch_norm_act(arguments: Arguments) -> Any:
    return call_operator("batch_norm_act", arguments, act="identity", residual=None)


@public(normalized_channels, F.batch_norm, channels, in_training, _as_batch_norm_act)
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
    fill: str = "zero",
) -> Tensor:
    """Normalize each channel over the batch and all positions; as `torch.nn.functional.batch_norm`.

        y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    In training E and the biased Var are the batch's, and update `running_mean` and `running_var` (unbiased)
    by `momentum`; in evaluation they are the running ones.

    `mask` (True: data) or `lengths` (along the last axis) leave out padding: it is never read, E and Var are
    over the other positions, and the output and the input's gradient are 0 at padding. With
    `fill="normalize"` the output at padding is normalized too, by the same statistics.

    Shapes: input (N, C, *); weight, bias and running statistics (C,); mask (N, *) or what broadcasts to it,
    lengths (N,); output as input, in the same memory layout.
    Dtypes: float32, float64, bfloat16 or float16 input, any floating vectors; the output has the input's
    dtype. Elements are computed in float32 (float64 for float64), statistics in float64.
    Kept: the input (4 bytes per element in float32) and 16 bytes per channel; in evaluation the input only
    for the weight's gradient.
    Raises: `DtypeError` for a tensor that is not floating, `InputError` (a ValueError and a RuntimeError) for
    any other argument that breaks a rule, before anything is changed.
    Source: Ioffe and Szegedy, 2015, arXiv:1502.03167.

    >>> import torch
    >>> from leannorm import functional as F
    >>> y = F.batch_norm(torch.randn(8, 3, 4, 4), None, None, training=True)
    >>> y.mean((0, 2, 3)).abs().max().item() < 1e-6
    True
    """
    tensors = input, weight, bias, None, running_mean, running_var, None, None
    plain = mask is None and lengths is None and fill == "zero"
    if plain and not has_torch_function_variadic(*tensors):
        _checks.momentum_is_a_number(momentum)
        norm = 0, eps, "identity", training, momentum, True, False
        if input.dim() > 1 and (y := fast.batch_norm(tensors, norm)) is not None:
            return y
    given = input, running_mean, running_var, weight, bias, training, momentum, eps
    return run(batch_norm, (*given, mask, lengths, fill))


@public(normalized_channels, packed=channels, by_batch=in_training, folds=AffineNames())
@lists_activations
def batch_norm_act(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    act: str = "relu",
    residual: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
    fill: str = "zero",
) -> Tensor:
    """Batch norm, plus a residual, through an activation, as one operation.

        y = act(batch_norm(x) + residual)

    `act` is one of <activations>. Every other argument is as in `batch_norm`.

    The derivative is computed from the output for <from_output>, and not for <from_input>.

    Shapes: as `batch_norm`; residual as input.
    Dtypes: as `batch_norm`; the residual may have another floating dtype.
    Kept: the input (4 bytes per element in float32) and 16 bytes per channel. With a residual and an
    activation also the output, which the next layer keeps too, or, if the derivative is not computed from it,
    the residual.
    Raises, Source: as `batch_norm`.

    >>> import torch
    >>> from leannorm import functional as F
    >>> x, r = torch.randn(8, 3, 4, 4), torch.randn(8, 3, 4, 4)
    >>> y = F.batch_norm_act(x, None, None, training=True, act="relu", residual=r)
    >>> bool((y >= 0).all())
    True
    """
    tensors = input, weight, bias, residual, running_mean, running_var, None, None
    plain = mask is None and lengths is None and fill == "zero"
    if plain and not has_torch_function_variadic(*tensors):
        _checks.momentum_is_a_number(momentum)
        norm = 0, eps, act, training, momentum, True, False
        if input.dim() > 1 and (y := fast.batch_norm(tensors, norm)) is not None:
            return y
    given = input, running_mean, running_var, weight, bias, training, momentum, eps
    return run(batch_norm_act, (*given, act, residual, mask, lengths, fill))


def _as_tracked_or_synchronized(arguments: Arguments) -> Any:
    sharing = arguments.get("sharing")
    if sharing is None:
        return call_operator("tracked_batch_norm", arguments)
    return call_operator(
        "sync_batch_norm",
        arguments,
        group=group_in_words(sharing.asked),
        layer=sharing.layer,
        timeout=sharing.timeout,
        debug=sharing.debug,
    )


@declares(in_training, folds=AffineNames())
@public(normalized_channels, None, channels, in_training, _as_tracked_or_synchronized)
def tracked_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    dims: Sequence[int],
    act: str = "identity",
    residual: Tensor | None = None,
    sharing: Sharing | None = None,
    *,
    pool: Pool | None = None,
    group_size: int | None = None,
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
    fill: str = "zero",
) -> Tensor:
    """What the layers call: `batch_norm_act`, which also counts batches and may share statistics.

    `dims` are the numbers of axes that the layer accepts. `num_batches_tracked` is given only if the running
    statistics are to be updated. It includes this batch; `momentum=None` weights the batch by 1 / that count,
    on the device. Without running statistics the batch's own are used, in evaluation too. A recompute of this
    forward pass by a backward pass (checkpointing) does not update them again. With `sharing` the statistics
    are those of all ranks that share, if there are several. A `pool` collects the batch's statistics instead
    of the running ones. With `group_size` that many samples are normalized together; the running statistics
    are those of all.
    """
    values = (
        *(input, running_mean, running_var, num_batches_tracked, weight, bias, training, momentum),
        *(eps, dims, act, residual, sharing, pool, group_size, mask, lengths, fill),
    )
    return run(tracked_batch_norm, values)
