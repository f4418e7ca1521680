"""Names of a package whose modules are imported when somebody asks for one of them (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def later(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package, which imports what a name stands for on its first use.

    `places` has the module of each name, from the package on, and nothing where the name is a module itself:
    `{"interop": "", "fit": "report.fit"}`. What was found stays in the package, so that the next use is an
    ordinary one. Type checkers read the same names below `if TYPE_CHECKING`.
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
