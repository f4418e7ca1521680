"""`leannorm doctor --fix`: remedies that are one setting of a layer, set on a copy and told as a diff."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from leannorm.report.doctor.findings import Finding

SAFE = ("momentum", "eps", "removed_bias")
"""Checks whose remedy changes no output of the layer in training beyond what the finding says."""
_SETTING = re.compile(r"\.(momentum|eps|bias) = (None|[\d.e+-]+)(?:$|, before)")
_NORM = re.compile(r"^the norm (\S+) subtracts")


class Change(NamedTuple):
    """A setting of a layer, before and after."""

    layer: str
    name: str
    before: str
    after: str


def mend(model: nn.Module, findings: Iterable[Finding]) -> list[Change]:
    """Set what is safe to set, on this very model, and say what was set.

    A bias that a norm removes stands in its running mean, too, and is taken out of both.

    >>> norm = nn.BatchNorm1d(4, momentum=0.99)
    >>> mend(norm, [Finding("momentum", "(model)", 0.99, "", "model.momentum = 0.01")])
    [Change(layer='(model)', name='momentum', before='0.99', after='0.01')]
    """
    return [change for finding in findings if finding.check in SAFE for change in _mended(model, finding)]


def _mended(model: nn.Module, finding: Finding) -> Iterator[Change]:
    setting = _SETTING.search(finding.remedy)
    layer = _named(model, finding.layer)
    if setting is None or not hasattr(layer, setting[1]):
        return
    name, value = setting[1], None if setting[2] == "None" else float(setting[2])
    before = getattr(layer, name)
    if name == "bias":
        if before is None:  # another norm reads it, too, and it is out
            return
        norm = _NORM.search(finding.consequence)
        mean = getattr(_named(model, norm[1]), "running_mean", None) if norm else None
        if norm and isinstance(mean, torch.Tensor):
            with torch.no_grad():
                mean -= before
            yield Change(norm[1], "running_mean", "m", "m - bias")
    setattr(layer, name, value)
    yield Change(finding.layer, name, _told(before), _told(value))


def _named(model: nn.Module, name: str) -> nn.Module:
    return model if name == "(model)" else model.get_submodule(name)


def _told(value: object) -> str:
    return f"{value.numel()} values" if isinstance(value, torch.Tensor) else str(value)


def diff(changes: Iterable[Change]) -> Iterator[str]:
    """The changes in the form of a unified diff, a layer at a time.

    >>> print(*diff([Change("bn1", "momentum", "0.99", "0.01")]), sep="\\n")
    --- model
    +++ model, mended
    @@ bn1 @@
    -momentum = 0.99
    +momentum = 0.01
    """
    yield from ("--- model", "+++ model, mended")
    for layer, name, before, after in changes:
        yield from (f"@@ {layer} @@", f"-{name} = {before}", f"+{name} = {after}")
