"""Which classes are made at run time, and how do their instances come out of a copy or a pickle?"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

from torch.nn import Module

Derive = Callable[[type[Module]], type[Module]]


def one_a_class(derive: Derive) -> Derive:
    """It makes one class of each, and gives that the next time."""
    return cast(Derive, cache(derive))  # mypy takes classes for unhashable


def reduced(derive: Derive, cls: type[Module], layer: Module) -> tuple[Any, ...]:
    """What `__reduce_ex__` of a layer says whose class is `derive(cls)`: that class is made again."""
    plain: Any = object.__reduce_ex__(layer, 2)
    return _made, (derive, cls), *plain[2:]


def _made(derive: Derive, cls: type[Module]) -> Module:
    return derive(cls).__new__(derive(cls))
