"""The command `leannorm`: its help, its completion and its usage errors do not wait for torch.

`import leannorm` imports torch, which takes seconds. So the command starts with a `Late` package: its modules
can be imported, and its own code runs when one of its names is first used.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


class Late(ModuleType):
    """A package whose code runs when one of its names is first used."""

    def __getattr__(self, name: str) -> Any:
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
        return getattr(self, name)


def main() -> int:
    """Run the command; returns the exit status, as `leannorm.cli.main` does."""
    if "leannorm" not in sys.modules and (spec := find_spec("leannorm")) is not None:
        package = module_from_spec(spec)
        package.__class__ = Late
        sys.modules["leannorm"] = package
    # scripts ask for it, and importing typer takes longer than everything else
    if sys.argv[1:] == ["--version"]:
        from leannorm._version import __version__

        print(f"leannorm {__version__}")
        return 0
    from leannorm.cli import main

    return main()
