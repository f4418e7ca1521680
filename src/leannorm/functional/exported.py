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
from leannorm.functional.gated import gated_rms_norm
from leannorm.functional.group import (
    group_norm,
    group_norm_act,
    instance_norm,
    layer_instance_norm,
    moves_its_statistics,
)
from leannorm.functional.layer import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from leannorm.functional.modulated import (
    ada_layer_norm,
    ada_rms_norm,
    add_ada_layer_norm,
    add_ada_rms_norm,
)
from leannorm.functional.operator import batch_norm_op, checked_batch_norm_op
from leannorm.functional.overridden import OPERATORS, parameters_of
from leannorm.functional.running import refuse_to_leave
from leannorm.functional.sync import sync_batch_norm
from leannorm.functional.valid import refuse_to_leave_masked

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


def _unmasked(call: Callable[..., Any]) -> Callable[..., Any]:
    """An operator has no mask: a call with one is refused."""

    def checked(*given: Any, mask: Any = None, lengths: Any = None, fill: str = "zero", **named: Any) -> Any:
        refuse_to_leave_masked(mask, lengths)
        return call(*given, **named)

    return checked


OPERATORS.update(
    {
        tracked_batch_norm: _unmasked(_call_tracked),
        batch_norm: _unmasked(_call_act),
        batch_norm_act: _unmasked(_call_act),
        sync_batch_norm: _unmasked(_call_sync),
        conv_batch_norm: _call_conv,
        group_norm: _unmasked(ops.group_norm),
        layer_instance_norm: _unmasked(ops.layer_instance_norm),
        instance_norm: _unmasked(_call_instance),
        batch_norm_op: partial(checked_batch_norm_op, ops.batch_norm_op.default),
    }
)


def _weighted(x: Tensor, weight: Tensor | None, cast: str) -> Tensor:
    """As x; in a wider weight's dtype where the normalized value is rounded before it meets that."""
    if weight is None or cast != "before":
        return torch.empty_like(x)
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))


def _cast(eps: Any = None, dim: Any = None, weight_offset: Any = 0.0, cast: str = "after", *rest: Any) -> str:
    return cast


def _like_rms(x: Tensor, shape: Any, weight: Tensor | None, *rest: Any) -> Tensor:
    return _weighted(x, weight, _cast(*rest))


def _like_add_rms(x: Tensor, residual: Tensor, shape: Any, weight: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    return _weighted(x, weight, _cast(*rest)), torch.empty_like(x)


_MASKED = "Tensor? mask=None, Tensor? lengths=None"
_OF_RMS = f"float? eps, int? dim, float weight_offset=0.0, str cast='after', {_MASKED}"
_OF_LAYER = f"Tensor? bias, float eps, int? dim, {_MASKED}"


def _declare_row_norm(
    function: Callable[..., Any], tensors: str, rest: str, fake: Callable[..., Any]
) -> None:
    """Declare a function whose arguments from `dim` on are keyword-only; two results with a residual."""
    name, results = function.__name__, "(Tensor, Tensor)" if "residual" in tensors else "Tensor"
    positional, named = parameters_of(function)

    def run(*given: Any) -> Any:
        by_name = given[len(positional) :]  # without defaults at the end
        return function(*given[: len(positional)], **dict(zip(named, by_name, strict=False)))

    declare(f"{name}({tensors}, int[] normalized_shape, Tensor? weight, {rest}) -> {results}", run, fake)
    operator = getattr(ops, name)
    OPERATORS[function] = lambda *given, **by_name: operator(*given, *by_name.values())


_declare_row_norm(layer_norm, "Tensor x", _OF_LAYER, _like)
_declare_row_norm(rms_norm, "Tensor x", _OF_RMS, _like_rms)
_declare_row_norm(add_layer_norm, "Tensor x, Tensor residual", _OF_LAYER, _like_twice)
_declare_row_norm(add_rms_norm, "Tensor x, Tensor residual", _OF_RMS, _like_add_rms)


_SUM = "Tensor x, Tensor branch, Tensor? gate"
_RMS_TAIL = "Tensor scale, float? eps, Tensor? weight, Tensor? shift"
_LAYER_TAIL = "Tensor scale, Tensor? shift, float eps, Tensor? weight, Tensor? bias"
for _function, _first, _tail in (
    (ada_layer_norm, "Tensor x", _LAYER_TAIL),
    (ada_rms_norm, "Tensor x", _RMS_TAIL),
    (add_ada_layer_norm, _SUM, _LAYER_TAIL),
    (add_ada_rms_norm, _SUM, _RMS_TAIL),
):
    _results, _fake = ("Tensor", _like) if _first == "Tensor x" else ("(Tensor, Tensor)", _like_twice)
    _name = _function.__name__
    declare(f"{_name}({_first}, int[] normalized_shape, {_tail}) -> {_results}", _function, _fake)
    OPERATORS[_function] = getattr(ops, _name)


def _gated(*given: Any) -> Tensor:
    return gated_rms_norm(*given[:7], cast=given[7])


def _call_gated(*given: Any, cast: str) -> Any:
    return ops.gated_rms_norm(*given, cast)


def _like_gated(x: Tensor, gate: Tensor, shape: Any, weight: Tensor | None, *rest: Any) -> Tensor:
    norm_before_gate, cast = rest[-2:]
    return _weighted(x, weight, "after" if norm_before_gate else cast)


declare(
    "gated_rms_norm(Tensor x, Tensor gate, int[] normalized_shape, Tensor? weight, float? eps, str act,"
    " bool norm_before_gate, str cast) -> Tensor",
    _gated,
    _like_gated,
)
OPERATORS[gated_rms_norm] = _call_gated


def _group_act(*given: Any) -> Tensor:
    return group_norm_act(*given[:-1], act=given[-1])


def _call_group_act(*given: Any, act: str) -> Any:
    return ops.group_norm_act(*given, act)


declare(
    f"group_norm_act(Tensor x, int num_groups, {_AFFINE}, float eps, str act) -> Tensor", _group_act, _like
)
OPERATORS[group_norm_act] = _unmasked(_call_group_act)


class AsOperators(TorchFunctionMode):
    """Within this mode every call of a leannorm function becomes a call of its operator."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return OPERATORS.get(func, func)(*args, **(kwargs or {}))
