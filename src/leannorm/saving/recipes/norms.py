"""Torch's norms: rebuilt from the input and the node's saved statistics, or by running the kernel again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leannorm.autograd.nodes import NODES
from leannorm.saving.calls import CallArguments
from leannorm.saving.graph import is_lost, kind_of, saved
from leannorm.saving.recipes import norms_on_gpu
from leannorm.saving.recipes.fused_norm_act import joined, matches_torch, scale_shift_act
from leannorm.saving.recipes.registry import ValueOf, copy_of, recipe
from leannorm.saving.steps import Step, share_memory
from leannorm.saving.values import Value

_BATCH_NORMS: dict[str, Callable[..., Any]] = {
    "NativeBatchNormBackward0": torch.native_batch_norm,
    "CudnnBatchNormBackward0": torch.cudnn_batch_norm,
    "MiopenBatchNormBackward0": torch.miopen_batch_norm,
}
NORMS = {*_BATCH_NORMS, "NativeGroupNormBackward0", "NativeLayerNormBackward0"}


def _call(*values: Value | None) -> CallArguments | None:
    """The arguments of the norm call that saved these values, if they are known."""
    for value in values:
        if value is not None and isinstance(value.call, CallArguments):
            return value.call
    return None


def _bias(x: Value, call: CallArguments | None, value_of: ValueOf) -> tuple[bool, Tensor | None]:
    """Is the bias of a norm of `x` known, and a copy of it. Nodes of batch and group norm do not save it.

    Without the call's arguments, a missing edge may mean no bias or a frozen one, so it is not known.
    """
    if call is not None and call.moves_affine:
        return False, None
    if call is not None:
        if call.bias is None:
            return True, None
        channels = (x.shape if x.tensor is None else x.tensor.shape)[1]
        times = channels // len(call.bias)  # instance norm folds the batch dim into this one
        return True, call.bias if times == 1 else call.bias.repeat(times)
    value = value_of(2)
    return value is not None, copy_of(value)


def _share_memory(a: Value | None, b: Value | None) -> bool:
    """A call that moves its own weight or bias normalizes with other values than were there before it."""
    return a is not None and b is not None and share_memory(a.tensor, b.tensor)


def _first(outputs: tuple[Tensor, ...]) -> Tensor:
    return outputs[0]


def _batch_norm_again(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    kind: str,
    training: bool,
    eps: float,
) -> Tensor:
    return _first(_BATCH_NORMS[kind](x, weight, bias, mean, var, training, 0.0, eps))


@recipe(*_BATCH_NORMS)
def batch_norm(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    x, weight = saved(node, "input"), saved(node, "weight")
    if output or x is None:
        return None
    kind, training = kind_of(node), node._saved_training
    # without its statistics torch's kernel ends the process; in training the call itself moves them
    if is_lost(node, "weight", *(() if training else ("running_mean", "running_var"))):
        return None
    native = kind == "NativeBatchNormBackward0"
    mean_value, rstd_value = saved(node, "result1"), saved(node, "result2")
    call = _call(mean_value, rstd_value)
    running: tuple[Value | None, ...] = ()  # asked where the call does not tell
    if call is None or not training:
        running = saved(node, "running_mean"), saved(node, "running_var")
        call = call or _call(*running)
    known, bias = _bias(x, call, value_of)
    if not known or (training and any(_share_memory(v, weight) for v in running)):
        return None
    if training and native and mean_value is not None and rstd_value is not None:
        mean, rstd = mean_value.look(), rstd_value.look()
        if mean.is_cpu and mean.dtype in (torch.float32, torch.float64):
            return _scale_and_shift(x, mean, rstd, None if weight is None else weight.look(), bias)
        if norms_on_gpu.serves(mean_value):
            captured = copy_of(weight), bias, mean, rstd
            return Step(norms_on_gpu.batch_norm, (x,), captured, (node._saved_eps,), then=norms_on_gpu.then)
    eps = node._saved_eps if native else node._saved_epsilon
    buffers = (None, None) if training else tuple(map(copy_of, running))
    return Step(_batch_norm_again, (x,), (copy_of(weight), bias, *buffers), (kind, training, eps))


def _scale_and_shift(
    x: Value, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Step:
    """torch's CPU kernel computes fma(x, scale, fma(-mean, scale, bias)); the same with torch operators."""
    if NODES is not None:
        scale, shift = NODES.scale_and_shift(mean, rstd, weight, bias)
    else:
        scale = rstd if weight is None else rstd * weight.detach()
        shift = torch.addcmul(torch.zeros_like(mean) if bias is None else bias, mean, scale, value=-1)
    return Step(scale_shift_act, (x,), (scale, shift), ("identity",), then=_with_act)


def _with_act(step: Step, act: str, added: Value | None = None) -> Step | None:
    scale = step.captured[0]
    if scale is None or not matches_torch(act, scale.dtype):
        return None
    return joined(step, scale_shift_act, (act,), added, _with_act)


def _group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any) -> Tensor:
    return _first(torch.native_group_norm(x, weight, bias, *sizes))


_EPS_OF_GROUP_NORM = "_saved_eps"  # newer releases of torch do not save it


@recipe("NativeGroupNormBackward0")
def group_norm(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    x, weight = saved(node, "input"), saved(node, "weight")
    if output or x is None or is_lost(node, "weight"):
        return None
    call = _call(saved(node, "result1"), saved(node, "result2"))
    known, bias = _bias(x, call, value_of)
    eps = getattr(node, _EPS_OF_GROUP_NORM, None if call is None else call.eps)
    if not known or eps is None:
        return None
    sizes = node._saved_N, node._saved_C, node._saved_HxW, node._saved_group, eps
    return Step(_group_norm, (x,), (copy_of(weight), bias), sizes)


_OF_LAYER_NORM = "input", "result1", "result2", "weight", "bias"


def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...], eps: float
) -> Tensor:
    return _first(torch.native_layer_norm(x, shape, weight, bias, eps))


@recipe("NativeLayerNormBackward0")
def layer_norm(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    x, mean, rstd, weight, bias = (saved(node, name) for name in _OF_LAYER_NORM)
    call = _call(rstd)
    if output or x is None or call is None or is_lost(node, "weight", "bias"):
        return None
    shape, captured = tuple(node._saved_normalized_shape), tuple(map(copy_of, (weight, bias)))
    if mean is not None and rstd is not None and norms_on_gpu.serves(mean):
        captured = *captured, mean.look(), rstd.look()
        return Step(norms_on_gpu.layer_norm, (x,), captured, (shape, call.eps), then=norms_on_gpu.then_cast)
    return Step(_layer_norm, (x,), captured, (shape, call.eps))


def _rms_norm(x: Tensor, weight: Tensor | None, shape: tuple[int, ...], eps: float | None) -> Tensor:
    return _first(torch.ops.aten._fused_rms_norm(x, shape, weight, eps))


@recipe("FusedRmsNormBackward0")
def rms_norm(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    x, call = saved(node, "input"), _call(saved(node, "result1"))
    if output or x is None or call is None or is_lost(node, "weight"):
        return None
    shape = tuple(node._saved_normalized_shape)
    return Step(_rms_norm, (x,), (copy_of(saved(node, "weight")),), (shape, call.eps))
