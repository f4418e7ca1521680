"""A `DoctorReport` as text and as one HTML page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from leannorm.report.doctor.checks import CHECKS
from leannorm.report.doctor.findings import DoctorReport, Finding, LayerState
from leannorm.report.render import Fact, Section, Table, bar_figure, page

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold"}
_SHOWN = 5


def _grouped(report: DoctorReport) -> list[tuple[str, list[Finding]]]:
    """The findings of each check and severity, under its title, in their order."""
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in report.findings:
        groups[finding.check, finding.severity].append(finding)
    titles = {check.name: check.title for check in CHECKS}
    return [(titles[name], findings) for (name, _), findings in groups.items()]


def _value(finding: Finding) -> str:
    unit = next(check.unit for check in CHECKS if check.name == finding.check)
    value = f"{finding.value:.3g}" if isinstance(finding.value, float) else str(finding.value)
    return f"{value} {unit}".rstrip()


def _verdict(report: DoctorReport) -> str:
    seen = f" and {_counted(report.batches, 'batch', 'batches')}" if report.batches else ""
    examined = f"{_counted(len(report.layers), 'norm layer')}{seen} of {report.model}"
    if not report.layers:
        return f"{report.model} has no norm layer that is known"
    if report:
        return f"{examined}: nothing found"
    return f"{examined}: {_counted(len(report.findings), 'finding')}"


def _counted(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def text(report: DoctorReport) -> Iterator[tuple[str, str]]:
    """Lines with their styles: for each check its first layers, why it matters, what mends it."""
    for title, findings in _grouped(report):
        first = findings[0]
        yield _STYLES[first.severity], f"{first.severity}: {title} ({first.check})"
        for finding in findings[:_SHOWN]:
            yield "", f"  {finding.layer}: {_value(finding)}"
        if len(findings) > _SHOWN:
            yield "", f"  and {len(findings) - _SHOWN} more layers"
        yield "", f"  why:    {first.consequence}"
        yield "", f"  remedy: {first.remedy}"
        yield "", ""
    if report.difference is not None:
        yield "", f"outputs of the two modes differ by {report.difference:.2g} of their size"
    yield ("bold green" if report else "bold"), _verdict(report)


def html(report: DoctorReport) -> str:
    """One self-contained page: a bar for each layer, then the findings of each check."""
    counts = {severity: sum(f.severity == severity for f in report.findings) for severity in _STYLES}
    facts = [Fact(str(count), f"{name}s") for name, count in counts.items()]
    facts.append(Fact(str(len(report.layers)), "norm layers"))
    if report.difference is not None:
        facts.append(Fact(f"{report.difference:.2g}", "of the outputs' size is between the two modes"))
    sections = [_bars(report)] if report.layers else []
    for title, findings in _grouped(report):
        first = findings[0]
        rows = [[finding.layer, _value(finding)] for finding in findings]
        sections.append(
            Section(
                f"{title}: {_counted(len(findings), 'layer')}",
                f"{first.layer}: {first.consequence}. Remedy: {first.remedy}",
                table=Table(["layer", "value"], rows, numbers_from=2),
            )
        )
    if report.layers:
        sections.append(Section("Layer by layer", "", table=_layer_table(report)))
    foot = {"batches": str(report.batches), "checks": ", ".join(check.name for check in CHECKS)}
    return page(f"{report.model}: its norms", _verdict(report) + ".", facts, sections, foot)


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
    figure = bar_figure(bars, [state.name for state in report.layers], unit, written=len(shown) <= 12)
    return Section(heading, lead, figure.update_layout(barmode="overlay"))


def _layer_table(report: DoctorReport) -> Table:
    columns = ["layer", "class", "findings"]
    cells = [[state.name, state.cls, str(state.findings)] for state in report.layers]
    if report.batches:
        columns += ["values", "gap", "of means", "std ratio", "dead"]
        cells = [[*row, *_numbers(state)] for row, state in zip(cells, report.layers, strict=True)]
    return Table(columns, cells, numbers_from=2)


def _numbers(state: LayerState) -> list[str]:
    measured = (state.gap, state.mean_gap, state.spread)
    texts = ["" if value is None else f"{value:.2g}" for value in measured]
    return [
        "" if state.values is None else f"{state.values:,}",
        *texts,
        "" if state.dead is None else str(state.dead),
    ]
