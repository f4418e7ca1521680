"""What `doctor` returns: findings, ranked, and a line for every norm layer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from leannorm._files import write_text


@dataclass(frozen=True)
class Finding:
    """One fault of one layer: `value` is the number by which it is known, `remedy` the line that mends it.

    `severity` is "error" (outputs are wrong), "warning" (they may be) or "note" (it costs something). `size`

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


@dataclass
class LayerState:
    """A norm layer by name, and what the batches showed; None is what they did not show, or what it has not.

    `gap`: the distance between the batches' statistics and the running ones, in standard deviations.
    `mean_gap` is the part of the means, `spread` the ratio of the standard deviations, batches to running.
    """

    name: str
    kind: str
    cls: str
    values: int | None = None
    calls: int | None = None
    gap: float | None = None
    mean_gap: float | None = None
    spread: float | None = None
    dead: int | None = None
    findings: int = 0


@dataclass
class DoctorReport:
    """What `doctor` found, most severe first; true where there is nothing.

    `layers` has every norm layer in the model's order. `batches` is the number of batches that were run.
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

    def __bool__(self) -> bool:
        return not self.findings

    def to_json(self) -> str:
        """Every number, as indented JSON."""
        return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"

    def to_html(self, path: str | Path) -> None:
        """Write one self-contained page: a bar for every layer, and every finding with its remedy.

        Raises: MissingDependencyError without jinja2 and plotly, InputError for a folder that is not there.
        """
        from leannorm.report.doctor.page import html

        write_text(path, html(self))

    def print(self) -> None:
        """The findings on the terminal, one paragraph for each check."""
        from rich.console import Console

        from leannorm.report.doctor.page import text

        console = Console(soft_wrap=True)
        for style, line in text(self):
            console.print(line, style=style, highlight=False, markup=False)
