"""Which classes are made at run time, and how do their instances come out of a copy or a pickle?"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any, cast

from torch.nn import Module

Derive = Callable[[type[Module]], type[Module]]


def one_a_class(derive: Derive) -> Derive:
    """Makes one class of each, and returns that the next time."""
    return cast(Derive, cache(derive))  # mypy thinks that classes are not hashable


def reduced(derive: Derive, cls: type[Module], layer: Module) -> tuple[Any, ...]:
    """The result of `__reduce_ex__` for a layer whose class is `derive(cls)`: the class is derived again."""
    plain: Any = object.__reduce_ex__(layer, 2)
    return _made, (derive, cls), *plain[2:]


def _made(derive: Derive, cls: type[Module]) -> Module:
    return derive(cls).__new__(derive(cls))


def beneath(cls: type) -> type:
    """The layer's class, under those that torch derives from it for parametrizations, FSDP2 and replicas."""
    while _is_cover(cls):
        cls = cls.__bases__[-1]
    return cls


def covered(cls: type, layers: type) -> type:
    """`layers` under the classes that torch has derived from the layer's class in `cls`.

    Torch finds its class by position: it removes its properties from `type(layer)`, and restores one of the
    bases. So a class of ours goes below it, never above it.
    """
    if not _is_cover(cls):
        return layers
    *others, under = cls.__bases__
    below = covered(under, layers)
    first = vars(cls).get("_first", cls)  # torch's own class, which is restored if nothing has changed
    own = {name: value for name, value in vars(cls).items() if name not in ("_first", "__deepcopy__")}
    if others or not hasattr(below, "__deepcopy__"):
        own["__deepcopy__"] = vars(first).get("__deepcopy__", _deepcopied)
    if first.__bases__[-1] is below and own == dict(vars(first)):
        return cast(type, first)
    name = cls.__name__.removesuffix(under.__name__) + below.__name__
    return type(name, (*others, below), {**own, "_first": first})


def _is_cover(cls: type) -> bool:
    """Whether torch has derived it from a layer's class at run time."""
    if cls.__module__ == "torch.nn.utils.parametrize":
        return "__getstate__" in vars(cls)
    before, *others = cls.__bases__ or (object,)
    return len(others) == 1 and before.__module__.startswith("torch.distributed.") and issubclass(cls, Module)


def _deepcopied(layer: Module, memo: dict[int, Any]) -> Module:
    """The way torch copies a parametrized layer, which it does not allow to be pickled."""
    copy = type(layer).__new__(type(layer))
    memo[id(layer)] = copy
    vars(copy).update(deepcopy(vars(layer), memo))
    return copy
