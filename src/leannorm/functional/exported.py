"""leannorm's functions as operators, so that an exported graph holds one node for each.

A decomposition into torch's operators would lose the choice of the kernel at run time, the function's own
backward pass with what it saves, and the name of the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from leannorm.autograd.sync import Sharing
from leannorm.distributed.membership import group_in_words, group_of_words
from leannorm.functional.batch import batch_norm, batch_norm_act, tracked_batch_norm
from leannorm.functional.conv import _convolution, conv_batch_norm
from leannorm.functional.declare import AffineNames, declare
from leannorm.functional.group import (
    group_norm,
    instance_norm,
    layer_instance_norm,
    moves_its_statistics,
)
from leannorm.functional.layer import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from leannorm.functional.operator import batch_norm_op, checked_batch_norm_op
from leannorm.functional.overridden import OPERATORS
from leannorm.functional.running import refuse_to_leave
from leannorm.functional.sync import sync_batch_norm

_STATE = "Tensor(a!)? running_mean, Tensor(b!)? running_var"
_TRACKED = f"{_STATE}, Tensor(c!)? num_batches_tracked"
_AFFINE = "Tensor? weight, Tensor? bias"
_IN_TRAINING = itemgetter("training")

ops = torch.ops.leannorm


def _like(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _like_twice(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


declare(
    f"tracked_batch_norm(Tensor x, {_TRACKED}, {_AFFINE}, bool training, float? momentum, float eps,"
    " int[] ranks, str act, Tensor? residual) -> Tensor",
    tracked_batch_norm,
    _like,
    _IN_TRAINING,
    AffineNames(),
)


def _torchs_cumulative(x: Tensor, mean: Any, var: Any, tracked: Tensor, *affine_and_eps: Any) -> Tensor:
    """A training step of torch's own layer with momentum=None, which reads its counter on the host."""
    weight, bias, eps = affine_and_eps
    tracked.add_(1)
    return torch.nn.functional.batch_norm(x, mean, var, weight, bias, True, 1.0 / float(tracked), eps)


declare(
    f"cumulative_batch_norm(Tensor x, {_STATE}, Tensor(c!) num_batches_tracked, {_AFFINE}, float eps)"
    " -> Tensor",
    _torchs_cumulative,
    _like,
    lambda given: True,
)


def _sync(*given: Any) -> Tensor:
    *of_norm, group, layer, timeout, debug = given
    sharing = Sharing("", layer, timeout, debug, asked=group_of_words(group))
    return tracked_batch_norm(*(*of_norm, sharing))


def _call_tracked(*given: Any, pool: Any = None, group_size: int | None = None) -> Any:
    refuse_to_leave(pool, group_size)
    *of_norm, sharing = given
    if sharing is None:
        return ops.tracked_batch_norm(*of_norm)
    group = group_in_words(sharing.asked)
    return ops.sync_batch_norm(*of_norm, group, sharing.layer, sharing.timeout, sharing.debug)


declare(
    f"sync_batch_norm(Tensor x, {_TRACKED}, {_AFFINE}, bool training, float? momentum, float eps,"
    " int[] ranks, str act, Tensor? residual, str group, str layer, float timeout, bool debug) -> Tensor",
    _sync,
    _like,
    _IN_TRAINING,
)


def _act(*given: Any) -> Tensor:
    *of_norm, act, residual = given
    return batch_norm_act(*of_norm, act=act, residual=residual)


def _call_act(*given: Any, act: str = "identity", residual: Tensor | None = None) -> Any:
    return ops.batch_norm_act(*given, act, residual)


declare(
    f"batch_norm_act(Tensor x, {_STATE}, {_AFFINE}, bool training, float momentum, float eps, str act,"
    " Tensor? residual) -> Tensor",
    _act,
    _like,
    _IN_TRAINING,
    AffineNames(),
)


def _call_sync(*given: Any, process_group: Any, timeout: Any, **more: Any) -> Any:
    x, mean, var, weight, bias, training, momentum, eps = given
    act, residual = more["act"], more["residual"]
    if not training:
        return _call_act(*given, act=act, residual=residual)
    sharing = Sharing("", more["name"], timeout or 0.0, more["debug_consistency"], asked=process_group)
    of_norm = x, mean, var, None, weight, bias, training, momentum, eps
    return _call_tracked(*of_norm, (2, 3, 4, 5), act, residual, sharing)


_GEOMETRY = "stride padding padding_name dilation groups padding_mode"
_OPTIONS = f"{_GEOMETRY} training momentum eps eps_mode".split()


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, mean: Any, var: Any, *rest: Any) -> Tensor:
    tracked, bn_weight, bn_bias, *values = rest
    options = dict(zip(_OPTIONS, values, strict=True))
    options["padding"] = options.pop("padding_name") or options["padding"]
    affine = bn_weight, bn_bias
    return conv_batch_norm(x, weight, bias, mean, var, *affine, num_batches_tracked=tracked, **options)


def _like_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    stride, padding, name, dilation, groups, mode = rest[5:11]
    return _convolution(x, weight, stride, name or padding, dilation, groups, mode).apply(x, weight, bias)


def _each(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _call_conv(*given: Any, num_batches_tracked: Any, pool: Any = None, **options: Any) -> Any:
    refuse_to_leave(pool)
    *operands_and_state, weight, bias = given
    for name in ("stride", "dilation"):
        options[name] = _each(options[name])
    padding = options.pop("padding")
    options |= {"padding": [], "padding_name": padding}
    if not isinstance(padding, str):
        options |= {"padding": _each(padding), "padding_name": ""}
    return ops.conv_batch_norm(*operands_and_state, num_batches_tracked, weight, bias, **options)


declare(
    f"conv_batch_norm(Tensor x, Tensor conv_weight, Tensor? conv_bias, {_TRACKED}, {_AFFINE}, int[] stride,"
    " int[] padding, str padding_name, int[] dilation, int groups, str padding_mode, bool training,"
    " float? momentum, float eps, str eps_mode) -> Tensor",
    _conv,
    _like_convolution,
    _IN_TRAINING,
    "it is one operator with its convolution; take to_pair() of the layer",
)
declare(f"group_norm(Tensor x, int num_groups, {_AFFINE}, float eps) -> Tensor", group_norm, _like)
declare(
    f"layer_instance_norm(Tensor x, {_STATE}, {_AFFINE}, bool use_input_stats, float? momentum, float eps,"
    " int rank, int num_features) -> Tensor",
    layer_instance_norm,
    _like,
    moves_its_statistics,
)


def _call_instance(x: Tensor, *given: Any) -> Any:
    return ops.layer_instance_norm(x, *given, x.dim(), x.shape[1])


OPERATORS.update(
    {
        tracked_batch_norm: _call_tracked,
        batch_norm: _call_act,
        batch_norm_act: _call_act,
        sync_batch_norm: _call_sync,
        conv_batch_norm: _call_conv,
        group_norm: ops.group_norm,
        layer_instance_norm: ops.layer_instance_norm,
        instance_norm: _call_instance,
        batch_norm_op: partial(checked_batch_norm_op, ops.batch_norm_op.default),
    }
)


def _declare_row_norm(function: Callable[..., Any], tensors: str, rest: str) -> None:
    """Declare a function whose last argument `dim` is keyword-only; two results with a residual, else one."""
    name, one = function.__name__, "residual" not in tensors
    arguments = f"{tensors}, int[] normalized_shape, Tensor? weight, {rest}, int? dim"

    def run(*given: Any) -> Any:
        return function(*given[:-1], dim=given[-1])

    declare(
        f"{name}({arguments}) -> {'Tensor' if one else '(Tensor, Tensor)'}",
        run,
        _like if one else _like_twice,
    )
    operator = getattr(ops, name)
    OPERATORS[function] = lambda *given, dim: operator(*given, dim)


_declare_row_norm(layer_norm, "Tensor x", "Tensor? bias, float eps")
_declare_row_norm(rms_norm, "Tensor x", "float? eps")
_declare_row_norm(add_layer_norm, "Tensor x, Tensor residual", "Tensor? bias, float eps")
_declare_row_norm(add_rms_norm, "Tensor x, Tensor residual", "float? eps")


class AsOperators(TorchFunctionMode):
    """Within this mode every call of a leannorm function becomes a call of its operator."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return OPERATORS.get(func, func)(*args, **(kwargs or {}))
