"""Does this installation compute correct results? Every check and every recipe of `lean()`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from leannorm._report import Line, Part, Report, Table, as_data, counted
from leannorm.report.numerics import Check
from leannorm.report.recipes import ALIVE, WRONG, RecipeState


@dataclass(repr=False)
class CheckReport(Report):
    """Checks against their budgets, and the state of each recipe; true if nothing fails.

    >>> report = CheckReport([Check("a sum", 0.0, 1.0, "float64")])
    >>> bool(report), report
    (True, CheckReport(passed: 1 check within budget))
    """

    checks: list[Check]
    recipes: list[RecipeState] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.recipes:
            wrong = [one.kind for one in self.recipes if one.state == WRONG]
            name = "lean(), gradients by recipe"
            self.checks.append(Check(name, len(wrong), 0.0, "stock", ", ".join(wrong)))

    def __bool__(self) -> bool:
        return not self._short()

    def _short(self) -> list[str]:
        return [one.name for one in self.checks if not one.passed]

    def summary(self) -> str:
        if short := self._short():
            return f"failed: {len(short)} of {len(self.checks)} checks fell short: {', '.join(short)}"
        return f"passed: {counted(len(self.checks), 'check')} within budget{self._of_recipes()}"

    def _of_recipes(self) -> str:
        alive = sum(one.state == ALIVE for one in self.recipes)
        return f", {alive} of {len(self.recipes)} recipes of lean() alive" if self.recipes else ""

    def data(self) -> dict[str, Any]:
        checks = [{**as_data(one), "passed": one.passed} for one in self.checks]
        recipes = {"recipes": as_data(self.recipes)} if self.recipes else {}
        return {"passed": bool(self), "checks": checks, **recipes}

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
        if self.recipes:
            yield _table_of(self.recipes)
        yield from (Line(f"{one.name}: {one.detail}") for one in self.checks if one.detail)
        yield Line(self.summary(), "bold green" if self else "bold red")


def _table_of(recipes: list[RecipeState]) -> Table:
    """One row for all recipes that work, and one for each that does not, with the reason."""
    named = [(one.kind.removesuffix("Backward0"), one) for one in recipes]
    alive = [name for name, one in named if one.state == ALIVE]
    rows = [[ALIVE, f"{len(alive)} of {len(recipes)}", ", ".join(alive)]]
    rows += [[one.state, "1", f"{name}: {one.why}"] for name, one in named if one.state != ALIVE]
    return Table(["", "recipes of lean()", "on this torch"], rows, numbers_from=3)
