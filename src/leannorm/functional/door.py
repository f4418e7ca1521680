"""Which calls of our functions are not for our kernels, and who answers them.

A call may belong to a mode, a tensor subclass or a `torch.fx` proxy (`__torch_function__`), to the packed
values of a jagged tensor, or to an exported graph, in which it is one operator. `public` states once per
function what each of these gets and what all other calls compute, and declares the operator from the
function's signature. A function's body is its fast path, if it has one, and then one call of `run`.

Tensor subclasses (ExpandedWeight of per-sample gradients, MaskedTensor) know torch's functions and not ours:
if ours replaces one of torch's, the subclass gets torch's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_variadic

from leannorm._errors import InputError
from leannorm.functional.declare import ARGUMENTS, Arguments, Folds, declare
from leannorm.functional.jagged import NestedTensor
from leannorm.functional.valid import refuse_to_export
from leannorm.ops.modes import exporting
from leannorm.ops.running import frozen

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")
Packed = Callable[[Callable[..., Any], Arguments], Any]

# the names of these arguments in an operator's schema, with marks for those that a call in training writes
_IN_SCHEMA = {"input": "x", "dims": "ranks"}
_WRITTEN = {"running_mean": "a", "running_var": "b", "num_batches_tracked": "c"}
_TYPES = {"Tensor | None": "Tensor?", "Sequence[int]": "int[]", "Lengths | None": "Tensor?"}
# arguments that operators got after programs had been written to files, which lack them
_LATER = ("weight_offset", "cast", "mask", "lengths")
# arguments that operators do not have, except for the mask of a row norm
_OURS_ALONE = ("pool", "group_size", "sharing", "fill")


class Door(NamedTuple):
    """A function, its arguments, those by position, those by name with defaults, and the rest of `public`.

    `by_name(*values)` are all of its arguments by name.
    """

    function: Callable[..., Any]
    by_name: Callable[..., dict[str, Any]]
    positional: tuple[str, ...]
    named: dict[str, Any]
    computes: Callable[[Arguments], Any] | None
    stands_in_for: Callable[..., Any] | None
    packed: Packed | None
    by_batch: Callable[[Arguments], Any] | None
    operator: Callable[[Arguments], Any]


_DOORS: dict[str, Door] = {}  # by name: of a dict by functions torch's compiler would guard every key


def public(
    computes: Callable[[Arguments], Any] | None = None,
    stands_in_for: Callable[..., Any] | None = None,
    packed: Packed | None = None,
    by_batch: Callable[[Arguments], Any] | None = None,
    operator: Callable[[Arguments], Any] | None = None,
    dtype: Callable[[Arguments], torch.dtype] | None = None,
    folds: Folds = None,
) -> Callable[[Function], Function]:
    """Register one of our functions, which is returned unchanged.

    `computes(arguments)` is the result of a call that nobody else answers. `stands_in_for` is what tensor
    subclasses get; it takes all arguments but the keyword-only ones. For a jagged tensor the result is
    `packed(function, arguments)`. `by_batch` says whether a call uses a batch's own statistics and moves the
    running ones; `folds` is that of `declare`. In an exported graph a call is `operator(arguments)`, or one
    operator of the function's name: it takes the function's arguments in their order, and returns tensors
    like the input, the first one of the `dtype`.
    """

    def register(function: Function) -> Function:
        if operator is None:
            declares(by_batch, dtype, folds)(function)
        parameters = inspect.signature(function).parameters.values()
        named = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        positional = tuple(p.name for p in parameters if p.name not in named)
        call = operator or (lambda arguments: call_operator(function.__name__, arguments))
        of = function, _by_name((*positional, *named)), positional, named
        _DOORS[function.__name__] = Door(*of, computes, stands_in_for, packed, by_batch, call)
        return function

    return register


def _by_name(names: Sequence[str]) -> Callable[..., dict[str, Any]]:
    """A function of these arguments that gives a dict of them.

    It is compiled as a display with constant keys: `dict(zip(...))` takes longer, and torch's compiler would
    guard every name at every call.
    """
    made: Callable[..., dict[str, Any]] = eval(
        f"lambda {', '.join(names)}: {{{', '.join(f'{name!r}: {name}' for name in names)}}}"
    )
    return made


def declares(
    by_batch: Callable[[Arguments], Any] | None = None,
    dtype: Callable[[Arguments], torch.dtype] | None = None,
    folds: Folds = None,
) -> Callable[[Function], Function]:
    """Declare the operator that has a function's name and arguments; see `public`."""

    def register(function: Function) -> Function:
        signature = inspect.signature(function)
        rows = "normalized_shape" in signature.parameters
        left_out = _OURS_ALONE if rows else (*_OURS_ALONE, "mask", "lengths")
        taken = [p for p in signature.parameters.values() if p.name not in left_out]

        def in_schema(p: inspect.Parameter) -> str:
            kind = _TYPES.get(p.annotation, p.annotation.replace(" | None", "?"))
            if by_batch is not None and p.name in _WRITTEN:
                kind = kind.replace("Tensor", f"Tensor({_WRITTEN[p.name]}!)")
            default = f"={p.default!r}" if p.name in _LATER else ""
            return f"{kind} {_IN_SCHEMA.get(p.name, p.name)}{default}"

        names = [p.name for p in taken]
        both = signature.return_annotation != "Tensor"

        def run(*values: Any) -> Any:
            return function(**dict(zip(names, values, strict=False)))

        def fake(*values: Any) -> Any:
            x: Tensor = values[0]
            of_y = None if dtype is None else dtype(dict(zip(names, values, strict=False)))
            y = torch.empty_like(x, dtype=of_y)
            return (y, torch.empty_like(x)) if both else y

        results = "(Tensor, Tensor)" if both else "Tensor"
        schema = f"{function.__name__}({', '.join(map(in_schema, taken))}) -> {results}"
        declare(schema, run, fake, by_batch, folds)
        return function

    return register


def call_operator(name: str, arguments: Arguments, **more: Any) -> Any:
    """A function's call as an operator's call, whose arguments are among the function's or are `more`."""
    operator, names = getattr(torch.ops.leannorm, name).default, ARGUMENTS[name]
    refuse_to_export({name: value for name, value in arguments.items() if name not in names})
    values = {_IN_SCHEMA.get(name, name): value for name, value in arguments.items()} | more
    return operator(*(values[name] for name in names))


def has_subclass(*values: object) -> bool:
    """Whether one is a tensor whose class has a `__torch_function__` of its own."""
    return any(
        isinstance(value, Tensor)
        and type(value).__torch_function__ is not torch._C._disabled_torch_function_impl
        for value in values
        if type(value) is not Tensor
    )


def run(function: Callable[..., Result], values: tuple[Any, ...]) -> Result:
    """The result of a call. `values` are all of its arguments, in the order of its signature (`locals()`
    would be shorter, but older compilers of torch do not support it)."""
    made = hand_over(function, values)
    if made is None:
        door = _DOORS[function.__name__]
        assert door.computes is not None
        made = door.computes(door.by_name(*values))
    return made


def hand_over(function: Callable[..., Result], values: tuple[Any, ...]) -> Result | None:
    """The result of a call that is not for our kernels, or None if it is.

    `__torch_function__` of a tensor subclass gets torch's function, unless a keyword-only argument, which
    torch's lacks, is set. All others get `function`, with its arguments in the order of its signature.
    """
    door = _DOORS[function.__name__]
    asked, jagged = has_torch_function_variadic(*values), type(values[0]) is NestedTensor
    if not (asked or jagged or (door.by_batch is not None and (frozen() or exporting()))):
        return None
    result, by_name = None, door.by_name(*values)
    args, kwargs = values[: len(door.positional)], {name: by_name[name] for name in door.named}
    by_batch = door.by_batch is not None and door.by_batch(by_name)
    to_onnx = by_batch and exporting() and torch.onnx.is_in_onnx_export()
    if to_onnx:  # it has neither operators of ours nor running statistics: the batch's own are all there is
        refuse_to_export(by_name)
    if by_batch and (frozen() or to_onnx) and any(by_name.get(name) is not None for name in _WRITTEN):
        return function(**by_name | {name: None for name in _WRITTEN if name in by_name})
    if jagged and "input" in by_name:
        if door.packed is None:
            raise InputError(
                f"{function.__name__} takes no jagged tensor, got {by_name['input'].dim()} axes; batch, "
                "layer and RMS norm do, for the others pass each sample by itself"
            )
        result = door.packed(function, by_name)
    elif asked:
        torchs = door.stands_in_for
        plain = all(map(_same, kwargs.values(), door.named.values()))
        if torchs is not None and plain and has_subclass(*args):
            result = torchs(**dict(zip(door.positional, args, strict=True)))
        else:
            result = handle_torch_function(function, (*args, *kwargs.values()), *args, **kwargs)
    elif by_batch and exporting() and not to_onnx:
        result = door.operator(by_name)
    return result


def _same(value: object, default: object) -> bool:
    """Whether an argument, which may be a tensor, has its default value."""
    return value is default or (isinstance(value, (float, str)) and value == default)


class AsOperators(TorchFunctionMode):
    """A mode in which every call of one of our functions becomes a call of its operator."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        door, kwargs = _DOORS.get(getattr(func, "__name__", "")), kwargs or {}
        if door is None or door.function is not func:
            return func(*args, **kwargs)
        return door.operator(dict(zip(door.positional, args, strict=False)) | kwargs)
