"""Which layers of unknown classes compute one of our norms: formulas, found and checked once per process."""

from __future__ import annotations

import dis
import inspect
import math
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module

from leannorm._catalog import name_of
from leannorm._untouched import random_state
from leannorm.transforms.recognizing.fitting import fit
from leannorm.transforms.recognizing.form import Form, UnknownFormError, short
from leannorm.transforms.recognizing.formula_call import Fit, Formula, Key
from leannorm.transforms.recognizing.probe import Probe, shapes

REPLACED = "its forward is replaced on the layer itself; convert before that is done"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_RANKS = (3, 2, 4, 5)
_SPECIAL = "__init_subclass__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __call__ __new__"
_SPECIAL += " __getattr__ __getattribute__ __setattr__"
_HINTS = {"rsqrt", "sqrt", "pow", "var", "var_mean", "layer_norm", "rms_norm", "group_norm", "square"}

Tensors = tuple[tuple[str, torch.Size], ...]  # names and shapes

_FORMULAS: WeakKeyDictionary[type[Module], list[Formula]] = WeakKeyDictionary()


def looks_like_norm(module: Module) -> bool:
    """Whether it is called a norm, and no child of it is the norm."""
    name = getattr(module, "original_name", type(module).__name__)
    if "norm" not in name.lower():
        return False
    if not module._modules:
        return True
    return bool(_tensors(module)) and not any(looks_like_norm(m) for m in module.children())


def may_be_norm(module: Module) -> bool:
    """Whether it is worth a run: it is called a norm, or its code takes roots or calls a norm."""
    cls = type(module)
    if cls.__module__.startswith(("torch.", "leannorm.")):
        return False
    if module._modules:
        return looks_like_norm(module)
    return looks_like_norm(module) or bool(_HINTS & _names_in(cls, "forward", set()))


def _names_in(cls: type[Module], method: str, seen: set[str]) -> set[str]:
    """The names in a method's code, and in that of the methods that it names."""
    seen.add(method)
    functions = [vars(base).get(method) for base in cls.__mro__ if not base.__module__.startswith("torch.")]
    names = {n for f in functions if isinstance(f, types.FunctionType) for n in f.__code__.co_names}
    return names.union(*(_names_in(cls, n, seen) for n in names - seen if n in dir(cls)))


def why_not_by_formula(module: Module) -> str | None:
    """Why a layer is not examined at all."""
    cls = type(module)
    if isinstance(module, ScriptModule):
        return "a ScriptModule; convert the model before torch.jit.script"
    if "forward" in vars(module):
        return REPLACED
    if module._modules:
        return f"{name_of(cls)} is not known, it has layers of its own"
    own = {name for base in cls.__mro__ if base not in (object, Module) for name in vars(base)}
    if type(cls) is not type or own & {*_SPECIAL.split()}:
        return f"{name_of(cls)} is not known, it has special methods that a subclass would change"
    return None


def formula_of(layer: Module, cls: type[Module]) -> Formula:
    """The formula of a layer, as one of class `cls`.

    Raises: `UnknownFormError` if it computes none of our norms.
    """
    tensors = tuple((name, t.shape) for name, t in _tensors(layer).items())
    known = _FORMULAS.setdefault(cls, [])
    for formula in known:
        if formula.tensors == tensors and formula.holds(layer, cls):
            break
    else:
        with _by_itself():
            formula = _read(layer, cls, tensors)
        known.append(formula)
    own = next((t.dtype for t in _tensors(layer).values()), None)
    if own is not None and own != torch.float64 and not any(key[2] == own for key in formula.fits):
        raise UnknownFormError(f"it computes another norm in {short(own)}")
    return formula


def _tensors(layer: Module) -> dict[str, Tensor]:
    own = {**layer._parameters, **layer._buffers}
    return {name: t for name, t in own.items() if t is not None}


@contextmanager
def _by_itself() -> Iterator[None]:
    """Whatever modes the caller has set, a run is a plain one, and leaves the random numbers as they are."""
    with (
        random_state(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _read(layer: Module, cls: type[Module], tensors: Tensors) -> Formula:
    (inputs, needed), probe = _inputs(cls), Probe(layer, cls, layer.training)
    sizes, counts = _sizes(probe, tensors), range(needed, len(inputs) + 1)
    fits = _fits(probe, tensors, sizes, counts)
    if "training" in probe.reads:
        other = Probe(layer, cls, not layer.training)
        if _fits(other, tensors, sizes, counts) != fits:
            raise UnknownFormError("it computes something else in training than in evaluation")
        probe.reads |= other.reads
        probe.functions |= other.functions
        del probe.reads["training"]
    functions = []
    for key, function in {"forward": cls.forward, **probe.functions}.items():
        if not isinstance(function, (types.FunctionType, property)):
            raise UnknownFormError(f"it calls its own {key}, which is no plain method")
        functions.append((key, function, getattr(function, "__code__", None)))
    constants = tuple(c for _, function, code in functions if code for c in _constants(function))
    reads = tuple(probe.reads.items())
    return Formula(inputs, reads, tuple(functions), constants, tensors, sizes, fits)


def _constants(function: Any, seen: tuple[Any, ...] = ()) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The globals that a function reads, and those of the functions among them, except whole modules.

    Raises `UnknownFormError` for an object that may change within, such as a configuration.
    """
    for name in {i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL"}:
        value = function.__globals__.get(name)
        of_torch = str(getattr(value, "__module__", "")).startswith("torch.")
        is_users = isinstance(value, types.FunctionType) and not of_torch
        if is_users and value not in (*seen, function):
            yield from _constants(value, (*seen, function))
        if name in function.__globals__ and not isinstance(value, types.ModuleType):
            if not (isinstance(value, (bool, int, float, str, torch.dtype)) or _is_fixed(value)):
                raise UnknownFormError(f"it reads the global {name}, which may change")
            yield function.__globals__, name, value


def _is_fixed(value: Any) -> bool:
    """Whether it is a function, or a class of torch's or Python's, whose attributes nobody sets."""
    if not isinstance(value, type):
        return callable(value)
    return value.__module__.partition(".")[0] in ("torch", "builtins")


def _inputs(cls: type[Module]) -> tuple[tuple[str, ...], int]:
    """The names of forward's first arguments, the input and perhaps a gate, and how many it needs."""
    _, *parameters = inspect.signature(cls.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = sum(p.default is p.empty and p.kind in kinds for p in parameters)
    if not 1 <= needed <= 2 or any(p.default is p.empty and p.kind not in starred for p in parameters[2:]):
        raise UnknownFormError(f"its forward needs {needed} arguments")
    return tuple(p.name for p in parameters[:2] if p.kind in kinds), needed


def _sizes(probe: Probe, tensors: Tensors) -> tuple[int, ...] | None:
    """The sizes of the axes that the layer normalizes; None if it has none."""
    for _, shape in tensors:
        if math.prod(shape) > 1:
            return tuple(shape)
    axes = probe.plain.get("normalized_shape")
    axes = (axes,) if isinstance(axes, int) else axes
    return tuple(axes) if axes else None


def _fits(
    probe: Probe, tensors: Tensors, sizes: tuple[int, ...] | None, counts: Iterable[int]
) -> dict[Key, Fit]:
    """What the layer computes for every dtype and rank; raises if it is none of our norms in float32.

    `counts`: numbers of inputs, the second of which is a gate.
    """
    fits: dict[Key, Fit] = {}
    reason: UnknownFormError | None = None
    likely: dict[int, Form] = {}  # by the number of inputs
    for count, rank in product(counts, _RANKS):
        for shape, axes in shapes(rank, sizes):
            form = likely.get(count)
            key = _key(rank, count, torch.float32, torch.float32, tensors)
            where = axes if sizes else None
            try:
                fits[key] = fit(probe, shape, where, [torch.float32] * count, torch.float32, tensors, form)
            except UnknownFormError as error:
                reason = reason or error
                continue
            except Exception as error:
                reason = reason or UnknownFormError(f"it fails on random input ({type(error).__name__})")
                continue
            form = likely[count] = fits[key].form
            for dtype in _DTYPES:
                for own in {dtype, torch.float32} if tensors else {dtype}:
                    other = _key(rank, count, dtype, own, tensors)
                    if other != key:
                        with suppress(UnknownFormError, Exception):  # then its own code will run
                            fits[other] = fit(probe, shape, where, [dtype] * count, own, tensors, form)
            break
    if not fits:
        assert reason is not None
        raise reason
    return fits


def _key(rank: int, count: int, dtype: torch.dtype, own: torch.dtype, tensors: Tensors) -> Key:
    """The key of a fit, as `Formula.find` looks it up: rank, number of inputs, the dtypes of all."""
    return (rank, count, *[dtype] * count, *[own] * len(tensors))
