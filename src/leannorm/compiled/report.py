"""What `compile_options` did: for each compiled graph what is kept, what is recomputed, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from leannorm._report import Line, Part, Report, Table, bytes_in_words, counted
from leannorm.planning.goal import Goal
from leannorm.planning.plan import Plan
from leannorm.saving.reasons import of_peak, out_of_reach

_COLUMNS = (
    "graph",
    "holds",
    "torch's",
    "ratio",
    "writes again",
    "torch's",
    "planned peak",
    "torch's",
    "ratio",
    "time",
)


class Planned(NamedTuple):
    """One joint graph. `place`: torch's number of it, "frame/compilation", as in its logs. `plan`: None if
    torch's own choice was left; `reason`: why there is no plan, or not the one that was made."""

    place: str
    plan: Plan | None = None
    reason: str | None = None

    def numbers(self) -> dict[str, float | str | None]:
        """The line of a report about this graph."""
        numbers: dict[str, float | str | None] = {"graph": self.place, "reason": self.reason}
        if self.plan is not None:
            stock, point = self.plan.stock, self.plan.point
            numbers |= {"held": point.held, "stock_held": stock.held, "overhead": self.plan.overhead}
            numbers |= {"written_again": point.written, "stock_written_again": stock.written}
            numbers |= {"peak": point.peak, "stock_peak": stock.peak}
        return numbers


@dataclass(frozen=True, repr=False)
class CompileReport(Report):
    """What `options.report()` returns: bytes, peaks and costs as they were planned, before anything ran.

    `graphs`: what was planned for each compiled graph. `reasons`: why nothing, or less than asked, was saved.
    """

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
                "no graph was planned in this process: the model has not run yet, needs no gradient, was"
                " compiled by a backend other than inductor, which ignores these options, was taken from"
                " torch's cache, which keeps the plan but not this report, or is one of torch's own modules,"
                " as nn.Sequential, of which .compile() compiles nothing: torch.compile(model, options=...)"
            ]
        reasons = [graph.reason for graph in self.graphs if graph.reason is not None]
        unreached = (graph.plan for graph in self.graphs if graph.plan and not graph.plan.reached)
        reasons += [out_of_reach(self.goal, plan, compiled=True) for plan in unreached]
        peaks = (of_peak(self.goal, graph.plan) for graph in self.graphs if graph.plan)
        reasons += [reason for reason in peaks if reason is not None]
        frames = {graph.place.partition("/")[0] for graph in self.graphs}
        if len(frames) > 1:
            reasons.append(
                f"{len(frames)} pieces were compiled, each planned by itself; if they are of one model, what"
                " one hands to the next is kept: TORCH_LOGS=graph_breaks says where it breaks"
            )
        return list(dict.fromkeys(reasons))

    @property
    def held(self) -> int:
        """Bytes kept for the backward passes of all graphs, as planned."""
        return sum(graph.plan.point.held for graph in self.graphs if graph.plan)

    @property
    def stock_held(self) -> int:
        """Bytes that torch's own choice keeps."""
        return sum(graph.plan.stock.held for graph in self.graphs if graph.plan)

    def parts(self) -> Iterator[Part]:
        """The graphs, then the reasons."""
        if self.graphs:
            yield Table(_COLUMNS, [_row(graph) for graph in self.graphs])
        for reason in self.reasons:
            yield Line(f"reason: {reason}")

    def summary(self) -> str:
        """Kept bytes, as a fraction of torch's."""
        held = f"{bytes_in_words(self.held)} of torch's {bytes_in_words(self.stock_held)} held"
        return f"{counted(len(self.graphs), 'graph')}, {held}, {counted(len(self.reasons), 'reason')}"

    def data(self) -> dict[str, object]:
        """What `to_json` writes."""
        return {"graphs": [graph.numbers() for graph in self.graphs], "reasons": self.reasons}


def _row(graph: Planned) -> list[str]:
    if graph.plan is None:
        return [graph.place, *["-"] * (len(_COLUMNS) - 1)]
    plan = graph.plan
    held = [bytes_in_words(plan.point.held), bytes_in_words(plan.stock.held), f"{plan.ratio:.2f}"]
    peak = [bytes_in_words(plan.point.peak), bytes_in_words(plan.stock.peak), f"{plan.peak_ratio:.2f}"]
    again = [bytes_in_words(plan.point.written), bytes_in_words(plan.stock.written)]
    return [graph.place, *held, *again, *peak, f"{1 + plan.overhead:.2f}"]
