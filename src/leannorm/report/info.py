"""The installed versions, devices and backends, as data."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from leannorm._report import Line, Part, Report, Table
from leannorm._torch import TESTED, is_tested
from leannorm.autograd.nodes import WHY_NOT
from leannorm.ops.backends.library import last_cache
from leannorm.ops.select import backends
from leannorm.report.fitting import version_of, why_torchvision_fails

_OPTIONAL = ("triton", "scikit-learn", "plotly", "jinja2", "torchvision", "timm")


@dataclass(repr=False)
class Installation(Report):
    """Facts by name; every backend, best first, with the reasons why it cannot be used (none: it can).

    `to_mend`: what is wrong with packages installed next to leannorm, each with the line that fixes it.
    """

    facts: dict[str, str]
    backends: dict[str, list[str]]
    to_mend: list[str]

    def summary(self) -> str:
        serving = [name for name, reasons in self.backends.items() if not reasons]
        return f"leannorm {self.facts['leannorm']}, torch {self.facts['torch']}: {', '.join(serving)}"

    def parts(self) -> Iterator[Part]:
        yield Table(["", "here"], list(self.facts.items()), numbers_from=2)
        rows = [[name, "; ".join(reasons) or "available"] for name, reasons in self.backends.items()]
        yield Table(["backend, best first", "here"], rows, numbers_from=2)
        yield from (Line(wrong, "bold yellow") for wrong in self.to_mend)


def installation() -> Installation:
    """The facts about this machine that belong in a bug report.

    >>> installation().backends["reference"]
    []
    """
    from leannorm import __version__

    serving = backends()
    devices = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    facts = {
        "leannorm": __version__,
        "torch": torch.__version__,
        "this torch is": "tested" if is_tested(torch.__version__) else "untested: leannorm check tries it",
        "torch tested": ", ".join(TESTED),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
        "CUDA devices": ", ".join(devices) or "none",
        "last cache": "no kernel asks" if serving["cpu"] else last_cache(),
        "autograd nodes of small calls": "in C++" if WHY_NOT is None else f"in Python: {WHY_NOT}",
    }
    wrong = why_torchvision_fails()
    facts |= {name: version_of(name, "not installed") for name in _OPTIONAL}
    if wrong is not None:
        facts["torchvision"] += ", does not fit this torch"
    return Installation(facts, serving, [] if wrong is None else [wrong])
