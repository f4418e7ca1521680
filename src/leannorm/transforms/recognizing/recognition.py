"""Which layers of unknown classes compute a norm of ours: formulas, found and checked once a process."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module

from leannorm._catalog import name_of
from leannorm.transforms.recognizing.formula import LOW, UnknownFormError, short
from leannorm.transforms.recognizing.formula_call import Formula, compute
from leannorm.transforms.recognizing.probe import Probe, Run, run, shapes

REPLACED = "its forward is replaced on the layer itself; convert before that is done"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_RANKS = (3, 2, 4, 5)
_HINTS = {"rsqrt", "sqrt", "pow", "var", "var_mean", "layer_norm", "rms_norm", "group_norm", "square"}

Tensors = tuple[tuple[str, torch.Size], ...]  # names and shapes

_FORMULAS: WeakKeyDictionary[type[Module], list[Formula]] = WeakKeyDictionary()


def looks_like_norm(module: Module) -> bool:
    """Is it called a norm, and is it not a child of it that is the norm?"""
    name = getattr(module, "original_name", type(module).__name__)
    if "norm" not in name.lower():
        return False
    if not module._modules:
        return True
    return bool(_tensors(module)) and not any(looks_like_norm(m) for m in module.children())


def may_be_norm(module: Module) -> bool:
    """Is it worth a run: called a norm, or with code that takes roots or calls a norm?"""
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
    """Why a layer is not looked into at all."""
    cls = type(module)
    if isinstance(module, ScriptModule):
        return "a ScriptModule; convert the model before torch.jit.script"
    if "forward" in vars(module):
        return REPLACED
    if module._modules:
        return f"{name_of(cls)} is not known, it has layers of its own"
    own = {name for base in cls.__mro__ if base not in (object, Module) for name in vars(base)}
    if type(cls) is not type or own & {
        "__init_subclass__",
        "__reduce__",
        "__reduce_ex__",
        "__getstate__",
        "__setstate__",
        "__call__",
        "__new__",
        "__getattr__",
        "__getattribute__",
        "__setattr__",
    }:
        return f"{name_of(cls)} is not known, it has special methods that a subclass would change"
    return None


def formula_of(layer: Module, cls: type[Module]) -> Formula:
    """The formula of a layer, as one of class `cls`.

    Raises: `UnknownFormError` where it computes no norm of ours.
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
    if own is not None and own != torch.float64 and not any(key[2] == own for key in formula.runs):
        raise UnknownFormError(f"it computes another norm in {short(own)}")
    return formula


def _tensors(layer: Module) -> dict[str, Tensor]:
    own = {**layer._parameters, **layer._buffers}
    return {name: t for name, t in own.items() if t is not None}


@contextmanager
def _by_itself() -> Iterator[None]:
    """Whatever the caller has set, a run is a plain one."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        yield


def _read(layer: Module, cls: type[Module], tensors: Tensors) -> Formula:
    (inputs, needed), probe = _inputs(cls), Probe(layer, cls, layer.training)
    sizes = _sizes(probe, tensors)
    runs = _all_runs(probe, tensors, sizes, inputs, needed)
    if "training" in probe.reads:
        other = Probe(layer, cls, not layer.training)
        if _all_runs(other, tensors, sizes, inputs, needed) != runs:
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
    formula = Formula(inputs, reads, tuple(functions), constants, tensors, sizes, "cpu", runs)
    return _checked(probe, formula)


def _constants(function: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The numbers and words among the globals that a function reads."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (bool, int, float, str)):
            yield function.__globals__, name, value


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
    """The sizes of the axes that the layer normalizes; None where it says none."""
    for _, shape in tensors:
        if math.prod(shape) > 1:
            return tuple(shape)
    axes = probe.plain.get("normalized_shape")
    axes = (axes,) if isinstance(axes, int) else axes
    return tuple(axes) if axes else None


def _all_runs(
    probe: Probe, tensors: Tensors, sizes: tuple[int, ...] | None, inputs: tuple[str, ...], needed: int
) -> dict[tuple[Any, ...], Run]:
    """What the layer computes of its input alone, and with a gate; raises where it is nothing of ours."""
    runs: dict[tuple[Any, ...], Run] = {}
    reason: UnknownFormError | None = None
    for count in range(needed, len(inputs) + 1):
        try:
            runs |= _runs(probe, tensors, sizes, count == 2)
        except UnknownFormError as error:
            reason = reason or error
    if not runs:
        assert reason is not None
        raise reason
    return runs


def _runs(
    probe: Probe, tensors: Tensors, sizes: tuple[int, ...] | None, gated: bool
) -> dict[tuple[Any, ...], Run]:
    """What the layer computes for every dtype and rank; raises where it is nothing of ours in float32."""
    runs: dict[tuple[Any, ...], Run] = {}
    reason: UnknownFormError | None = None
    failed = ""
    ranks = dict[int, tuple[int, ...]]()
    for rank in _RANKS:
        for shape in shapes(rank, sizes):
            try:
                runs[_key(rank, gated, torch.float32, torch.float32, tensors)] = _run(
                    probe, shape, torch.float32, torch.float32, tensors, gated
                )
                ranks[rank] = shape
                break
            except UnknownFormError as error:
                reason = reason or error
            except Exception as error:
                failed = f"it fails on random input ({type(error).__name__})"
    if not ranks:
        raise reason or UnknownFormError(failed)
    for rank, shape in ranks.items():
        for dtype in _DTYPES:
            for own in {dtype, torch.float32} if tensors else {dtype}:
                key = _key(rank, gated, dtype, own, tensors)
                if key not in runs:
                    try:
                        runs[key] = _run(probe, shape, dtype, own, tensors, gated)
                    except (UnknownFormError, Exception):  # the first is no Exception; its own code will run
                        continue
    return runs


def _key(rank: int, gated: bool, dtype: torch.dtype, own: torch.dtype, tensors: Tensors) -> tuple[Any, ...]:
    """The key of a run, as `Formula.compute` looks it up."""
    count = 1 + gated
    return (rank, count, *[dtype] * count, *[own] * len(tensors))


def _run(
    probe: Probe, shape: tuple[int, ...], dtype: torch.dtype, own: torch.dtype, tensors: Tensors, gated: bool
) -> Run:
    """A run, and one without gradients, which must be the same, under autocast, where it may be another."""
    parameters = _random(tensors, [own] * len(tensors))
    seen = run(probe, shape, dtype, parameters, gated)
    with torch.no_grad():
        try:
            with _autocasting():
                same = run(probe, shape, dtype, parameters, gated).form == seen.form
        except (UnknownFormError, RuntimeError):
            same = False
        if not same and run(probe, shape, dtype, parameters, gated).form != seen.form:
            raise UnknownFormError("it computes something else without gradients")
    return seen._replace(neutral=seen.neutral and same)


def _random(tensors: Tensors, dtypes: Iterable[torch.dtype]) -> dict[str, Tensor]:
    """Positive parameters and buffers."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.rand(shape, generator=generator, device="cpu").add_(0.5).to(dtype).requires_grad_()
        for (name, shape), dtype in zip(tensors, dtypes, strict=True)
    }


@contextmanager
def _autocasting() -> Iterator[None]:
    """Autocast on the CPU, and the flag of CUDA's, which code asks for."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            yield
    finally:
        torch.set_autocast_enabled("cuda", before)


def _checked(probe: Probe, formula: Formula) -> Formula:
    """The formula without the runs that leannorm computes differently; raises if that is float32."""
    runs = dict(formula.runs)
    first = next(iter(runs))[0]
    for key, seen in formula.runs.items():
        if key[0] != first and key[2] != torch.float32:
            continue  # its rank and its dtype are checked, each with another
        differs = _difference(probe, formula, key, seen)
        if differs is not None:
            if key[2] == torch.float32:
                raise UnknownFormError(f"its {differs} is not leannorm's on random input")
            runs = {k: r for k, r in runs.items() if k[1:] != key[1:]}
    return formula._replace(runs=runs)


def _difference(probe: Probe, formula: Formula, key: tuple[Any, ...], seen: Run) -> str | None:
    """What differs beyond rounding between the layer's code and ours, on rows of very different sizes."""
    form, rank, count = seen.form, key[0], key[1]
    dtype, generator = key[2], torch.Generator().manual_seed(0)
    parameters = _random(formula.tensors, key[2 + count :])
    used = [parameters[name] for name in (form.weight, form.bias) if name is not None]
    over = form.axes(rank)
    rows = [1 if axis in over else n for axis, n in enumerate(seen.shape)]
    scale = 10 ** torch.rand(rows, generator=generator, device="cpu").mul_(4).sub_(3)
    inputs = [torch.randn(seen.shape, generator=generator, device="cpu") for _ in range(count)]
    inputs[0].mul_(scale)
    inputs = [t.to(dtype).requires_grad_() for t in inputs]
    results: list[list[Tensor]] = []
    for by_ours in (False, True):
        y = compute(form, parameters, *inputs) if by_ours else probe.run(inputs, parameters)
        upstream = torch.randn(seen.shape, generator=generator.manual_seed(1), device="cpu").to(y.dtype)
        results.append([y.detach(), *torch.autograd.grad(y, [*inputs, *used], upstream)])
    for at, (theirs, ours) in enumerate(zip(*results, strict=True)):
        if (theirs.dtype, theirs.shape) != (ours.dtype, ours.shape):
            return "dtype"
        reduced = over if theirs.shape == seen.shape else tuple(range(theirs.dim()))
        largest = theirs.double().abs().amax(reduced, keepdim=True)
        error = (theirs.double() - ours.double()).abs()
        budget = (16 if dtype in LOW else 64) * torch.finfo(dtype).eps  # gradients cancel within a row
        if not bool((error <= budget * largest).all()):
            return "gradient" if at else "output"
    return None
