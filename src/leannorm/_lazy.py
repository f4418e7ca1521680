"""Import a package's modules when one of their names is first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def later(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package, which imports a name on its first use.

    `places` maps each name to its module, relative to the package, or to "" if the name is a module itself:
    `{"interop": "", "fit": "report.fit"}`. The value is stored in the package, so that the next use is an
    ordinary lookup. Type checkers read the same names under `if TYPE_CHECKING`.
    """

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package]
            )
        value: Any = import_module(f"{package}.{places[name] or name}")
        if places[name]:
            value = getattr(value, name)
        setattr(sys.modules[package], name, value)
        return value

    return find
