"""What `compile_options` did: for each compiled graph what is kept and made again, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from leannorm.planning.goal import Goal
from leannorm.planning.plan import Plan


class Planned(NamedTuple):
    """One joint graph. `place`: torch's number of it, "frame/compilation", as in its logs."""

    place: str
    plan: Plan | None = None
    reason: str | None = None


@dataclass(frozen=True)
class CompileReport:
    """What `options.report()` returns. `graphs`: what was planned for each compiled graph; `reasons`: why
    nothing, or less than asked, was saved. `print(report)` prints both."""

    goal: Goal
    graphs: Sequence[Planned]
    unplanned: str | None = None

    @property
    def reasons(self) -> list[str]:
        """Empty where all is well."""
        if self.unplanned is not None:
            return [self.unplanned]
        if not self.graphs:
            return [
                "no graph was planned in this process: the model has not run yet, needs no gradient, or was"
                " taken from torch's cache, which keeps the plan but not this report"
            ]
        found = [graph.reason for graph in self.graphs if graph.reason is not None]
        found += [
            _out_of_reach(self.goal, graph.plan)
            for graph in self.graphs
            if graph.plan and not graph.plan.reached
        ]
        frames = {graph.place.partition("/")[0] for graph in self.graphs}
        if len(frames) > 1:
            found.append(
                f"the model was compiled in {len(frames)} pieces, each planned by itself, and what one hands"
                " to the next is held: TORCH_LOGS=graph_breaks says where it breaks"
            )
        return list(dict.fromkeys(found))

    @property
    def held(self) -> int:
        """Bytes held for the backward passes of all graphs, as planned."""
        return sum(graph.plan.point.held for graph in self.graphs if graph.plan)

    @property
    def stock_held(self) -> int:
        """Bytes that torch's own choice holds."""
        return sum(graph.plan.stock.held for graph in self.graphs if graph.plan)

    def __str__(self) -> str:
        lines = [_line(graph) for graph in self.graphs]
        return "\n".join([*lines, *(f"reason: {reason}" for reason in self.reasons)])


def _line(graph: Planned) -> str:
    if graph.plan is None:
        return f"graph {graph.place}: torch's own choice"
    plan = graph.plan
    again = plan.stock.held - plan.point.held
    return (
        f"graph {graph.place}: holds {_mib(plan.point.held)} of torch's {_mib(plan.stock.held)}"
        f" ({plan.ratio:.2f}), {_mib(again)} less; planned peak {_mib(plan.point.peak)} of"
        f" {_mib(plan.stock.peak)}"
        f" ({plan.peak_ratio:.2f}), time {1 + plan.overhead:.2f}"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _out_of_reach(goal: Goal, plan: Plan) -> str:
    if goal.peak is not None:
        share = plan.least / max(plan.stock.peak, 1)
        asked = f"{goal.peak:g}" if isinstance(goal.peak, float) else _mib(goal.peak)
        return (
            f"peak={asked} is out of reach: {_mib(plan.least)} ({share:.2f} of stock's) is the least, as the"
            " rest are gradients, what a single operation needs, and what cannot be computed again"
        )
    return (
        f"budget={goal.budget:g} is out of reach: all that can be computed again leaves"
        f" {plan.least / max(plan.stock.held, 1):.2f} of stock's bytes, without a peak above stock's"
    )
