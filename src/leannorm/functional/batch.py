"""Batch norm as functions: checks, then one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function_variadic

from leannorm import _checks
from leannorm._errors import InputError
from leannorm._types import Epilogue, Maybe, Moments, Pool, Running, Valid
from leannorm.autograd import fast
from leannorm.autograd.channel import channel_affine, channel_evaluated, channel_norm
from leannorm.autograd.sync import Sharing
from leannorm.distributed.membership import group_in_words, sharing_group
from leannorm.functional import stock
from leannorm.functional.declare import AffineNames, Arguments, in_training
from leannorm.functional.door import call_operator, declares, hand_over, public, run
from leannorm.functional.ghost import ghost_norm, of_all_ranks
from leannorm.functional.jagged import channels
from leannorm.functional.running import (
    fused_update,
    of_channels,
    running_mean_and_rstd,
    update_running_statistics,
)
from leannorm.functional.shards import Cut, by_channel
from leannorm.functional.valid import (
    Lengths,
    Masking,
    exported_at_data,
    refuse_to_export,
    unmasked,
    valid_positions,
)
from leannorm.ops.activation import lists_activations
from leannorm.ops.modes import exporting, recorded, sharded
from leannorm.ops.plan import values_per_channel
from leannorm.ops.select import pick


def _as_batch_norm_act(arguments: Arguments) -> Any:
    return call_operator("batch_norm_act", arguments, act="identity", residual=None)


def _by_number(call: Arguments) -> Tensor:
    """For functions that do not count batches, so that `momentum` must be a number."""
    input, training, eps = call["input"], call["training"], call["eps"]
    running, epilogue, masking = of_channels(call)
    _checks.momentum_is_a_number(running.momentum)
    if exporting():
        _checks.running_statistics(*running[:2], training)
        _checks.activation(epilogue.act)
        return exported_at_data(stock.batch_norm(input, running, epilogue, eps), *masking)
    return _checked(input, running, epilogue, _Call(training, eps, masking))


@public(_by_number, F.batch_norm, channels, in_training, _as_batch_norm_act)
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
    tensors = (input, running_mean, running_var, weight, bias)
    if unmasked(mask, lengths, fill) and not has_torch_function_variadic(*tensors):
        y = _fast(input, (running_mean, running_var, None, momentum), weight, bias, eps, "identity", training)
        if y is not None:
            return y
    return run(batch_norm, (*tensors, training, momentum, eps, mask, lengths, fill))


@public(_by_number, packed=channels, by_batch=in_training, folds=AffineNames())
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
    tensors = (input, running_mean, running_var, weight, bias)
    plain = residual is None and unmasked(mask, lengths, fill)
    if plain and not has_torch_function_variadic(*tensors):
        y = _fast(input, (running_mean, running_var, None, momentum), weight, bias, eps, act, training)
        if y is not None:
            return y
    return run(batch_norm_act, (*tensors, training, momentum, eps, act, residual, mask, lengths, fill))


def _fast(
    input: Tensor, running: Any, weight: Maybe, bias: Maybe, eps: float, act: str, training: bool
) -> Maybe:
    _checks.momentum_is_a_number(running[3])
    return fast.batch_norm(input, weight, bias, eps, act, running, training) if input.dim() > 1 else None


class _Call(NamedTuple):
    """The arguments of batch norm that are not tensors; `by_batch`: whether it uses the batch's
    statistics."""

    by_batch: bool
    eps: float
    masking: Masking
    sharing: Sharing | None = None
    pool: Pool | None = None
    group_size: int | None = None


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
@public(None, None, channels, in_training, _as_tracked_or_synchronized)
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
    if (y := hand_over(tracked_batch_norm, values)) is not None:
        return y
    running = Running(running_mean, running_var, num_batches_tracked, momentum)
    epilogue, masking = Epilogue(weight, bias, residual, act), (mask, lengths, fill)
    if exporting():
        _checks.dim(input, dims)
        if running_mean is None:
            refuse_to_export({"mask": mask, "lengths": lengths})
        if sharing is not None and sharing_group(sharing.asked) is not None:
            raise InputError(
                "statistics of several ranks cannot be exported to ONNX, got a synchronized batch norm in "
                "training mode; call model.eval() first"
            )
        return exported_at_data(stock.batch_norm(input, running, epilogue, eps), *masking)
    if sharing is not None:
        group = sharing_group(sharing.asked)
        if group is None:
            sharing = None
        else:
            tracks = running_mean is not None
            sharing = sharing._replace(group=group, eps=eps, momentum=momentum, tracks=tracks)
    _checks.dim(input, dims)
    call = _Call(training or running_mean is None, eps, masking, sharing, pool, group_size)
    return _checked(input, running, epilogue, call)


def _checked(input: Tensor, running: Running, epilogue: Epilogue, call: _Call) -> Tensor:
    _check(input, running, epilogue, call)
    if sharded(input, *running[:3], *epilogue[:3]):
        return _of_shards(input, running, epilogue, call)
    return _local(input, running, epilogue, call)


def _of_shards(input: Tensor, running: Running, epilogue: Epilogue, call: _Call) -> Tensor:
    """Normalize by the statistics of the whole batch, of which each rank has a part."""
    by_batch, eps, masking, sharing, pool, size = call
    if by_batch and size is None:
        _checks.more_than_one_value(input, values_per_channel(input.shape))

    def run(cut: Cut, x: Tensor, running: Running, epilogue: Epilogue, masking: Masking) -> Tensor:
        of_rank = call._replace(masking=masking)
        if not by_batch:
            return _local(x, running, epilogue, of_rank)
        reduced = (0, *range(2, x.dim()))
        merged = cut.merged(reduced, "batch_norm", eps)
        if sharing is not None and (merged is not None or cut.holds_rank_of(sharing.group)):
            raise InputError(
                "the ranks of process_group may hold no parts of the same DTensor, whose statistics are "
                f"merged already, got placements {cut.placements}; take a BatchNorm, or the group of another "
                "dimension of the mesh than the input's"
            )
        if size is not None and not (cut.cuts_between(0, size) and cut.is_whole(reduced[1:])):
            raise cut.refuse(
                f"batch norm with group_size={size} needs whole groups of samples on each rank", reduced
            )
        if pool is not None and not cut.is_whole((1,)):
            raise cut.refuse("accumulate_stats() needs all channels on each rank", (1,))
        if merged is not None:
            merged = merged._replace(momentum=running.momentum, tracks=running.mean is not None)
        return _local(x, running, epilogue, of_rank._replace(sharing=merged or sharing))

    return by_channel(run, input, running, epilogue, masking, by_batch)


def _local(input: Tensor, running: Running, epilogue: Epilogue, call: _Call) -> Tensor:
    """The call on one rank's tensors."""
    valid = valid_positions(input, *call.masking)
    if call.by_batch:
        return _by_batch(input, running, epilogue, call, valid)
    if valid is None or not valid.zero:
        y = channel_evaluated(input, running, call.eps, epilogue)
        if y is not None:
            return y
    mask = valid.mask if valid is not None and valid.zero else None
    return channel_affine(input, *running_mean_and_rstd(running, call.eps), epilogue, mask)


def _check(input: Tensor, running: Running, epilogue: Epilogue, call: _Call) -> None:
    running_mean, running_var, num_batches, momentum = running
    weight, bias, residual, act = epilogue
    _checks.floating("input", input)
    _checks.at_least_2d(input)
    _checks.parameters(input, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    _checks.running_statistics(running_mean, running_var, call.by_batch)
    _checks.same_device("num_batches_tracked", num_batches, input)
    _checks.positive_eps(call.eps)
    _checks.momentum(momentum)
    _checks.activation(act)
    _checks.like_input("residual", residual, input)
    if call.by_batch and recorded(input, weight, bias, residual):
        of_act = {} if act == "identity" else {"bias": bias, "residual": residual}
        _checks.may_be_kept(input=input, weight=weight, **of_act)


def _by_batch(
    input: Tensor, running: Running, epilogue: Epilogue, call: _Call, valid: Valid | None
) -> Tensor:
    _, eps, _, sharing, pool, group_size = call
    count = None if valid is None else valid.total
    if group_size is not None:
        if valid is not None:
            _checks.no_groups_of_samples(group_size)
        y, moments = ghost_norm(input, epilogue, eps, group_size)
        merged = of_all_ranks(moments, None if pool is not None and pool.of_rank else sharing, input)
        update_running_statistics(running, merged, pool)
        return y
    if valid is None and sharing is None:
        _checks.more_than_one_value(input, values_per_channel(input.shape))
    elif sharing is None:
        _checks.more_than_one_valid(input, count)
    fused = fused_update(running) if pool is None and valid is None else None
    y, statistics = channel_norm(input, epilogue, eps, 0, fused, valid, sharing)
    if statistics is not None:
        if sharing is not None and pool is not None and pool.of_rank:
            statistics = pick(input).channel_moments(input, mask=None if valid is None else valid.mask)
        if valid is not None and sharing is None and count is not None:
            statistics = Moments(statistics.mean, statistics.m2, count)
        elif valid is not None and pool is None:  # with fewer than two values the running statistics stay
            statistics = Moments(statistics.mean, statistics.m2, statistics.count * (statistics.count > 1))
        update_running_statistics(running, statistics, pool)
    return y
