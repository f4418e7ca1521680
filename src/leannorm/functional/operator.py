"""Batch norm as one operator with explicit state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm import _checks
from leannorm._errors import InputError
from leannorm._types import Channels, ChannelTensors, Moments
from leannorm.autograd.channel import channel_affine, channel_norm
from leannorm.autograd.sync import Sharing
from leannorm.functional import stock
from leannorm.functional.declare import AffineNames, Arguments, declare
from leannorm.functional.door import public, run
from leannorm.functional.ghost import of_all_ranks
from leannorm.functional.running import running_mean_and_rstd
from leannorm.functional.shards import VECTOR, Cut, of_one_mesh
from leannorm.ops.backends import REFERENCE
from leannorm.ops.backends.reference import at_least_one
from leannorm.ops.modes import exporting, rebuilding, recorded, sharded, transformed
from leannorm.ops.plan import values_per_channel
from leannorm.ops.running import frozen

DATA_LAYOUTS = ("NCHW", "NHWC")
_TENSORS = "x", "estimated_mean", "estimated_var", "scale", "bias"
_NAMES = *_TENSORS, "is_infer", "use_global_est", "epsilon", "momentum", "batch_id", "data_layout"


class BatchNormOutput(NamedTuple):
    """What `batch_norm_op` returns; `saved_mean` and `saved_var` are the estimates themselves."""

    y: Tensor
    batch_mean: Tensor
    batch_var: Tensor
    saved_mean: Tensor
    saved_var: Tensor


def _operator(call: Arguments) -> BatchNormOutput:
    return _checked(torch.ops.leannorm.batch_norm_op.default, call)


def _computed(call: Arguments) -> BatchNormOutput:
    if transformed(call["x"], call["scale"], call["bias"]) or (call["is_infer"] and exporting()):
        return _checked(_batch_norm_op, call)
    return _operator(call)


@public(_computed, operator=_operator)
def batch_norm_op(
    x: Tensor,
    estimated_mean: Tensor,
    estimated_var: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    *,
    is_infer: bool = False,
    use_global_est: bool = False,
    epsilon: float = 1e-6,
    momentum: float = 0.99,
    batch_id: int | Tensor | None = None,
    data_layout: str = "NCHW",
) -> BatchNormOutput:
    """Batch norm as one operator: the estimates are inputs, and outputs in the same memory.

        y = (x - E[x]) / sqrt(Var[x] + epsilon) * scale + bias
        estimate = estimate * momentum + (1 - momentum) * statistic    in training

    For the first batch, whose `batch_id` is 0, each estimate becomes the batch's statistic. Without a
    `batch_id` every batch is a later one; a tensor is read on its device. With `is_infer` the estimates
    replace the batch's statistics and do not change. With `use_global_est` training updates the estimates
    first and then normalizes by them, as constants for the gradients. Every variance here is biased,
    including the estimate.

    Returns `(y, batch_mean, batch_var, saved_mean, saved_var)`; the `saved_` ones are the estimates
    themselves. `batch_mean` and `batch_var` have no gradient; in inference they are copies of the estimates.

    Shapes: x (N, C, *) for `data_layout="NCHW"`, (N, *, C) for `"NHWC"`, vectors (C,); y as x.
    Dtypes: as `batch_norm`; `batch_mean` and `batch_var` have the estimates' dtype.
    Kept: x (4 bytes per element in float32) and 16 bytes per channel.
    Raises: as `batch_norm`.
    Source: PaddlePaddle's design document "Batch Normalization" (batch_norm_op.md), 2017.

    >>> import torch
    >>> from leannorm import functional as F
    >>> mean, var = torch.zeros(3), torch.ones(3)
    >>> out = F.batch_norm_op(torch.randn(8, 3, 4, 4), mean, var, None, None, batch_id=0)
    >>> torch.equal(mean, out.batch_mean), out.saved_mean.data_ptr() == mean.data_ptr()
    (True, True)
    """
    tensors = x, estimated_mean, estimated_var, scale, bias
    settings = is_infer, use_global_est, epsilon, momentum, batch_id, data_layout
    return run(batch_norm_op, (*tensors, *settings))


def _checked(compute: Callable[..., tuple[Tensor, Tensor, Tensor]], call: Arguments) -> BatchNormOutput:
    """`batch_norm_op` by the operator, or by the function that it runs."""
    x, estimated_mean, estimated_var, scale, bias, *settings = [call[name] for name in _NAMES]
    is_infer, use_global_est, epsilon, momentum, batch_id, data_layout = settings
    _checks.floating("x", x)
    _checks.at_least_2d(x)
    _checks.one_of("data_layout", data_layout, DATA_LAYOUTS)
    _checks.positive_eps(epsilon)
    last = x.dim() - 1 if data_layout == "NHWC" else 1  # not -1, which TorchScript's ONNX exporter would keep
    moved = x.movedim(last, 1) if last > 1 else x
    _checks.parameters(
        moved, estimated_mean=estimated_mean, estimated_var=estimated_var, scale=scale, bias=bias
    )
    if not 0 <= momentum <= 1:
        raise InputError(
            f"momentum must be in [0, 1], got {momentum}; here it weighs the old estimate: "
            "write 1 - momentum for torch's"
        )
    if not is_infer:
        _checks.writable(estimated_mean=estimated_mean, estimated_var=estimated_var)
        if recorded(x, scale, bias):
            _checks.may_be_kept(x=x, scale=scale, bias=bias)
    if isinstance(batch_id, int) and batch_id < 0:
        raise InputError(f"batch_id counts batches from 0, got {batch_id}; pass None to always use momentum")
    if not is_infer and not use_global_est:
        _checks.more_than_one_value(moved, values_per_channel(moved.shape))
    if isinstance(batch_id, int):
        momentum, batch_id = momentum if batch_id else 0.0, None
    estimates = estimated_mean, estimated_var
    if frozen() and not is_infer:
        estimates = estimated_mean.clone(), estimated_var.clone()
    tensors, options = (moved, *estimates, scale, bias), (is_infer, use_global_est, epsilon, momentum)
    if sharded(*tensors):
        y, batch_mean, batch_var = _of_shards(tensors, batch_id, options)
    else:
        y, batch_mean, batch_var = compute(*tensors, batch_id, *options)
    return BatchNormOutput(
        y.movedim(1, last) if last > 1 else y, batch_mean, batch_var, estimated_mean, estimated_var
    )


def _of_shards(tensors: tuple[Any, ...], batch_id: Tensor | None, options: tuple[Any, ...]) -> list[Tensor]:
    """The function on this rank's parts, with the statistics of the whole batch."""
    of_one_mesh(*tensors, batch_id)
    x, mean, var, *_ = tensors
    cut, elements = Cut.of(x), range(x.dim())
    norm = Channels(eps=options[2])
    sharing = cut.merged((0, *range(2, x.dim())), "batch_norm_op", norm) if x.numel() else None
    sharing = None if sharing is None else sharing._replace(tracks=True)
    axes = elements, VECTOR, VECTOR, VECTOR, VECTOR
    parts = [cut.local(v, of) for v, of in zip(tensors, axes, strict=True)]
    made = _batch_norm_op(*parts, cut.local(batch_id, ()), *options, sharing=sharing)
    cut.write_back((mean, var), parts[1:3])
    return [cut.whole(v, of) for v, of in zip(made, axes, strict=False)]


def _batch_norm_op(
    x: Tensor, estimated_mean: Tensor, estimated_var: Tensor, *others: Any, sharing: Sharing | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    scale, bias, batch_id, is_infer, use_global_est, epsilon, momentum = others
    tensors, norm = ChannelTensors(x, scale, bias), Channels(0, epsilon, by_batch=False)
    estimates = estimated_mean, estimated_var
    if is_infer:
        if exporting():
            y = stock.batch_norm(ChannelTensors(x, scale, bias, None, *estimates), norm)
        else:
            y = channel_affine(tensors, *running_mean_and_rstd(*estimates, epsilon), norm)
        return y, estimated_mean.detach().clone(), estimated_var.detach().clone()
    if use_global_est:
        moments: Moments | None = of_all_ranks(REFERENCE.channel_moments(x.detach()), sharing, x)
    else:
        y, moments = channel_norm(tensors, Channels(0, epsilon), sharing)
    assert moments is not None
    count = moments.count
    mean, var = moments.mean.detach(), moments.m2.detach() / at_least_one(count)
    if not rebuilding() and not (isinstance(count, int) and count == 0):
        _move(estimated_mean, mean, momentum, batch_id)
        _move(estimated_var, var, momentum, batch_id)
    if use_global_est:
        y = channel_affine(tensors, *running_mean_and_rstd(*estimates, epsilon), norm)
    return y, mean.to(estimated_mean.dtype), var.to(estimated_var.dtype)


@torch.no_grad()
def _move(estimate: Tensor, value: Tensor, momentum: float, batch_id: Tensor | None) -> None:
    """Updates an estimate in place; the first batch replaces it, even if it is not finite."""
    moved = value if momentum == 0 else estimate.to(value.dtype) * momentum + value * (1 - momentum)
    estimate.copy_(moved if batch_id is None else torch.where(batch_id == 0, value, moved))


declare(
    "batch_norm_op(Tensor x, Tensor(a!) estimated_mean, Tensor(b!) estimated_var, Tensor? scale,"
    " Tensor? bias, Tensor? batch_id, bool is_infer, bool use_global_est, float epsilon, float momentum)"
    " -> (Tensor y, Tensor batch_mean, Tensor batch_var)",
    _batch_norm_op,
    lambda *arguments: tuple(map(torch.empty_like, arguments[:3])),
    by_batch=lambda arguments: not arguments["is_infer"],
    folds=AffineNames("x", "estimated_mean", "estimated_var", "scale", "bias", "epsilon"),
)
