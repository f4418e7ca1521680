"""What `doctor` returns: findings, ranked, and every norm layer; as text and as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from leannorm._report import Line, Part, Table, counted, grouped
from leannorm.report.doctor.remedies import remedies
from leannorm.report.render import Fact, PagedReport, Section, bar_figure, page

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold"}
_SHOWN = 5
_FAULT = "#dc2626"
LEAST_GAP = 0.5
"""Standard deviations between batches' and running statistics from which on a gap is told."""


@dataclass(frozen=True)
class Finding:
    """One fault of one layer: `value` is the number that shows it, `remedy` the lines that fix it.

    A remedy is Python that runs as printed, with `model` and the other names of `doctor`'s arguments. A line
    that begins with "# or" is another remedy; what code cannot do is a sentence in a comment.

    `severity` is "error" (outputs are wrong), "warning" (they may be) or "note" (it costs something). `size`
    ranks it among those of its check, `title` heads them, `unit` says what `value` counts.

    >>> Finding("momentum", "bn1", 0.99, "statistics forget", "bn1.momentum = 0.01").severity
    'warning'
    """

    check: str
    layer: str
    value: float | str
    consequence: str
    remedy: str
    severity: str = "warning"
    size: float = 0.0
    title: str = ""
    unit: str = ""


@dataclass
class LayerState:
    """A norm layer by name, and what the batches showed; None if they did not show it, or the layer lacks it.

    `gap`: the distance between the batches' statistics and the running ones, in standard deviations.
    `mean_gap` is the part of the means, `spread` the ratio of the standard deviations, batches to running;
    `least` the gap from which on it is reported.
    """

    name: str
    kind: str
    cls: str
    values: int | None = None
    calls: int | None = None
    gap: float | None = None
    least: float | None = None
    mean_gap: float | None = None
    spread: float | None = None
    dead: int | None = None
    findings: int = 0


@dataclass(repr=False)
class DoctorReport(PagedReport):
    """What `doctor` found, most severe first; true if nothing was found.

    `layers` has every norm layer in the model's order. `batches` is the number of batches that were run,
    `waiting` of those that were given and not run, as ranks have to agree first. `stopped` says why batches
    could not be run, if the command line has continued without them. `difference`: by how much the outputs in
    training and in evaluation mode differ, with dropout off in both, relative to their size; None without
    batches. `follows` says what that means if no finding explains it.

    >>> import torch, leannorm
    >>> report = leannorm.doctor(torch.nn.BatchNorm1d(4, momentum=0.99))
    >>> [(finding.check, finding.value) for finding in report.findings]
    [('momentum', 0.99)]
    """

    model: str
    findings: list[Finding] = field(default_factory=list)
    layers: list[LayerState] = field(default_factory=list)
    batches: int = 0
    difference: float | None = None
    waiting: int = 0
    stopped: str = ""
    follows: str = ""

    def __bool__(self) -> bool:
        return not self.findings

    def summary(self) -> str:
        seen = f" and {counted(self.batches, 'batch', 'batches')}" if self.batches else ""
        examined = f"{counted(len(self.layers), 'norm layer')}{seen} of {self.model}"
        if not self.layers:
            return f"{self.model} has no norm layer that is known"
        faults = counted(len(self.findings), "finding") if self.findings else "nothing found"
        waits = (
            f"; {counted(self.waiting, 'batch', 'batches')} not run until ranks agree" if self.waiting else ""
        )
        return f"{examined}: {faults}{waits}"

    def parts(self) -> Iterator[Part]:
        """For each check its first layers, why it matters, what fixes it."""
        for title, findings in _by_check(self):
            first, left = findings[0], len(findings)
            yield Line(f"{first.severity}: {title} ({first.check})", _STYLES[first.severity])
            for why, alike in list(_by_consequence(findings).items())[:_SHOWN]:
                yield from (Line(f"  {finding.layer}: {_value(finding)}") for finding in alike[:_SHOWN])
                if len(alike) > _SHOWN:
                    yield Line(f"  and {counted(len(alike) - _SHOWN, 'more layer')}")
                yield Line(f"  why:    {why}")
                left -= len(alike)
            if left:
                yield Line(f"  and {counted(left, 'more layer')}")
            for i, line in enumerate(remedies(findings)):
                yield Line(f"  {'       ' if i else 'remedy:'} {line}")
            yield Line("")
        if self.difference is not None:
            follows = f": {self.follows}" if self.follows else ""
            yield Line(f"outputs of the two modes differ by {self.difference:.2g} times their size{follows}")
        if self.stopped:
            yield Line(f"without batches: {self.stopped}", "bold red")
        yield Line(self.summary(), "bold green" if self else "bold")

    def html(self) -> str:
        """A bar for every layer, and every finding with its remedy."""
        return _page(self)


def _by_check(report: DoctorReport) -> list[tuple[str, list[Finding]]]:
    """The findings of each check and severity, under its title, in order."""
    groups = grouped(((one.title or one.check, one.severity), one) for one in report.findings)
    return [(title, findings) for (title, _), findings in groups.items()]


def _by_consequence(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    return grouped((one.consequence, one) for one in findings)


def _value(finding: Finding) -> str:
    value = f"{finding.value:.3g}" if isinstance(finding.value, float) else str(finding.value)
    return f"{value} {finding.unit}".rstrip()


def _page(report: DoctorReport) -> str:
    counts = {severity: sum(f.severity == severity for f in report.findings) for severity in _STYLES}
    facts = [Fact(str(count), f"{name}s") for name, count in counts.items()]
    facts.append(Fact(str(len(report.layers)), "norm layers"))
    if report.difference is not None:
        facts.append(
            Fact(f"{report.difference:.2g}", "times their size: how far the two modes' outputs are apart")
        )
    sections = [_bars(report)] if report.layers else []
    for title, findings in _by_check(report):
        one_reason = len(_by_consequence(findings)) == 1
        columns = ["layer", "value", "why"][: 2 if one_reason else 3]
        rows = [[finding.layer, _value(finding), finding.consequence][: len(columns)] for finding in findings]
        sections.append(
            Section(
                f"{title}: {counted(len(findings), 'layer')}",
                f"{findings[0].consequence}." if one_reason else "",
                table=Table(columns, rows, numbers_from=3),
                code="\n".join(remedies(findings)),
            )
        )
    if report.layers:
        sections.append(Section("Layer by layer", "", table=_layer_table(report)))
    foot = {"batches": str(report.batches)}
    follows = f" The two modes' outputs differ: {report.follows}." if report.follows else ""
    return page(f"{report.model}: its norms", f"{report.summary()}.{follows}", facts, sections, foot)


def _bars(report: DoctorReport) -> Section:
    """A bar for each layer; bars in the colour of faults are above the threshold."""
    if any(state.gap is not None for state in report.layers):
        heading, unit = "Gap between training and evaluation", "standard deviations"
        lead = (
            "How far the batches' statistics are from the running ones, in the order of the model; at 0 the "
            "two modes agree. No bar: there are no running statistics, or they are not finite."
        )
        values = [state.gap for state in report.layers]
        faulty = [_above(state) for state in report.layers]
        names_of_bars = "below what is reported", "reported"
    else:
        heading, unit = "Findings per layer", "findings"
        lead = "In the order of the model. With batches the bars are the gap between the two modes."
        values = [float(state.findings) for state in report.layers]
        found = {finding.layer for finding in report.findings if finding.severity != "note"}
        faulty = [state.name in found for state in report.layers]
        names_of_bars = "no error or warning", "error or warning"
    shown = list(zip(values, faulty, strict=True))
    bars = {
        name: [value if fault == of_faults else None for value, fault in shown]
        for name, of_faults in zip(names_of_bars, (False, True), strict=True)
    }
    names = [state.name for state in report.layers]
    figure = bar_figure(bars, names, unit, written=len(shown) <= 12)
    figure.update_traces(marker_color=_FAULT, selector={"name": names_of_bars[1]})
    if heading.startswith("Gap"):
        figure.add_scatter(
            name="reported from here on",
            x=names,
            y=[state.least for state in report.layers],
            mode="markers",
            marker={"symbol": "line-ew-open", "size": max(6, 300 // len(names)), "color": _FAULT},
        )
    return Section(heading, lead, figure.update_layout(barmode="overlay"))


def _above(state: LayerState) -> bool:
    """Whether its gap is above the threshold."""
    return state.gap is not None and state.least is not None and state.gap > state.least


def _layer_table(report: DoctorReport) -> Table:
    columns = ["layer", "findings"]
    cells = [[f"{state.name}\n{state.cls}", str(state.findings)] for state in report.layers]
    if report.batches:
        columns += ["values", "gap", "of means", "std ratio", "dead"]
        cells = [[*row, *_numbers(state)] for row, state in zip(cells, report.layers, strict=True)]
    return Table(columns, cells)


def _numbers(state: LayerState) -> list[str]:
    measured = (state.gap, state.mean_gap, state.spread)
    texts = ["" if value is None else f"{value:.2g}" for value in measured]
    return [
        "" if state.values is None else f"{state.values:,}",
        *texts,
        "" if state.dead is None else str(state.dead),
    ]
