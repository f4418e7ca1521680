"""The calls of a converted Sequential: a norm's call waits until it is known whether an activation follows.

`step(act, step(norm, x))` is `act(norm(x))`, whatever `norm` and `act` are at run time. The two become one
kernel call only if a kernel computes both and neither has hooks. This is decided at every call, so changes
after the conversion (flags, hooks, replaced layers, patched functions) cannot make it wrong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from leannorm import nn
from leannorm._catalog import name_of
from leannorm.nn._base import BatchNormBase
from leannorm.nn._layer import MaskedLayer
from leannorm.ops.activation import ACTIVATIONS
from leannorm.transforms.fusing.observed import is_plain_tensor, is_unobserved

_BATCH = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
FUSABLE = (*_BATCH, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_FORWARD = MaskedLayer.forward

_COMPUTED = {name: activation for name, activation in ACTIVATIONS.items() if name != "identity"}
_ACTIVATIONS_BESIDE_TORCHS = {
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
}
_ATTRIBUTES = {"relu6": {"min_val": 0.0, "max_val": 6.0}}  # its constructor does not take these
# the functions that torch's activation layers call, as they were when this module was imported
_CALLED = {
    name: next(getattr(F, called) for called in activation.module.forward.__code__.co_names if called != "F")
    for name, activation in _COMPUTED.items()
}

_SEQUENTIAL_FORWARD = torch.nn.Sequential.forward


class Deferred(NamedTuple):
    """A norm's call that has not run yet."""

    norm: BatchNormBase | nn.GroupNorm | nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
    input: Tensor

    def run(self, act: str = "identity") -> Tensor:
        y = self.norm._fast(self.input, act)
        return self.norm._normalize(self.input, act) if y is None else y


def step(layer: Any, value: Any) -> Any:
    """`layer(value)`; if it is a norm, perhaps a `Deferred`, which may only be passed to another step."""
    if type(value) is Deferred:
        if type(layer) is torch.nn.Identity and is_unobserved(layer):
            return value
        name = _activation_that_runs(layer)
        if name is not None:
            return value.run(name)
        value = value.run()
    if is_plain_tensor(value):
        if is_fusable(layer):
            return Deferred(layer, value)
        if ends_with_norm(layer):
            for inner in layer._modules.values():
                value = step(inner, value)
            return value
    return layer(value)


def now(value: Any) -> Any:
    """The value as a tensor, never deferred."""
    return value.run() if type(value) is Deferred else value


def sequential_forward(self: torch.nn.Sequential, input: Any) -> Any:
    """The forward of a Sequential, with its layers called as steps."""
    cls: Any = type(self)
    if cls.unfused.forward is not _SEQUENTIAL_FORWARD:  # replaced in the meantime
        return cls.unfused.forward(self, input)
    for layer in self._modules.values():
        input = step(layer, input)
    return now(input)


def norm_drop_act(norm: BatchNormBase, input: Any, drop: Any, act: Any) -> Tensor:
    """`act(drop(norm(input)))` from within the norm's own forward."""
    deferred = Deferred(norm, input) if is_plain_tensor(input) else norm._normalize(input)
    y: Tensor = now(step(act, step(drop, deferred)))
    return y


def activation_of(module: Module) -> str | None:
    """The kernels' name of this activation module; None if they lack it, or have other parameters."""
    for name, activation in _COMPUTED.items():
        known = {**activation.parameters, **_ATTRIBUTES.get(name, {})}
        if type(module) is activation.module and all(getattr(module, k) == v for k, v in known.items()):
            return name
    return _ACTIVATIONS_BESIDE_TORCHS.get(name_of(type(module)))


def _activation_that_runs(layer: Any) -> str | None:
    """The same, if a call runs that activation's own code and no hook is set."""
    name = activation_of(layer) if isinstance(layer, Module) else None
    if name is None or type(layer).forward.__module__ != type(layer).__module__ or not is_unobserved(layer):
        return None
    function = _CALLED[name]
    return name if getattr(F, function.__name__) is function else None


def is_fusable(layer: Any) -> bool:
    """Whether it is a leannorm batch, group or instance norm with its class's forward and without hooks."""
    return type(layer) in FUSABLE and type(layer).forward is _FORWARD and is_unobserved(layer)


def runs_in_order(module: Any) -> bool:
    """Whether it is a Sequential that calls its layers in order, as torch's does."""
    cls = type(module)
    return (
        isinstance(module, torch.nn.Sequential)
        and cls.forward in (_SEQUENTIAL_FORWARD, sequential_forward)
        and cls.__iter__ is torch.nn.Sequential.__iter__
        and "forward" not in vars(module)
    )


def ends_with_norm(layer: Any) -> bool:
    """Whether it is a Sequential without hooks, whose last layer is a norm that can be deferred."""
    if not (isinstance(layer, torch.nn.Sequential) and layer._modules):
        return False
    end = next(reversed(layer._modules.values()))
    return runs_in_order(layer) and is_unobserved(layer) and (is_fusable(end) or ends_with_norm(end))
