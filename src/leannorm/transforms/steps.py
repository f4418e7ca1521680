"""Calls that a converted block makes one behind the other: a norm's waits for the activation behind it.

`last(act, step(norm, x))` is `act(norm(x))`, whatever `norm` and `act` are at that moment. Only where both
prove to be what one kernel computes, and nobody listens to either, is it one call. So nothing that changes
after the conversion (flags, hooks, other layers in their place, patched functions) can make it wrong.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch.nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as _module
from torch.nn.modules.conv import _ConvNd
from torch.overrides import _get_current_function_mode_stack

from leannorm import nn
from leannorm.nn._base import BatchNormBase
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.modes import leaving

FUSABLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

_COMPUTED = {name: activation for name, activation in ACTIVATIONS.items() if name != "identity"}
_ACTIVATIONS_BESIDE_TORCHS = {
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
}
_ATTRIBUTES = {"relu6": {"min_val": 0.0, "max_val": 6.0}}  # which its constructor does not take
_CALLS = {call for activation in _COMPUTED.values() for call in activation.functions}
METHODS = tuple(sorted(call for call in _CALLS if isinstance(call, str)))
# what torch's activation layers call, as it was when this was imported
_CALLED = {
    name: getattr(F, name) for name in ("relu", "silu", "hardswish", "mish", "gelu", "elu", "leaky_relu")
}
_CALLED |= {"relu6": F.hardtanh, "hardtanh": F.hardtanh, "gelu_tanh": F.gelu}


_SEQUENTIAL_FORWARD = torch.nn.Sequential.forward


class Waiting:
    """A norm that is yet to run, and what is to be added to its output. It runs once."""

    def __init__(self, norm: BatchNormBase, input: Tensor) -> None:
        self.norm, self.input, self.has_run = norm, input, False
        self.residual: Tensor | None = None
        self.in_place = False

    def plus(self, residual: Tensor, in_place: bool = False) -> Waiting:
        self.residual, self.in_place = residual, in_place
        return self

    def run(self, act: str) -> Tensor:
        self.has_run = True
        return self.norm._normalize(self.input, act, self.residual)

    def plain(self) -> Tensor:
        self.has_run = True
        y = self.norm._normalize(self.input)
        if self.residual is None:
            return y
        if self.in_place:
            y += self.residual
            return y
        return y + self.residual


def step(call: Any, value: Any, **options: Any) -> Any:
    """`call(value)`, or where it is a norm perhaps a `Waiting`, which only another step may receive."""
    if type(value) is Waiting:
        if type(call) is torch.nn.Identity and not options and _unheard(call):
            return value
        name = activation(call, options)
        # with a residual, relu alone keeps for its backward pass what torch's keeps
        if name is not None and (value.residual is None or name == "relu"):
            return value.run(name)
        value = value.plain()
    if not options and _plain(value):
        if is_fusable(call):
            return Waiting(call, value)
        if ends_with_norm(call):
            for layer in call._modules.values():
                value = step(layer, value)
            return value
    return call(value, **options)


def last(call: Any, value: Any, **options: Any) -> Any:
    """`call(value)`, which nobody waits for."""
    y = step(call, value, **options)
    return y.plain() if type(y) is Waiting else y


def method(name: str, value: Any) -> Any:
    """`value.name()`, an activation."""
    if type(value) is Waiting:
        return value.run("relu") if name in METHODS else getattr(value.plain(), name)()
    return getattr(value, name)()


def later(call: Any, value: Any, producer: Any, block: Module, paths: tuple[str, ...]) -> Any:
    """As `step`, where the modules of `block` at `paths` may be called before the next step.

    The norm may wait for them where its input is a convolution's output that nobody else holds, and where
    they are torch's own layers or ours, of which none is this norm or shares its statistics.
    """
    if isinstance(producer, (_ConvNd, torch.nn.Linear)) and _known(producer):
        layers = [layer for path in paths for layer in _layers(_at(block, path))]
        if all(_apart(layer, call) for layer in layers):
            return step(call, value)
    return last(call, value)


def settle(value: Any) -> None:
    """Run a norm that waits, as what stands behind it will not."""
    if type(value) is Waiting and not value.has_run:
        value.plain()


def plus(value: Any, other: Any) -> Any:
    """`value + other`; the sum may wait as a norm does."""
    if type(value) is Waiting and _alike(value, other):
        return value.plus(other)
    if type(value) is Waiting:
        value = value.plain()
    if type(other) is Waiting:
        if _alike(other, value):
            return other.plus(value)
        other = other.plain()
    return value + other


def plus_in_place(value: Any, other: Any) -> Any:
    """`value += other`. Where `value` is no waiting norm, somebody else may hold it: it is written."""
    if type(value) is Waiting:
        if _alike(value, other):
            return value.plus(other, in_place=True)
        value = value.plain()
    value += other
    return value


def sequential_forward(self: torch.nn.Sequential, input: Any) -> Any:
    """The layers one behind the other."""
    cls: Any = type(self)
    if cls.unfused.forward is not _SEQUENTIAL_FORWARD:  # replaced since
        return cls.unfused.forward(self, input)
    for layer in self._modules.values():
        input = step(layer, input)
    return input.plain() if type(input) is Waiting else input


def norm_drop_act(norm: BatchNormBase, input: Any, drop: Any, act: Any) -> Tensor:
    """`act(drop(norm(input)))` from within the norm's own forward."""
    waiting = Waiting(norm, input) if _plain(input) else norm._normalize(input)
    y: Tensor = last(act, step(drop, waiting))
    return y


def activation(call: Any, options: Mapping[str, Any]) -> str | None:
    """The kernels' name for an activation, with its parameters; None where it is another, or is heard."""
    if isinstance(call, Module):
        cls, name = type(call), None if options else activation_of(call)
        if name is None or cls.forward.__module__ != cls.__module__ or not _unheard(call):
            return None
        called = _CALLED[name]
        return name if getattr(F, called.__name__) is called else None
    if type(call) not in (types.FunctionType, types.BuiltinFunctionType):
        return None
    return activation_called(call, options)


def activation_called(function: Any, options: Mapping[str, Any]) -> str | None:
    """The kernels' name for this function, called with these keyword arguments."""
    code = getattr(function, "__code__", None)
    either_way = {"inplace"} if code is not None and "inplace" in code.co_varnames else set()
    for name, activation in _COMPUTED.items():
        known = activation.parameters
        fits = function in activation.functions and options.keys() <= known.keys() | either_way
        if fits and all(options.get(key, value) == value for key, value in known.items()):
            return name
    return None


def is_activation_function(call: Any) -> bool:
    """Is it a function that the kernels may stand in for?"""
    return type(call) in (types.FunctionType, types.BuiltinFunctionType) and call in _CALLS


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def activation_of(module: Module) -> str | None:
    """The kernels' name for this activation module; None where it is another or has other parameters."""
    for name, activation in _COMPUTED.items():
        known = {**activation.parameters, **_ATTRIBUTES.get(name, {})}
        if type(module) is activation.module and all(getattr(module, k) == v for k, v in known.items()):
            return name
    return _ACTIVATIONS_BESIDE_TORCHS.get(name_of(type(module)))


def is_fusable(call: Any) -> bool:
    """Is it a batch norm of ours that does what its class does?"""
    return type(call) in FUSABLE and type(call).forward is BatchNormBase.forward and _unheard(call)


def runs_in_order(module: Any) -> bool:
    """Is it a Sequential that calls its layers one behind the other, as torch's does?"""
    cls = type(module)
    return (
        isinstance(module, torch.nn.Sequential)
        and cls.forward in (_SEQUENTIAL_FORWARD, sequential_forward)
        and cls.__iter__ is torch.nn.Sequential.__iter__
        and "forward" not in vars(module)
    )


def ends_with_norm(call: Any) -> bool:
    """Is it a Sequential whose last layer is a norm that may wait, and to which nobody listens?"""
    if not (isinstance(call, torch.nn.Sequential) and call._modules):
        return False
    end = next(reversed(call._modules.values()))
    return runs_in_order(call) and _unheard(call) and (is_fusable(end) or ends_with_norm(end))


def has_hooks(module: Module) -> bool:
    """Does anybody listen to this module's own calls? A hook marked `sees_nothing` does not."""
    return any(
        not getattr(hook, "sees_nothing", False)
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        for hook in hooks.values()
    )


def _unheard(module: Module) -> bool:
    """Does nobody listen to the module, and has it no forward of its own?"""
    return not (
        "forward" in vars(module)
        or has_hooks(module)
        or _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def _apart(layer: Any, norm: Any) -> bool:
    """Is it a layer whose work this norm's statistics have no part in?"""
    if layer is norm or not _known(layer):
        return False
    theirs = [b for b in layer._buffers.values() if b is not None]
    return not any(b is mine for b in theirs for mine in norm._buffers.values())


def _known(module: Any) -> bool:
    """Does it run code of torch's layers, or ours, alone?"""
    if not isinstance(module, Module):
        return False
    return type(module).forward.__module__.startswith(("torch.nn.modules.", "leannorm.")) and _unheard(module)


def _at(block: Module, path: str) -> Any:
    for name in path.split("."):
        block = getattr(block, name, None)  # type: ignore[assignment]
    return block


def _layers(called: Any) -> list[Any]:
    """The modules of what may be called: a module, or None where it is not."""
    return list(called.modules()) if isinstance(called, Module) else [] if called is None else [called]


def _alike(waiting: Waiting, other: Any) -> bool:
    """Can the kernel add it to the norm's output? A graph that leaves has an addition of its own."""
    input = waiting.input
    return (
        waiting.residual is None
        and _plain(other)
        and not leaving()
        and (other.shape, other.dtype, other.device) == (input.shape, input.dtype, input.device)
    )


def _plain(value: Any) -> bool:
    """Is it a tensor whose operations nobody else handles?"""
    if not isinstance(value, Tensor):
        return False
    cls = type(value)
    if cls not in (Tensor, torch.nn.Parameter) and (
        cls.__torch_function__ is not torch._C._disabled_torch_function_impl
    ):
        return False
    return torch._C._len_torch_function_stack() == 0 or all(
        type(mode).__module__.split(".")[0] in ("torch", "leannorm")
        for mode in _get_current_function_mode_stack()
    )
