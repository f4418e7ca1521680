"""leannorm's functions as operators, so that an exported graph holds one node for each.

A node of its own keeps what a decomposition would lose: the kernel is chosen when the program runs, the
backward pass keeps and computes what the function's own does, and a reader of the graph knows the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from leannorm.autograd.sync import Sharing
from leannorm.distributed.membership import group_in_words, group_of_words
from leannorm.functional.batch import batch_norm, batch_norm_act, tracked_batch_norm
from leannorm.functional.conv import _convolution, conv_batch_norm
from leannorm.functional.group import group_norm, layer_instance_norm
from leannorm.functional.layer import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from leannorm.functional.operator import register
from leannorm.functional.sync import sync_batch_norm

_STATE = "Tensor(a!)? running_mean, Tensor(b!)? running_var"
_TRACKED = f"{_STATE}, Tensor(c!)? num_batches_tracked"
_ROWS = "int[] normalized_shape, Tensor? weight"


def _act(x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, *rest: Any) -> Tensor:
    training, momentum, eps, act, residual = rest
    return batch_norm_act(x, mean, var, weight, bias, training, momentum, eps, act=act, residual=residual)


def _sync(x: Tensor, *rest: Any) -> Tensor:
    *given, group, layer, timeout, debug = rest
    sharing = Sharing("", layer, timeout, debug, asked=group_of_words(group))
    return tracked_batch_norm(x, *(*given, sharing))


def _torchs_cumulative(
    x: Tensor, mean: Any, var: Any, tracked: Tensor, weight: Any, bias: Any, eps: float
) -> Tensor:
    """A training step of torch's own layer with momentum=None, which reads its counter on the host."""
    tracked.add_(1)
    return torch.nn.functional.batch_norm(x, mean, var, weight, bias, True, 1.0 / float(tracked), eps)


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *rest: Any,
) -> Tensor:
    mean, var, tracked, bn_weight, bn_bias, *options = rest
    stride, padding, padding_name, dilation, groups, mode, training, momentum, eps, eps_mode = options
    return conv_batch_norm(
        x,
        weight,
        bias,
        mean,
        var,
        bn_weight,
        bn_bias,
        stride=stride,
        padding=padding_name or padding,
        dilation=dilation,
        groups=groups,
        padding_mode=mode,
        training=training,
        momentum=momentum,
        eps=eps,
        eps_mode=eps_mode,
        num_batches_tracked=tracked,
    )


def _like_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    stride, padding, name, dilation, groups, mode = rest[5:11]
    return _convolution(x, weight, stride, name or padding, dilation, groups, mode)(x, weight, bias)


def _like(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _like_twice(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


register(
    f"tracked_batch_norm(Tensor x, {_TRACKED}, Tensor? weight, Tensor? bias, bool training,"
    " float? momentum, float eps, int[] ranks, str act, Tensor? residual) -> Tensor",
    tracked_batch_norm,
    _like,
)
register(
    "cumulative_batch_norm(Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_var,"
    " Tensor(c!) num_batches_tracked, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    _torchs_cumulative,
    _like,
)
register(
    f"sync_batch_norm(Tensor x, {_TRACKED}, Tensor? weight, Tensor? bias, bool training, float? momentum,"
    " float eps, int[] ranks, str act, Tensor? residual, str group, str layer, float timeout, bool debug)"
    " -> Tensor",
    _sync,
    _like,
)
register(
    f"batch_norm_act(Tensor x, {_STATE}, Tensor? weight, Tensor? bias, bool training,"
    " float momentum, float eps, str act, Tensor? residual) -> Tensor",
    _act,
    _like,
)
register(
    f"conv_batch_norm(Tensor x, Tensor conv_weight, Tensor? conv_bias, {_TRACKED}, Tensor? weight,"
    " Tensor? bias, int[] stride, int[] padding, str padding_name, int[] dilation, int groups,"
    " str padding_mode, bool training, float? momentum, float eps, str eps_mode) -> Tensor",
    _conv,
    _like_convolution,
)
register(
    f"layer_norm(Tensor x, {_ROWS}, Tensor? bias, float eps, int? dim) -> Tensor",
    lambda x, shape, weight, bias, eps, dim: layer_norm(x, shape, weight, bias, eps, dim=dim),
    _like,
)
register(
    f"rms_norm(Tensor x, {_ROWS}, float? eps, int? dim) -> Tensor",
    lambda x, shape, weight, eps, dim: rms_norm(x, shape, weight, eps, dim=dim),
    _like,
)
register(
    f"add_layer_norm(Tensor x, Tensor residual, {_ROWS}, Tensor? bias, float eps, int? dim)"
    " -> (Tensor, Tensor)",
    lambda x, r, shape, weight, bias, eps, dim: add_layer_norm(x, r, shape, weight, bias, eps, dim=dim),
    _like_twice,
)
register(
    f"add_rms_norm(Tensor x, Tensor residual, {_ROWS}, float? eps, int? dim) -> (Tensor, Tensor)",
    lambda x, r, shape, weight, eps, dim: add_rms_norm(x, r, shape, weight, eps, dim=dim),
    _like_twice,
)

register(
    "group_norm(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    group_norm,
    _like,
)
register(
    f"layer_instance_norm(Tensor x, {_STATE}, Tensor? weight, Tensor? bias, bool use_input_stats,"
    " float? momentum, float eps, int rank, int num_features) -> Tensor",
    layer_instance_norm,
    _like,
)

ops = torch.ops.leannorm


def _call_tracked(x: Tensor, mean: Any, var: Any, tracked: Any, *rest: Any) -> Any:
    weight, bias, training, momentum, eps, ranks, act, residual, sharing = rest
    if sharing is not None:
        return ops.sync_batch_norm(
            x,
            mean,
            var,
            tracked,
            weight,
            bias,
            training,
            momentum,
            eps,
            list(ranks),
            act,
            residual,
            group_in_words(sharing.asked),
            sharing.layer,
            sharing.timeout,
            sharing.debug,
        )
    return ops.tracked_batch_norm(
        x, mean, var, tracked, weight, bias, training, momentum, eps, list(ranks), act, residual
    )


def _call_act(x: Tensor, *rest: Any, act: str = "relu", residual: Tensor | None = None) -> Any:
    given = dict(zip(("mean", "var", "weight", "bias", "training", "momentum", "eps"), rest, strict=True))
    return ops.batch_norm_act(x, *given.values(), act, residual)


def _call_sync(
    x: Tensor, *rest: Any, act: str, residual: Tensor | None, process_group: Any, timeout: Any, **more: Any
) -> Any:
    mean, var, weight, bias, training, momentum, eps = rest
    if not training:
        return _call_act(x, *rest, act=act, residual=residual)
    sharing = Sharing("", more["name"], timeout or 0.0, more["debug_consistency"], asked=process_group)
    given = x, mean, var, None, weight, bias, training, momentum, eps
    return _call_tracked(*given, (2, 3, 4, 5), act, residual, sharing)


def _each(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _call_conv(x: Tensor, weight: Tensor, bias: Any, mean: Any, var: Any, *bn: Any, **options: Any) -> Any:
    padding = options["padding"]
    return ops.conv_batch_norm(
        x,
        weight,
        bias,
        mean,
        var,
        options["num_batches_tracked"],
        *bn,
        _each(options["stride"]),
        [] if isinstance(padding, str) else _each(padding),
        padding if isinstance(padding, str) else "",
        _each(options["dilation"]),
        options["groups"],
        options["padding_mode"],
        options["training"],
        options["momentum"],
        options["eps"],
        options["eps_mode"],
    )


def _call_rows(name: str) -> Callable[..., Any]:
    def call(*given: Any, dim: int | None) -> Any:
        return getattr(ops, name)(*(list(v) if isinstance(v, Sequence) else v for v in given), dim)

    return call


_CALLS: dict[Callable[..., Any], Callable[..., Any]] = {
    tracked_batch_norm: _call_tracked,
    batch_norm: lambda *given: _call_act(*given, act="identity"),
    batch_norm_act: _call_act,
    sync_batch_norm: _call_sync,
    conv_batch_norm: _call_conv,
    group_norm: lambda x, groups, weight, bias, eps: ops.group_norm(x, groups, weight, bias, eps),
    layer_instance_norm: lambda *given: ops.layer_instance_norm(*given),
    **{f: _call_rows(f.__name__) for f in (layer_norm, rms_norm, add_layer_norm, add_rms_norm)},
}


class AsOperators(TorchFunctionMode):
    """Within it every call of a leannorm function is a call of its operator."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _CALLS.get(func, func)(*args, **(kwargs or {}))
