"""Runs a probe of a layer, and says what it computes and all that it looked at to decide so.

The probe is a copy that notes each attribute that is read; the input is small and random; a mode sees each
operation, another each look at a tensor's size. What a run cannot show (a branch on values, on a size of the
batch, state that it keeps) is refused.
"""

from __future__ import annotations

import copy
import functools
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from leannorm.transforms.recognizing.formula import LOW, Form, Gate, Parameter, Row, UnknownFormError, form_of
from leannorm.transforms.recognizing.operations import Values

# what autocast of CUDA computes in float32
_WIDENED = {"pow", "rsqrt", "reciprocal", "native_layer_norm", "native_group_norm", "_fused_rms_norm"}
_SIZES = {"shape", "size", "numel", "nelement", "__len__"}
_SEEN = {"dtype", "device", "ndim", "dim", "ndimension", "is_floating_point", "is_cuda", "itemsize"}
_DETACHES = {"data", "detach", "detach_", "requires_grad_", "grad"}
_REFUSED = {"__dict__", "__class__", "_parameters", "_buffers", "_modules"}
_ADDED = {"training", "_swapped", "_formula"}
_FREE = (2, 3, 5, 7)  # sizes of the axes that no parameter gives
_ANY = 17  # of the normalized axis of a layer without parameters


class Missing:
    """The value of an attribute that a layer does not have."""


class Run(NamedTuple):
    """What one run computes, for which shape; whether autocast leaves it, and whether a device was asked."""

    form: Form
    shape: tuple[int, ...]
    neutral: bool
    device: bool


class Size(int):
    """A size of the input that may go on into other sizes, but that nothing may depend on."""

    def _refuse(self, *_: object) -> Any:
        raise UnknownFormError("it depends on a size of its input")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = __float__ = _refuse


def _derived(name: str) -> Callable[..., Any]:
    def call(self: Size, *others: Any) -> Any:
        result = getattr(int, name)(self, *others)
        return Size(result) if isinstance(result, int) else result

    return call


for _name in ("add", "sub", "mul", "floordiv", "mod", "neg", "radd", "rsub", "rmul", "rfloordiv"):
    setattr(Size, f"__{_name}__", _derived(f"__{_name}__"))


class _Looks(TorchFunctionMode):
    """Sees what Python code asks of tensors; sizes in `free` axes become `Size`."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.fixed, self.operations, self.device = sizes, 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        if name in _DETACHES:
            raise UnknownFormError("it detaches a tensor from its gradient")
        before = self.operations
        result = func(*args, **(kwargs or {}))
        if name in _SIZES:
            return self._sized(result)
        self.device |= name in ("device", "is_cuda")
        if isinstance(result, Tensor) or self.operations > before or name in _SEEN or _has_tensor(result):
            return result
        raise UnknownFormError(f"it asks for {name} of a tensor")

    def _sized(self, result: Any) -> Any:
        if isinstance(result, int):
            return result if result in self.fixed else Size(result)
        return _Shape(n if n in self.fixed else Size(n) for n in result)


class _Shape(tuple[int, ...]):
    """A shape; code that takes a `torch.Size` gets one of plain numbers."""

    def numel(self) -> int:
        return functools.reduce(operator.mul, self, Size(1))


def _has_tensor(result: Any) -> bool:
    return isinstance(result, (tuple, list)) and any(isinstance(t, Tensor) for t in result)


class _Operations(TorchDispatchMode):
    """Hands each operation to the algebra."""

    def __init__(self, values: Values, looks: _Looks) -> None:
        super().__init__()
        self.values, self.looks, self.neutral = values, looks, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.looks.operations += 1
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if "out" in kwargs:
            raise UnknownFormError(f"it calls torch's {name} with out=")
        out = func(*args, **kwargs)
        if name in _WIDENED and any(isinstance(a, Tensor) and a.dtype in LOW for a in args):
            self.neutral = False
        self.values.interpret(name, args, kwargs, out)
        return out


class Probe:
    """A copy of a layer, on random parameters of its own, that notes what its forward reads.

    `reads` has each attribute's name and value; a parameter's value is None, or its shape.
    """

    def __init__(self, layer: Module, cls: type[Module], training: bool) -> None:
        self.reads: dict[str, Any] = {}
        self.functions: dict[str, Any] = {}
        self.tensors = {**layer._parameters, **layer._buffers}
        plain = {k: v for k, v in vars(layer).items() if k not in {*_Noted.own, *_ADDED}}
        try:
            self.plain = copy.deepcopy(plain) | {"training": training}
        except Exception as error:
            raise UnknownFormError("it has attributes that cannot be copied") from error
        self.cls = cls
        self.noted: Any = types.new_class(cls.__name__, (_Noted, cls))

    def run(self, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Any:
        """The layer's output; nothing that forward sets lasts."""
        layer = self.noted.__new__(self.noted)
        object.__getattribute__(layer, "__dict__").update(self.plain, _probe=self, _tensors=parameters)
        return self.cls.forward(layer, *inputs)

    def note(self, name: str, value: Any) -> None:
        if isinstance(value, Module) or not _is_simple(value):
            raise UnknownFormError(f"it reads its attribute {name}, which may change")
        self.reads[name] = value


class _Noted:
    """The class of a probe's layer."""

    own = frozenset(vars(Module())) - {"training"}

    def __getattribute__(self, name: str) -> Any:
        state = object.__getattribute__(self, "__dict__")
        probe: Probe = state["_probe"]
        if name in _REFUSED or name in _Noted.own:
            raise UnknownFormError(f"it looks at its own {name}")
        if name in state["_tensors"]:
            return state["_tensors"][name]
        if name in state:
            probe.note(name, state[name])
            return state[name]
        found = getattr(probe.cls, name, Missing)
        if name in probe.tensors:  # None
            probe.note(name, None)
            return None
        if found is Missing or not (callable(found) or isinstance(found, property)):
            probe.note(name, found)
        elif not (name.startswith("__") and name.endswith("__")):
            probe.functions[name] = found
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        raise UnknownFormError(f"it sets its attribute {name}")

    def __delattr__(self, name: str) -> None:
        raise UnknownFormError(f"it deletes its attribute {name}")


def _is_simple(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_simple(v) for v in value)
    return value is None or value is Missing or isinstance(value, (bool, int, float, str, torch.dtype))


def shapes(rank: int, sizes: tuple[int, ...] | None) -> Iterator[tuple[int, ...]]:
    """Input shapes of a rank: with these sizes as its last axes, then with a single one as axis 1."""
    sizes = sizes or (_ANY,)
    free = [n for n in (*_FREE, 11, 13) if n not in sizes] if rank < 5 else [2, 3, 1, 2]
    if len(sizes) <= rank:
        yield (*free[: rank - len(sizes)], *sizes)
    if len(sizes) == 1 and rank > 2:
        yield (free[0], *sizes, *free[1 : rank - 1])


def run(
    probe: Probe, shape: tuple[int, ...], dtype: torch.dtype, parameters: Mapping[str, Tensor], gated: bool
) -> Run:
    """What the layer computes for an input of this shape and dtype, and a gate of the same."""
    fixed = {n for n in shape if n not in (1, *_FREE)} | {n for p in parameters.values() for n in p.shape}
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(shape, generator=generator, device="cpu").to(dtype).requires_grad_()
        for _ in range(1 + gated)
    ]
    values, axes = Values(), tuple(range(len(shape)))
    values.leaf(inputs[0], Row(axes, dtype))
    for gate in inputs[1:]:
        values.leaf(gate, Gate(axes, dtype))
    for name, tensor in parameters.items():
        values.leaf(tensor, Parameter(name, tensor.dtype))
    looks = _Looks(tuple(fixed))
    operations = _Operations(values, looks)
    with operations, looks:
        out = probe.run(inputs, parameters)
    if not isinstance(out, Tensor):
        raise UnknownFormError(f"it returns a {type(out).__name__}")
    value = values.find(out)
    if not isinstance(value, Row):
        raise UnknownFormError("its output is no normalized input")
    return Run(form_of(value, dtype, len(shape)), shape, operations.neutral, looks.device)
