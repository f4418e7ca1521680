"""Activations: rebuilt from their saved input or, if they save their output, from their producer's output."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leannorm.saving.graph import constant, kind_of, saved
from leannorm.saving.recipes.registry import ValueOf, recipe
from leannorm.saving.steps import Step
from leannorm.saving.values import Value

Elementwise = Callable[..., Tensor]
# The function, the same in place, and the constants that the node saves
_Row = tuple[Elementwise, Elementwise | None, tuple[str, ...]]


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


_FROM_SAVED_INPUT: dict[str, _Row] = {
    "SiluBackward0": (F.silu, None, ()),
    "MishBackward0": (F.mish, None, ()),
    "HardswishBackward0": (F.hardswish, None, ()),
    "HardsigmoidBackward0": (F.hardsigmoid, None, ()),
    "GeluBackward0": (_gelu, None, ("approximate",)),
    "HardtanhBackward0": (F.hardtanh, None, ("min_val", "max_val")),
    "LeakyReluBackward0": (F.leaky_relu, None, ("negative_slope",)),
    "EluBackward0": (torch.ops.aten.elu, None, ("alpha", "scale", "input_scale")),
    "CeluBackward0": (F.celu, None, ("alpha",)),
    "SoftplusBackward0": (F.softplus, None, ("beta", "threshold")),
    "GluBackward0": (F.glu, None, ("dim",)),
    "LogSigmoidBackward0": (F.logsigmoid, None, ()),
    "AbsBackward0": (torch.abs, None, ()),
    "LogBackward0": (torch.log, None, ()),
    "ClampBackward1": (torch.clamp, None, ("min", "max")),
}
# These save their output, so their input needs a value; the step must not hold the node itself
_FROM_PRODUCER: dict[str, _Row] = {
    "ReluBackward0": (torch.relu, torch.relu_, ()),
    "SigmoidBackward0": (torch.sigmoid, torch.sigmoid_, ()),
    "TanhBackward0": (torch.tanh, torch.tanh_, ()),
    "LeakyReluBackward1": (F.leaky_relu, torch.ops.aten.leaky_relu_, ("negative_slope",)),
    "EluBackward1": (torch.ops.aten.elu, torch.ops.aten.elu_, ("alpha", "scale", "input_scale")),
    "CeluBackward1": (F.celu, torch.celu_, ("alpha",)),
    "ExpBackward0": (torch.exp, torch.exp_, ()),
    "SqrtBackward0": (torch.sqrt, torch.sqrt_, ()),
    "SoftmaxBackward0": (torch.softmax, None, ("dim",)),
    "SafeSoftmaxBackward0": (torch._safe_softmax, None, ("dim",)),
    "LogSoftmaxBackward0": (torch.log_softmax, None, ("dim",)),
}
_ALL = {**_FROM_SAVED_INPUT, **_FROM_PRODUCER}
ACTIVATIONS = set(_ALL)
IN_PLACE = {kind: row for kind, row in _ALL.items() if "Softmax" not in kind and kind != "GluBackward0"}


@recipe(*_ALL)
def activation(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    kind = kind_of(node)
    x = saved(node, "self") if kind in _FROM_SAVED_INPUT else value_of(0)
    constants = tuple(constant(node, name) for name in _ALL[kind][2])
    return None if x is None or output else step_of(x, kind, constants)


def step_of(x: Value, kind: str, constants: tuple[Hashable, ...]) -> Step:
    """The step of this kind of activation, perhaps in one pass with a norm before it."""
    function, in_place, _ = _ALL[kind]
    return with_norm(x, (kind, *constants)) or Step(function, (x,), (), constants, in_place=in_place)


_IN_ONE_PASS: dict[Hashable, str] = {
    ("ReluBackward0",): "relu",
    ("HardswishBackward0",): "hardswish",
    ("HardtanhBackward0", 0.0, 6.0): "relu6",
}


def with_norm(x: Value, key: Hashable) -> Step | None:
    """Norm, and an activation or a cast, as one step from the norm's input, in the time of the norm alone."""
    act, step = key if isinstance(key, torch.dtype) else _IN_ONE_PASS.get(key), x.step
    proved, told = True, True
    while step is not None and step.kind == "copy":  # an in-place activation saves a copy of its input
        proved, told, step = proved and step.proved, False, step.inputs[0].step
    fused = step.then(step, act) if act and step is not None and step.then else None
    if fused is None or step is None:
        return None
    return fused._replace(flags=step.flags, proved=proved and step.proved, tells_layout=told)


@recipe("PreluKernelBackward0")
def prelu(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    x, weight = saved(node, "self"), saved(node, "weight")
    return None if x is None or weight is None else Step(torch._prelu_kernel, (x, weight))
