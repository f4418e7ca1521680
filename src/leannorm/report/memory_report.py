"""What `profile` measured, as tables and as one HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from leannorm._report import Line, Part, Table, bytes_in_words, column_of_bytes, grouped, milliseconds
from leannorm.report.layers import LayerBytes, Operation
from leannorm.report.render import Fact, PagedReport, Section, bar_figure, line_figure, page
from leannorm.report.timing import RATIOS, is_another_ratio

_MAX_POINTS, _MAX_BARS, _MAX_ROWS = 3000, 24, 16
_SETTINGS = f"Ratios are to plain PyTorch, in the same run. {RATIOS}"


@dataclass
class Measured:
    """One setting: a step's bytes above those at its start, its seconds, and their ratio to plain PyTorch's.

    `gradient_difference`: the largest difference from plain PyTorch's gradients, relative to the largest
    gradient of the same parameter; 0 means that all are equal bit for bit. `layers` is empty if they cannot
    be counted. `reasons`: why less was rebuilt than was asked, as `saved.reasons` says it.
    """

    name: str
    kept: int = 0
    peak: int = 0
    seconds: float = 0.0
    time_ratio: float = 1.0
    gradient_difference: float = 0.0
    timeline: list[tuple[float, int]] = field(default_factory=list)
    forward_end: float = 0.0
    layers: list[LayerBytes] = field(default_factory=list)
    rebuilt: list[Operation] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


@dataclass(repr=False)
class MemoryReport(PagedReport):
    """What `profile` measured; `settings[0]` is plain PyTorch.

    >>> import torch, leannorm
    >>> report = leannorm.profile(torch.nn.Linear(8, 8), torch.randn(4, 8), recompute=[], steps=1)
    >>> report.model, report.settings[0].name
    ('Linear', 'stock')
    """

    model: str
    inputs: list[str]
    device: str
    threads: int
    torch: str
    freed_memory: str
    parameter_bytes: int
    settings: list[Measured]
    dtype: str = "float32"

    def summary(self) -> str:
        return f"{self.model}: {', '.join(one.name for one in self.settings)}"

    def parts(self) -> Iterator[Part]:
        yield setting_table(self)
        yield from note_on_times(self)
        yield kind_table(self)
        yield from (Line(f"{name}: {reason}.") for name, reason in _reasons(self))

    def foot(self) -> dict[str, str]:
        """Where it was measured."""
        return {
            "parameters": self.dtype,
            "device": self.device,
            "threads": str(self.threads),
            "torch": self.torch,
            "memory": self.freed_memory,
        }

    def html(self) -> str:
        """Memory over the step, bars and numbers for each layer; checkboxes show and hide a setting."""
        return _page(self)


def setting_table(report: MemoryReport) -> Table:
    """One row per setting: kept bytes, peak and step time with their ratios to plain PyTorch, and the
    gradients."""
    stock = report.settings[0]
    kept = column_of_bytes([s.kept for s in report.settings])
    peak = column_of_bytes([s.peak for s in report.settings])

    def row(s: Measured, kept: str, peak: str) -> list[str]:
        return [
            s.name,
            f"{kept}  {s.kept / stock.kept:.2f}",
            f"{peak}  {s.peak / stock.peak:.2f}",
            f"{milliseconds(s.seconds)}  {s.time_ratio:.2f}",
            "equal" if s.gradient_difference == 0 else f"off by {s.gradient_difference:.0e}",
        ]

    dtype = "" if report.dtype == "float32" else f"{report.dtype} parameters, "
    title = f"{report.model}, {', '.join(report.inputs)}, {dtype}{report.device}"
    rows = list(map(row, report.settings, kept, peak))
    return Table(["", "kept", "peak", "step time", "gradients"], rows, title=title)


def note_on_times(*reports: MemoryReport) -> Iterator[Line]:
    """What the ratios of times refer to, if the times next to them have others."""
    pairs = ((one, report.settings[0]) for report in reports for one in report.settings)
    if any(is_another_ratio(one.time_ratio, one.seconds, stock.seconds) for one, stock in pairs):
        yield Line(RATIOS)


def layer_table(report: MemoryReport) -> Table:
    """One row per layer: the bytes kept in plain PyTorch, and under each setting the bytes kept and
    rebuilt."""
    counted, names = _counted(report)

    columns, cells = ["layer", "kind"], [list(names), list(names.values())]
    for i, (setting, layers) in enumerate(counted):
        there = [layers.get(name) for name in names]
        columns.append(f"{setting} holds")
        cells.append(column_of_bytes([layer.kept if layer else 0 for layer in there]))
        if i:
            columns.append(f"{setting} rebuilds")
            cells.append(column_of_bytes([layer.rebuilt if layer else 0 for layer in there]))
    return Table(columns, list(zip(*cells, strict=True)), numbers_from=2)


def kind_table(report: MemoryReport) -> Table:
    """One row per layer type, most bytes first: the bytes that all its layers keep under each setting."""
    counted, names = _counted(report)
    sums = {kind: [0] * len(counted) for kind in names.values()}
    for i, (_, layers) in enumerate(counted):
        for layer in layers.values():
            sums[layer.kind][i] += layer.kept
    rows = sorted(sums.items(), key=lambda row: -row[1][0])
    columns = ["kept by", *(setting for setting, _ in counted)]
    cells = [column_of_bytes(column) for column in zip(*(kept for _, kept in rows), strict=True)]
    return Table(columns, list(zip((kind for kind, _ in rows), *cells, strict=True)))


def _counted(report: MemoryReport) -> tuple[list[tuple[str, dict[str, LayerBytes]]], dict[str, str]]:
    """The layers of every setting whose layers were counted; and the type of every layer, in model order."""
    settings = [s for s in report.settings if s.layers]
    names = {layer.name: layer.kind for s in settings for layer in s.layers}
    return [(s.name, {layer.name: layer for layer in s.layers}) for s in settings], names


def operation_table(report: MemoryReport) -> Table:
    """One row per setting and kind of operation: the rebuilt tensors and their bytes."""
    rows = [
        [s.name, _in_words(op.node), str(op.tensors), bytes_in_words(op.nbytes)]
        for s in report.settings
        for op in s.rebuilt
    ]
    return Table(["setting", "made by", "tensors", "bytes"], rows, numbers_from=2)


_WORDS = {"t": "transpose", "clone": "copy", "mm": "matrix product", "addmm": "linear layer"}


def _in_words(node: str) -> str:
    """An operator's name as words.

    >>> _in_words("aten::native_batch_norm"), _in_words("aten::clone"), _in_words("aten::addmm")
    ('batch norm', 'copy', 'linear layer')
    """
    parts = node.rpartition("::")[2].strip("_").split("_")
    words = " ".join(part for part in parts if part not in ("native", "cudnn", "mkldnn"))
    return _WORDS.get(words, words or "no gradient: indices, masks")


def _page(report: MemoryReport) -> str:
    stock = report.settings[0]
    best = min(report.settings, key=lambda s: s.peak)
    quickest = min(report.settings[1:] or [stock], key=lambda s: s.time_ratio)
    facts = [
        Fact(
            bytes_in_words(stock.peak),
            f"peak of a step in plain PyTorch; {bytes_in_words(stock.kept)} kept after forward",
        ),
        Fact(
            f"{best.peak / stock.peak:.2f} ×",
            f"lowest peak, by {best.name}, at {best.time_ratio:.2f} × the time",
        ),
        Fact(
            f"{quickest.time_ratio:.2f} ×",
            f"least time (median of the turns' ratios), by {quickest.name}, "
            f"at {quickest.peak / stock.peak:.2f} × the peak",
        ),
        Fact(bytes_in_words(report.parameter_bytes), "parameters (not in the other numbers)"),
    ]
    sections = [Section("Settings", _SETTINGS, table=setting_table(report))]
    if any(s.timeline for s in report.settings):
        sections.append(timeline_section(report, "Memory over one step"))
    if reasons := _reasons(report):
        rows = [[name, reason] for name, reason in reasons]
        sections.insert(1, Section("Why not less", table=Table(["setting", "reason"], rows, numbers_from=2)))
    counted, names = _counted(report)
    parts = _parts_of(names)
    bars = {setting: _per_part(layers, parts) for setting, layers in counted}
    each = len(parts) == len(names)
    sections += [
        Section(
            f"What each {'layer' if each else 'part'} holds",
            "In the order of the model. Most operations hold their inputs."
            + ("" if each else " Each layer by itself stands below."),
            bar_figure(bars, list(parts), "MB", written=len(parts) <= 12),
        ),
        Section("Layer by layer", table=layer_table(report), folded=len(names) > _MAX_ROWS),
    ]
    if any(s.rebuilt for s in report.settings):
        sections.append(
            Section("What is rebuilt", "Time of the rebuilds alone, measured.", table=operation_table(report))
        )
    title = f"{report.model}: memory of a training step"
    lead = f"Input {', '.join(report.inputs)}. Plain PyTorch, and ways to keep less for the backward pass."
    return page(title, lead, facts, sections, report.foot(), toggles=[s.name for s in report.settings])


def timeline_section(report: MemoryReport, heading: str) -> Section:
    """The bytes over one step, a line for each setting."""
    timelines = {s.name: _thinned(s) for s in report.settings if s.timeline}
    figure = line_figure(timelines, "forward: 0–1, backward: 1–2", "MB", steps=True)
    return Section(heading, "Bytes above the step's start. The forward pass ends at 1.", figure)


def _reasons(report: MemoryReport) -> list[tuple[str, str]]:
    """Setting and reason, each reason once."""
    settings = grouped((reason, one.name) for one in report.settings for reason in one.reasons)
    return [(", ".join(names), reason) for reason, names in settings.items()]


def _parts_of(names: Iterable[str]) -> dict[str, list[str]]:
    """The layers of each part of the model, with names cut so that there are few enough parts.

    >>> _parts_of(["stem", "body.0.conv", "body.0.norm"])
    {'stem': ['stem'], 'body.0.conv': ['body.0.conv'], 'body.0.norm': ['body.0.norm']}
    """
    names = list(names)
    for depth in range(max((name.count(".") for name in names), default=0) + 1, 0, -1):
        parts = grouped((".".join(name.split(".")[:depth]), name) for name in names)
        if len(parts) <= _MAX_BARS or depth == 1:
            return parts
    return {}


def _per_part(layers: Mapping[str, LayerBytes], parts: Mapping[str, Iterable[str]]) -> list[float]:
    return [sum(layers[name].kept for name in names if name in layers) / 1e6 for names in parts.values()]


def _thinned(measured: Measured) -> tuple[list[float], list[float]]:
    """The timeline with the forward pass scaled to 0..1 and the backward pass to 1..2, to compare settings.

    At most `_MAX_POINTS` points: of several neighbours only the highest is kept, so the peak stays.
    """
    timeline, middle = measured.timeline, measured.forward_end
    length = max(timeline[-1][0] - middle, 1e-9)
    stride = -(-len(timeline) // _MAX_POINTS)
    kept = [
        max(timeline[i : i + stride], key=lambda point: point[1]) for i in range(0, len(timeline), stride)
    ]
    places = [t / middle if t <= middle else 1 + (t - middle) / length for t, _ in kept]
    return places, [nbytes / 1e6 for _, nbytes in kept]
