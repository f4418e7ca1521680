"""Does this installation compute correct results? Every check, and the operators that `lean()` repeats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from leannorm._report import Line, Part, Report, Table, as_data, counted
from leannorm.report.numerics import Check
from leannorm.report.operators import REPEATED, WRONG, OperatorState


@dataclass(repr=False)
class CheckReport(Report):
    """Checks against their budgets, and the state of each operator; true if nothing fails.

    >>> report = CheckReport([Check("a sum", 0.0, 1.0, "float64")])
    >>> bool(report), report
    (True, CheckReport(passed: 1 check within budget))
    """

    checks: list[Check]
    operators: list[OperatorState] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.operators:
            wrong = [one.name for one in self.operators if one.state == WRONG]
            name = "lean(), gradients by operator"
            self.checks.append(Check(name, len(wrong), 0.0, "stock", ", ".join(wrong)))

    def __bool__(self) -> bool:
        return not self._short()

    def _short(self) -> list[str]:
        return [one.name for one in self.checks if not one.passed]

    def summary(self) -> str:
        if short := self._short():
            return f"failed: {len(short)} of {len(self.checks)} checks fell short: {', '.join(short)}"
        return f"passed: {counted(len(self.checks), 'check')} within budget{self._of_operators()}"

    def _of_operators(self) -> str:
        repeated = sum(one.state == REPEATED for one in self.operators)
        return f", lean() repeats {repeated} of {len(self.operators)} operators" if self.operators else ""

    def data(self) -> dict[str, Any]:
        checks = [{**as_data(one), "passed": one.passed} for one in self.checks]
        operators = {"operators": as_data(self.operators)} if self.operators else {}
        return {"passed": bool(self), "checks": checks, **operators}

    def parts(self) -> Iterator[Part]:
        rows = [
            [
                "ok" if one.passed else "FELL SHORT",
                one.name,
                f"{one.error:.1e}",
                f"{one.budget:.1e}",
                one.against,
            ]
            for one in self.checks
        ]
        yield Table(["", "check", "error", "budget", "against"], rows, numbers_from=2)
        if self.operators:
            yield _table_of(self.operators)
        yield from (Line(f"{one.name}: {one.detail}") for one in self.checks if one.detail)
        yield Line(self.summary(), "bold green" if self else "bold red")


def _table_of(operators: list[OperatorState]) -> Table:
    """One row for all operators that are repeated, and one for each that is not, with the reason."""
    named = [(one.name.removeprefix("aten::"), one) for one in operators]
    repeated = [name for name, one in named if one.state == REPEATED]
    rows = [[REPEATED, f"{len(repeated)} of {len(operators)}", ", ".join(repeated)]]
    rows += [[one.state, "1", f"{name}: {one.why}"] for name, one in named if one.state != REPEATED]
    return Table(["", "operators", "that lean() repeats with this torch"], rows, numbers_from=3)
