"""The remedies of several findings as one piece of code: a loop if layers need the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from leannorm._report import grouped

if TYPE_CHECKING:
    from leannorm.report.doctor.findings import Finding

OR = "# or "
_NAME = re.compile(r'get_submodule\("([^"]*)"\)')
_STATEMENT = re.compile(r"\n(?!\s)")  # a line that is not indented begins another one
_COMPOUND = re.compile(r"(?:for|with|if|while|try) |.*\n")
_VARIABLES = "name", "other", "third", "fourth"


def remedies(findings: Sequence[Finding]) -> list[str]:
    """The lines that fix them all: if layers need the same, a loop over their names.

    >>> from leannorm.report.doctor.findings import Finding
    >>> lines = [f'model.get_submodule("{name}").eps = 0.1' for name in ("a", "b")]
    >>> print(*remedies([Finding("eps", name, 0.0, "", line) for name, line in zip("ab", lines)]), sep="\\n")
    for name in ["a", "b"]: model.get_submodule(name).eps = 0.1
    """
    told = [_STATEMENT.split(finding.remedy) for finding in findings]
    lines: list[str] = []
    for place in range(max(map(len, told), default=0)):
        alike = grouped(_skeleton(one[place]) for one in told if place < len(one))
        for statement, names in alike.items():
            lines += _for_all(statement, list(dict.fromkeys(names))).split("\n")
    return lines


def _skeleton(statement: str) -> tuple[str, tuple[str, ...]]:
    """A statement with variables for the names of its layers, and the names."""
    names = tuple(dict.fromkeys(_NAME.findall(statement)))
    if _COMPOUND.match(statement) or len(names) > len(_VARIABLES):
        return statement, ()
    variables = dict(zip(names, _VARIABLES, strict=False))
    return _NAME.sub(lambda found: f"get_submodule({variables[found[1]]})", statement), names


def _for_all(statement: str, names: Sequence[tuple[str, ...]]) -> str:
    if len(names) == 1 or not names[0]:
        quoted = dict(zip(_VARIABLES, names[0], strict=False))
        return re.sub(r"(?<=get_submodule\()\w+", lambda found: f'"{quoted[found[0]]}"', statement)
    first, code = (OR, statement.removeprefix(OR)) if statement.startswith(OR) else ("", statement)
    each = [", ".join(f'"{name}"' for name in several) for several in names]
    listed = ", ".join(each if len(names[0]) == 1 else (f"({quoted})" for quoted in each))
    return f"{first}for {', '.join(_VARIABLES[: len(names[0])])} in [{listed}]: {code}"
