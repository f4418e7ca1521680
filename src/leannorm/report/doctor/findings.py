"""What `doctor` returns: findings, ranked, and every norm layer; as text and as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from leannorm._report import Line, Part, Table, counted, grouped
from leannorm.report.render import Fact, PagedReport, Section, bar_figure, page

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold"}
_SHOWN = 5
_FAULT = "#dc2626"
LEAST_GAP = 0.5
"""Standard deviations between batches' and running statistics from which on a gap is told."""
_NAMED = "get_submodule(name)"


@dataclass(frozen=True)
class Finding:
    """One fault of one layer: `value` is the number by which it is known, `remedy` the line that mends it.

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
    """A norm layer by name, and what the batches showed; None is what they did not show, or what it has not.

    `gap`: the distance between the batches' statistics and the running ones, in standard deviations.
    `mean_gap` is the part of the means, `spread` the ratio of the standard deviations, batches to running;
    `least` the gap from which on it is a finding.
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
    """What `doctor` found, most severe first; true where there is nothing.

    `layers` has every norm layer in the model's order. `batches` is the number of batches that were run,
    `waiting` of those that were given and not run, as ranks have to agree first.
    `stopped` says why batches could not be run, where the command line has gone on without them.
    `difference`: by how much the outputs in training and in evaluation mode differ, with dropout off in both,
    relative to their size; None without batches.

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
        """For each check its first layers, why it matters, what mends it."""
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
            yield Line(f"outputs of the two modes differ by {self.difference:.2g} times their size")
        if self.stopped:
            yield Line(f"without batches: {self.stopped}", "bold red")
        yield Line(self.summary(), "bold green" if self else "bold")

    def html(self) -> str:
        """A bar for every layer, and every finding with its remedy."""
        return _page(self)


def _by_check(report: DoctorReport) -> list[tuple[str, list[Finding]]]:
    """The findings of each check and severity, under its title, in their order."""
    groups = grouped(((one.title or one.check, one.severity), one) for one in report.findings)
    return [(title, findings) for (title, _), findings in groups.items()]


def _by_consequence(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    return grouped((one.consequence, one) for one in findings)


def remedies(findings: Sequence[Finding]) -> list[str]:
    """The lines that mend them all: where layers need the same, a loop over their names.

    >>> lines = [f'model.get_submodule("{name}").eps = 0.1' for name in ("a", "b")]
    >>> print(*remedies([Finding("eps", name, 0.0, "", line) for name, line in zip("ab", lines)]), sep="\\n")
    for name in ["a", "b"]: model.get_submodule(name).eps = 0.1
    """
    alike = grouped(
        (one.remedy.replace(f'get_submodule("{one.layer}")', _NAMED), one.layer) for one in findings
    )
    lines = []
    for remedy, names in alike.items():
        if len(names) > 1 and _NAMED in remedy:
            quoted = ", ".join(f'"{name}"' for name in dict.fromkeys(names))
            lines.append(f"for name in [{quoted}]: {remedy}")
        else:
            lines.append(remedy.replace(_NAMED, f'get_submodule("{names[0]}")'))
    return lines


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
    return page(f"{report.model}: its norms", f"{report.summary()}.", facts, sections, foot)


def _bars(report: DoctorReport) -> Section:
    """A bar for each layer; those with an error or a warning in a colour of their own."""
    if any(state.gap is not None for state in report.layers):
        heading, unit = "Gap between training and evaluation", "standard deviations"
        lead = (
            "How far the batches' statistics are from the running ones, in the order of the model; at 0 the "
            "two modes agree. No bar: there are no running statistics, or they are not finite."
        )
        values = [state.gap for state in report.layers]
    else:
        heading, unit = "Findings per layer", "findings"
        lead = "In the order of the model. With batches the bars are the gap between the two modes."
        values = [float(state.findings) for state in report.layers]
    faulty = {finding.layer for finding in report.findings if finding.severity != "note"}
    shown = list(zip(values, report.layers, strict=True))
    bars = {
        "no error or warning": [None if state.name in faulty else value for value, state in shown],
        "error or warning": [value if state.name in faulty else None for value, state in shown],
    }
    names = [state.name for state in report.layers]
    figure = bar_figure(bars, names, unit, written=len(shown) <= 12)
    figure.update_traces(marker_color=_FAULT, selector={"name": "error or warning"})
    if heading.startswith("Gap"):
        figure.add_scatter(
            name="told from here on",
            x=names,
            y=[state.least for state in report.layers],
            mode="markers",
            marker={"symbol": "line-ew-open", "size": max(6, 300 // len(names)), "color": _FAULT},
        )
    return Section(heading, lead, figure.update_layout(barmode="overlay"))


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
