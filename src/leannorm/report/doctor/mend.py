"""`leannorm doctor --fix`: remedies that are one setting of a layer, set on a copy and printed as a diff."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from leannorm._catalog import MODEL
from leannorm.report.doctor.findings import Finding

SAFE = ("momentum", "eps", "removed_bias")
"""Checks whose remedy changes no output of the layer in training beyond what the finding says."""
_SET = re.compile(r'model(?:\.get_submodule\("(.*?)"\))?\.(\w+) (-?=) (None|[\d.e+-]+|getattr\()')


class Change(NamedTuple):
    """A setting of a layer, before and after."""

    layer: str
    name: str
    before: str
    after: str


def mend(model: nn.Module, findings: Iterable[Finding]) -> list[Change]:
    """Set what is safe to set, on the model itself, and return what was set.

    A bias that a norm removes is also in its running mean, and is taken out of both.

    >>> norm = nn.BatchNorm1d(4, momentum=0.99)
    >>> mend(norm, [Finding("momentum", "(model)", 0.99, "", "model.momentum = 0.01")])
    [Change(layer='(model)', name='momentum', before='0.99', after='0.01')]
    """
    return [change for finding in findings if finding.check in SAFE for change in _mended(model, finding)]


def _mended(model: nn.Module, finding: Finding) -> Iterator[Change]:
    for line in finding.remedy.split("\n"):
        set_to = _SET.match(line)
        if set_to is None:
            continue
        path, name, sign, value = set_to.groups()
        layer, told = model.get_submodule(path or ""), path or MODEL
        before = getattr(layer, name)
        if sign == "-=":
            with torch.no_grad():
                before -= _bias(model.get_submodule(finding.layer))
            yield Change(told, name, "m", "m - bias")
        else:
            after = None if value == "None" else float(value)
            setattr(layer, name, after)
            yield Change(told, name, _told(before), _told(after))


def _bias(source: nn.Module) -> torch.Tensor:
    bias = source.bias
    assert isinstance(bias, torch.Tensor)
    return bias


def _told(value: object) -> str:
    return f"{value.numel()} values" if isinstance(value, torch.Tensor) else str(value)


def diff(changes: Iterable[Change]) -> Iterator[str]:
    """The changes in the form of a unified diff, one layer at a time.

    >>> print(*diff([Change("bn1", "momentum", "0.99", "0.01")]), sep="\\n")
    --- model
    +++ model, fixed
    @@ bn1 @@
    -momentum = 0.99
    +momentum = 0.01
    """
    yield from ("--- model", "+++ model, fixed")
    for layer, name, before, after in changes:
        yield from (f"@@ {layer} @@", f"-{name} = {before}", f"+{name} = {after}")
