"""`__torch_function__` of our functions: modes, tensor subclasses and `torch.fx` proxies may override calls.

Tensor subclasses (ExpandedWeight of per-sample gradients, MaskedTensor) know torch's functions and not ours:
where ours replaces one of torch's, the subclass is handed torch's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from leannorm._errors import InputError
from leannorm.functional.jagged import Arguments, NestedTensor

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")

Packed = Callable[[Callable[..., Any], Arguments], Any]
_PACKED: dict[Callable[..., Any], tuple[Packed, tuple[str, ...]]] = {}  # with the names of all arguments
_STANDS_IN_FOR: dict[Callable[..., Any], Callable[..., Any]] = {}
# the call of each function's operator, which exported.py puts here
OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {}


def stands_in_for(torchs: Callable[..., Any]) -> Callable[[Function], Function]:
    """Hand `torchs` to tensor subclasses; it takes all arguments of ours but the keyword-only ones."""

    def register(function: Function) -> Function:
        _STANDS_IN_FOR[function] = torchs
        return function

    return register


def takes_jagged(packed: Packed) -> Callable[[Function], Function]:
    """Of a jagged tensor the function is `packed(function, arguments)`."""

    def register(function: Function) -> Function:
        _PACKED[function] = packed, tuple(inspect.signature(function).parameters)
        return function

    return register


def has_subclass(*values: object) -> bool:
    """Is one a tensor whose class has a `__torch_function__` of its own?"""
    return any(
        isinstance(value, Tensor)
        and type(value).__torch_function__ is not torch._C._disabled_torch_function_impl
        for value in values
        if type(value) is not Tensor
    )


def hand_over(function: Callable[..., Result], given: dict[str, Any]) -> Result:
    """The result of `__torch_function__` for a call; `given` are all its arguments, by name.

    A tensor subclass gets torch's function, unless a keyword-only argument, which torch's lacks, is set. All
    others get `function`, with its arguments in the order of its signature.
    """
    if type(given.get("input")) is NestedTensor:
        return _of_jagged(function, given)
    positional, named = parameters_of(function)
    args, kwargs = _arguments(function, given)
    torchs = _STANDS_IN_FOR.get(function)
    if torchs is not None and has_subclass(*args) and all(map(_same, kwargs.values(), named.values())):
        result: Result = torchs(**dict(zip(positional, args, strict=True)))
    else:
        result = handle_torch_function(function, (*args, *kwargs.values()), *args, **kwargs)
    return result


def _of_jagged(function: Callable[..., Result], given: dict[str, Any]) -> Result:
    if function not in _PACKED:
        raise InputError(
            f"{function.__name__} takes no jagged tensor, got {given['input'].dim()} axes; batch, layer"
            " and RMS norm do, for the others pass each sample by itself"
        )
    packed, names = _PACKED[function]
    result: Result = packed(function, {name: given[name] for name in names})
    return result


def as_operator(function: Callable[..., Result], given: dict[str, Any]) -> Result:
    """A call as that of the function's operator: one node of a graph, with its gradient and its writes."""
    args, kwargs = _arguments(function, given)
    result: Result = OPERATORS[function](*args, **kwargs)
    return result


def _same(value: object, default: object) -> bool:
    """Is an argument, which may be a tensor, its default?"""
    return value is default or (isinstance(value, (float, str)) and value == default)


def _arguments(function: Callable[..., Any], given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    positional, named = parameters_of(function)
    return [given[name] for name in positional], {name: given[name] for name in named}


@cache
def parameters_of(function: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    """The names of the arguments given by position; those given by name, with their defaults."""
    of = inspect.signature(function).parameters.values()
    named = {p.name: p.default for p in of if p.kind is p.KEYWORD_ONLY}
    return [p.name for p in of if p.name not in named], named
