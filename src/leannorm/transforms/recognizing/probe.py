"""Runs a probe of a layer, and collects its results and everything that it read.

The probe is a copy that records each attribute that is read; the input is small and random; one mode sees
each operation, another each read of a tensor's size. What a run cannot show (a branch on values or on a size
of the batch, an operation with a threshold, state that it keeps) is rejected.
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
from torch.utils._pytree import tree_leaves

from leannorm.transforms.recognizing.form import LOW, Clues, UnknownFormError, short

# what autocast on CUDA computes in float32
_WIDENED = {"pow", "rsqrt", "reciprocal", "native_layer_norm", "native_group_norm", "_fused_rms_norm"}
_NORMS = {"native_layer_norm", "native_group_norm", "_fused_rms_norm"}
# operations of an RMS norm
_DEFAULT_EPS = [torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)]
_SUMS = {"add", "sub", "rsub"}
_PRODUCTS = {"mul", "div"}
_ARITHMETIC = "addcmul pow sqrt rsqrt reciprocal mean var var_mean _to_copy"
_VIEWS = "clone detach alias view _unsafe_view unsqueeze squeeze expand slice select _reshape_alias permute"
# operations without a threshold: two that agree on random values agree on all
_SMOOTH = {*_NORMS, *_SUMS, *_PRODUCTS, *_ARITHMETIC.split(), *_VIEWS.split(), "transpose", "t"}
# only for a gate; a product with a sigmoid is a silu
_GATES = {"sigmoid": ("sigmoid", "silu")} | {n: (n,) for n in ("silu", "relu", "gelu", "mish", "hardswish")}
_SIZES = {"shape", "size", "numel", "nelement", "__len__"}
_SEEN = {"dtype", "device", "ndim", "dim", "ndimension", "is_floating_point", "is_cuda", "itemsize"}
_DETACHES = {"data", "detach", "detach_", "requires_grad_", "grad"}
_REFUSED = {"__dict__", "__class__", "_parameters", "_buffers", "_modules"}
_ADDED = {"training", "_swapped", "_formula"}
_FREE = (5, 3, 2, 7)  # sizes of the axes that no parameter determines; the first alone is at least three rows
_ANY = 17  # size of the normalized axis of a layer without parameters


class Missing:
    """The value of an attribute that a layer does not have."""


class Run(NamedTuple):
    """What one run returns and shows, whether autocast on CUDA leaves it alone, and whether its code asked
    for the device."""

    output: Tensor
    clues: Clues
    neutral: bool
    device: bool


class Size(int):
    """A size of the input that other sizes may be computed from, but that nothing may depend on."""

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
    """Sees what Python code reads from tensors; sizes in `free` axes become `Size`."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.fixed, self.operations, self.device = sizes, 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        if name in _DETACHES:
            raise UnknownFormError("it detaches a tensor from its gradient")
        if name == "__getitem__" and any(_cuts(i) for i in tree_leaves(args[1])):
            raise UnknownFormError("it takes a part of a tensor, which may be all of a small one")
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


def _cuts(index: Any) -> bool:
    """Whether it is a slice with a bound."""
    return isinstance(index, slice) and (index.start, index.stop) not in ((None, None), (0, None))


def _has_tensor(result: Any) -> bool:
    return isinstance(result, (tuple, list)) and any(isinstance(t, Tensor) for t in result)


class _Operations(TorchDispatchMode):
    """Rejects every operation that could hide what random values do not show, and collects the clues."""

    def __init__(self, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor], looks: _Looks) -> None:
        super().__init__()
        self.looks, self.neutral = looks, True
        self.names = {id(t): name for name, t in parameters.items()}
        self.dtypes = {torch.float32, torch.float64, *(t.dtype for t in (*inputs, *parameters.values()))}
        self.known: dict[int, Tensor] = {}  # stored with the tensors, whose ids could be reused otherwise
        self.gates: set[int] = set()
        self._know(*inputs, *parameters.values())
        self.gates.update(map(id, inputs[1:]))
        self.clues: dict[str, dict[Any, None]] = {field: {} for field in Clues._fields}

    def _know(self, *tensors: Tensor) -> None:
        self.known.update((id(t), t) for t in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.looks.operations += 1
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        out = func(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(id(t) in self.known for t in tensors):
            self._look(name, tensors, args, kwargs, out)
        return out

    def _look(self, name: str, tensors: list[Tensor], args: Any, kwargs: Any, out: Any) -> None:
        plain, outputs = name.removesuffix("_"), [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if any(id(t) not in self.known for t in tensors):
            raise UnknownFormError("it reads a tensor that is neither its input nor its own")
        of_gate = all(id(t) in self.gates for t in tensors)
        hides = kwargs.get("rounding_mode") or (plain in _GATES and not of_gate) or "out" in kwargs
        if hides or plain not in (_SMOOTH | _GATES.keys()):
            raise UnknownFormError(f"it calls torch's {name}, as no norm of leannorm does")
        factors = [*(args[:2] if plain in _PRODUCTS else ()), kwargs.get("alpha", 1), kwargs.get("value", 1)]
        if any(isinstance(n, (int, float)) and n != 1 for n in factors):
            raise UnknownFormError("it multiplies by a number, which may be too small to be seen")
        if plain == "slice" and outputs[0].shape != tensors[0].shape:
            raise UnknownFormError("it takes a part of a tensor")
        for t in outputs:
            if t.device != tensors[0].device:
                raise UnknownFormError("it copies to another device")
            if t.dtype not in self.dtypes:
                raise UnknownFormError(f"it computes in {short(t.dtype)}")
        self._know(*outputs)
        if of_gate:
            self.gates.update(map(id, outputs))
        if name in _WIDENED and any(t.dtype in LOW for t in tensors):
            self.neutral = False
        self._note("tensors", *(self.names[id(t)] for t in tensors if id(t) in self.names))
        if plain in _SUMS:
            self._note("numbers", *(float(n) for n in args[:2] if isinstance(n, (int, float))))
        elif plain in _NORMS:
            self._note("numbers", *(_DEFAULT_EPS if args[-1] is None else [args[-1]]))
            self._note("groups", *([args[-2]] if plain == "native_group_norm" else []))
        elif plain in _GATES:
            self._note("gates", *(["gelu_tanh"] if kwargs.get("approximate") == "tanh" else _GATES[plain]))
        elif outputs[0].dim() == tensors[0].dim() + 1:
            self._note("parts", outputs[0].shape[-2])

    def _note(self, field: str, *values: Any) -> None:
        self.clues[field].update(dict.fromkeys(values))


class Probe:
    """A copy of a layer, with random parameters of its own, that records what its forward reads.

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
        of_class = getattr(probe.cls, name, Missing)
        if name in probe.tensors:  # None
            probe.note(name, None)
            return None
        if of_class is Missing or not (callable(of_class) or isinstance(of_class, property)):
            probe.note(name, of_class)
        elif not (name.startswith("__") and name.endswith("__")):
            probe.functions[name] = of_class
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


def shapes(rank: int, sizes: tuple[int, ...] | None) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Input shapes of a rank, and the axes of the sizes: the last ones, then axis 1 for a single one."""
    sizes = sizes or (_ANY,)
    free = [n for n in (*_FREE, 11, 13) if n not in sizes] if rank < 5 else [2, 3, 1, 2]
    if len(sizes) <= rank:
        yield (*free[: rank - len(sizes)], *sizes), tuple(range(rank - len(sizes), rank))
    if len(sizes) == 1 and rank > 2:
        yield (free[0], *sizes, *free[1 : rank - 1]), (1,)


def run(probe: Probe, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Run:
    """The layer's result for an input, and perhaps a gate; raises if it does what no norm does."""
    fixed = {n for n in inputs[0].shape if n not in (1, *_FREE)} | {
        n for p in parameters.values() for n in p.shape
    }
    looks = _Looks(tuple(fixed))
    operations = _Operations(inputs, parameters, looks)
    written = [t._version for t in (*inputs, *parameters.values())]
    with operations, looks:
        out = probe.run(inputs, parameters)
    if not isinstance(out, Tensor):
        raise UnknownFormError(f"it returns a {type(out).__name__}")
    if id(out) not in operations.known or id(out) in operations.gates:
        raise UnknownFormError("its output is no normalized input")
    if written != [t._version for t in (*inputs, *parameters.values())]:
        raise UnknownFormError("it writes into its input, or its own tensors")
    if len(inputs) > 1:
        operations._note("gates", *([] if operations.clues["gates"] else ["identity"]))
    clues = Clues(*(tuple(operations.clues[field]) for field in Clues._fields))
    return Run(out, clues, operations.neutral, looks.device)
