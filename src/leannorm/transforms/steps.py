"""The calls of a converted block: a norm's call is deferred until the activation that follows it is known.

`finish(act, step(norm, x))` is `act(norm(x))`, whatever `norm` and `act` are at run time. The two become one
kernel call only if a kernel computes both and neither has hooks. This is decided at every call, so changes
after the conversion (flags, hooks, replaced layers, patched functions) cannot make it wrong.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch.nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.conv import _ConvNd

from leannorm import nn
from leannorm.nn._base import BatchNormBase
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.modes import leaving
from leannorm.transforms.group_steps import GroupForm, can_modulate, modulated_group_norm
from leannorm.transforms.group_steps import function_then_modulate as function_then_modulate
from leannorm.transforms.observed import is_plain_tensor, is_unobserved
from leannorm.transforms.row_steps import add_then_norm as add_then_norm
from leannorm.transforms.row_steps import norm_then_modulate as norm_then_modulate
from leannorm.transforms.row_steps import norm_then_modulate_each as norm_then_modulate_each
from leannorm.transforms.row_steps import scaled_and_shifted

FUSABLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
_FORWARDS = (BatchNormBase.forward, nn.GroupNorm.forward)

_COMPUTED = {name: activation for name, activation in ACTIVATIONS.items() if name != "identity"}
_ACTIVATIONS_BESIDE_TORCHS = {
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
}
_ATTRIBUTES = {"relu6": {"min_val": 0.0, "max_val": 6.0}}  # which its constructor does not take
_CALLS = {call for activation in _COMPUTED.values() for call in activation.functions}
METHODS = tuple(sorted(call for call in _CALLS if isinstance(call, str)))
# the functions that torch's activation layers call, as they were when this module was imported
_CALLED = {
    name: getattr(F, name) for name in ("relu", "silu", "hardswish", "mish", "gelu", "elu", "leaky_relu")
}
_CALLED |= {"relu6": F.hardtanh, "hardtanh": F.hardtanh, "gelu_tanh": F.gelu}


_SEQUENTIAL_FORWARD = torch.nn.Sequential.forward


class Deferred:
    """A norm's call that has not run yet, and a residual or a modulation of its output. It runs once."""

    def __init__(self, norm: BatchNormBase | nn.GroupNorm, input: Tensor) -> None:
        self.norm, self.input, self.has_run = norm, input, False
        self.residual: Tensor | None = None
        self.in_place = False
        self.modulation: tuple[Tensor, ...] = ()  # scale, or scale and shift

    def plus(self, residual: Tensor, in_place: bool = False) -> Deferred:
        self.residual, self.in_place = residual, in_place
        return self

    def run_fused(self, act: str) -> Tensor:
        self.has_run = True
        if self.residual is None:
            return self._normalized(act)
        assert not isinstance(self.norm, nn.GroupNorm)
        return self.norm._normalize(self.input, act, self.residual)

    def _normalized(self, act: str = "identity") -> Tensor:
        if self.modulation:
            return modulated_group_norm(form_of(self.norm), self.input, self.modulation, act)
        y = None if isinstance(self.norm, nn.GroupNorm) else self.norm._fast(self.input, act)
        return self.norm._normalize(self.input, act) if y is None else y

    def run_unfused(self) -> Tensor:
        self.has_run = True
        y = self._normalized()
        if self.residual is None:
            return y
        if self.in_place:
            y += self.residual
            return y
        return y + self.residual


def form_of(norm: Any) -> GroupForm:
    return GroupForm(norm.num_groups, norm.weight, norm.bias, norm.eps)


def step(call: Any, value: Any, **options: Any) -> Any:
    """`call(value)`; if `call` is a norm, perhaps a `Deferred`, which may only be passed to another step."""
    if type(value) is Deferred:
        if type(call) is torch.nn.Identity and not options and is_unobserved(call):
            return value
        name = activation_name(call, options)
        # with a residual, only relu's fused backward pass keeps the same tensors as torch's
        if name is not None and (value.residual is None or name == "relu"):
            return value.run_fused(name)
        value = value.run_unfused()
    if not options and is_plain_tensor(value):
        if is_fusable(call):
            return Deferred(call, value)
        if ends_with_norm(call):
            for layer in call._modules.values():
                value = step(layer, value)
            return value
    return call(value, **options)


def finish(call: Any, value: Any, **options: Any) -> Any:
    """`call(value)` as a tensor, never deferred."""
    return now(step(call, value, **options))


def finish_method(name: str, value: Any) -> Any:
    """`value.name()`, where the method is an activation."""
    if type(value) is Deferred:
        return value.run_fused("relu") if name in METHODS else getattr(value.run_unfused(), name)()
    return getattr(value, name)()


def step_across(call: Any, value: Any, producer: Any, block: Module, paths: tuple[str, ...]) -> Any:
    """As `step`, where the modules of `block` at `paths` are called before the next step.

    The norm is deferred only if its input is the new output of a convolution or linear layer (`producer`),
    and if the modules are torch's or leannorm's layers that are not this norm nor share its statistics.
    """
    if isinstance(producer, (_ConvNd, torch.nn.Linear)) and _runs_library_code(producer):
        layers = [layer for path in paths for layer in _modules_of(_get_path(block, path))]
        if all(_is_independent(layer, call) for layer in layers):
            return step(call, value)
    return finish(call, value)


def run_if_deferred(value: Any) -> None:
    """Run a norm that is still deferred, since an exception ends the block before the next step."""
    if type(value) is Deferred and not value.has_run:
        value.run_unfused()


def plus(value: Any, other: Any) -> Any:
    """`value + other`; the sum stays deferred if one operand is."""
    if type(value) is Deferred and _can_add(value, other):
        return value.plus(other)
    if type(value) is Deferred:
        value = value.run_unfused()
    if type(other) is Deferred:
        if _can_add(other, value):
            return other.plus(value)
        other = other.run_unfused()
    return value + other


def plus_in_place(value: Any, other: Any) -> Any:
    """`value += other`. Unless `value` is deferred, it is written in place, since other code may hold it."""
    if type(value) is Deferred:
        if _can_add(value, other):
            return value.plus(other, in_place=True)
        value = value.run_unfused()
    value += other
    return value


def modulate(value: Any, one: Any, scale: Any, *shift: Any) -> Any:
    """`value * (one + scale) + shift`, with or without shift; deferred if that is one pass. `one` is 1."""
    if type(value) is Deferred:
        plain = isinstance(value.norm, nn.GroupNorm) and not value.modulation
        if plain and can_modulate(form_of(value.norm), value.input, (scale, *shift)):
            value.modulation = (scale, *shift)
            return value
        value = value.run_unfused()
    return scaled_and_shifted(value, one, scale, *shift)


def now(value: Any) -> Any:
    """The value as a tensor, never deferred."""
    return value.run_unfused() if type(value) is Deferred else value


def sequential_forward(self: torch.nn.Sequential, input: Any) -> Any:
    """The forward of a Sequential, with its layers called as steps."""
    cls: Any = type(self)
    if cls.unfused.forward is not _SEQUENTIAL_FORWARD:  # replaced since
        return cls.unfused.forward(self, input)
    for layer in self._modules.values():
        input = step(layer, input)
    return now(input)


def norm_drop_act(norm: BatchNormBase, input: Any, drop: Any, act: Any) -> Tensor:
    """`act(drop(norm(input)))` from within the norm's own forward."""
    deferred = Deferred(norm, input) if is_plain_tensor(input) else norm._normalize(input)
    y: Tensor = finish(act, step(drop, deferred))
    return y


def activation_name(call: Any, options: Mapping[str, Any]) -> str | None:
    """The kernels' name of this activation with these options; None if they lack it, or it has hooks."""
    if isinstance(call, Module):
        cls, name = type(call), None if options else activation_of(call)
        if name is None or cls.forward.__module__ != cls.__module__ or not is_unobserved(call):
            return None
        called = _CALLED[name]
        return name if getattr(F, called.__name__) is called else None
    if type(call) not in (types.FunctionType, types.BuiltinFunctionType):
        return None
    return activation_called(call, options)


def activation_called(function: Any, options: Mapping[str, Any]) -> str | None:
    """The kernels' name of this function called with these keyword arguments; None if they lack it."""
    code = getattr(function, "__code__", None)
    either_way = {"inplace"} if code is not None and "inplace" in code.co_varnames else set()
    for name, activation in _COMPUTED.items():
        known = activation.parameters
        fits = function in activation.functions and options.keys() <= known.keys() | either_way
        if fits and all(options.get(key, value) == value for key, value in known.items()):
            return name
    return None


def is_activation_function(call: Any) -> bool:
    """Is it a function that the kernels may replace?"""
    return type(call) in (types.FunctionType, types.BuiltinFunctionType) and call in _CALLS


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def activation_of(module: Module) -> str | None:
    """The kernels' name of this activation module; None if they lack it, or have other parameters."""
    for name, activation in _COMPUTED.items():
        known = {**activation.parameters, **_ATTRIBUTES.get(name, {})}
        if type(module) is activation.module and all(getattr(module, k) == v for k, v in known.items()):
            return name
    return _ACTIVATIONS_BESIDE_TORCHS.get(name_of(type(module)))


def is_fusable(call: Any) -> bool:
    """Is it a leannorm batch or group norm with its class's forward and without hooks?"""
    return type(call) in FUSABLE and type(call).forward in _FORWARDS and is_unobserved(call)


def runs_in_order(module: Any) -> bool:
    """Is it a Sequential that calls its layers in order, as torch's does?"""
    cls = type(module)
    return (
        isinstance(module, torch.nn.Sequential)
        and cls.forward in (_SEQUENTIAL_FORWARD, sequential_forward)
        and cls.__iter__ is torch.nn.Sequential.__iter__
        and "forward" not in vars(module)
    )


def ends_with_norm(call: Any) -> bool:
    """Is it a Sequential without hooks, whose last layer is a norm that can be deferred?"""
    if not (isinstance(call, torch.nn.Sequential) and call._modules):
        return False
    end = next(reversed(call._modules.values()))
    return runs_in_order(call) and is_unobserved(call) and (is_fusable(end) or ends_with_norm(end))


def _is_independent(layer: Any, norm: Any) -> bool:
    """Is it a known layer that neither is this norm nor shares its buffers?"""
    if layer is norm or not _runs_library_code(layer):
        return False
    theirs = [b for b in layer._buffers.values() if b is not None]
    return not any(b is mine for b in theirs for mine in norm._buffers.values())


def _runs_library_code(module: Any) -> bool:
    """Is its forward torch's or leannorm's, without hooks?"""
    if not isinstance(module, Module):
        return False
    return type(module).forward.__module__.startswith(("torch.nn.modules.", "leannorm.")) and is_unobserved(
        module
    )


def _get_path(block: Module, path: str) -> Any:
    for name in path.split("."):
        block = getattr(block, name, None)  # type: ignore[assignment]
    return block


def _modules_of(called: Any) -> list[Any]:
    """The modules that a call of this may run: a module's all, none for None, else the callable itself."""
    return list(called.modules()) if isinstance(called, Module) else [] if called is None else [called]


def _can_add(deferred: Deferred, other: Any) -> bool:
    """Can the kernel add `other` to the norm's output? An exported graph has an addition of its own."""
    input = deferred.input
    return (
        deferred.residual is None
        and not isinstance(deferred.norm, nn.GroupNorm)
        and is_plain_tensor(other)
        and not leaving()
        and (other.shape, other.dtype, other.device) == (input.shape, input.dtype, input.device)
    )
