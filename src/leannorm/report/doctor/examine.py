"""`doctor`: every check of a model's norms, and the findings ranked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

from leannorm import _checks
from leannorm._catalog import norms_of
from leannorm._errors import InputError
from leannorm.report.doctor.checks import CHECKS
from leannorm.report.doctor.findings import DoctorReport, Finding, LayerState
from leannorm.report.doctor.measured import gap_of
from leannorm.report.doctor.observe import first_batches, observe, unwrapped
from leannorm.report.doctor.subject import SEVERITIES, Check, Subject


def doctor(
    model: Module,
    batches: Tensor | Mapping[str, Any] | Iterable[Any] | None = None,
    *,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    forward: Callable[[Module, Any], Any] | None = None,
) -> DoctorReport:
    """Look at every norm layer of a model, and say what is wrong, where, by which number, and what mends it.

    Knows leannorm's, torch's, timm's and torchvision's layers and their subclasses, frozen batch norms, and
    layer and RMS norms of other packages by the name of their class. Nothing of the model is changed:
    parameters, buffers, counters, modes, hooks, gradients, random numbers; also where a forward pass raises.

    A model in training mode is taken with the modes that its layers have. One in evaluation mode is run in
    the modes that its `train()` gives, and its layers' modes are not judged. Passes run without gradients, on
    copies of parameters and buffers. Over several ranks, call it on each of them with batches of its own.

    Args:
        batches: a tensor or a mapping is one batch; of an iterable, such as a DataLoader, the first eight are
            taken. They should be those of training. Of a tuple what the model's forward must have is taken.
        optimizer: one or several; then weight decay on gamma and beta, and what no optimizer has, are found.
        forward: called as `forward(model, batch)`, where a batch is passed otherwise.

    Raises: `InputError` for no batch, and for batches where lazy layers have no parameters yet; and what the
        model's forward pass raises.

    >>> import torch, leannorm
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8, momentum=0.9))
    >>> report = leannorm.doctor(model, torch.randn(8, 3, 16, 16))
    >>> [(finding.check, finding.layer, finding.value) for finding in report.findings]
    [('momentum', '1', 0.9), ('removed_bias', '0', 8)]
    >>> report.findings[0].remedy
    'model.get_submodule("1").momentum = 0.1'
    """
    _checks.module(model, "doctor")
    return examine(model, batches, () if optimizer is None else _optimizers(optimizer), forward)


def examine(
    model: Module,
    batches: Any = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    forward: Callable[[Module, Any], Any] | None = None,
    checks: Sequence[Check] = CHECKS,
) -> DoctorReport:
    """`doctor` by some of the checks."""
    norms = [norm for norm in norms_of(model) if not _is_lazy(norm.module)]
    subject = Subject(model, norms, optimizers)
    taken: list[Any] = []
    if batches is not None:
        for name, module in model.named_modules():
            if _is_lazy(module):
                raise InputError(
                    f"{name!r} has no parameters yet: run the model once before doctor, or give no batches"
                )
        taken = first_batches(batches, model)
        if not taken:
            raise InputError(
                "batches must have at least one batch, got none; leave them out to check without data"
            )
        subject.batches = len(taken)
        if subject.norms:
            subject.seen, subject.difference = observe(model, subject.norms, taken, forward)
    findings = [
        Finding(check.name, *one[:4], one.severity or check.severity, _size(one), check.title, check.unit)
        for check in checks
        for one in check.find(subject)
    ]
    order = {check.name: place for place, check in enumerate(CHECKS)}
    findings.sort(key=lambda f: (SEVERITIES.index(f.severity), order[f.check], -f.size))
    report = DoctorReport(type(unwrapped(model)).__name__, findings, batches=len(taken))
    report.layers, report.difference = _layers(subject, findings), _finite(subject.difference)
    return report


def _is_lazy(module: Module) -> bool:
    return isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()


def _optimizers(optimizers: Any) -> tuple[torch.optim.Optimizer, ...]:
    several = (optimizers,) if hasattr(optimizers, "param_groups") else tuple(optimizers)
    for one in several:
        if not hasattr(one, "param_groups"):
            raise InputError(
                f"optimizer must be one of torch.optim or several of them, got a {type(one).__name__}"
            )
    return several


def _size(one: Any) -> float:
    if one.size is not None:
        return float(one.size)
    return float(one.value) if isinstance(one.value, (int, float)) else 0.0


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _layers(subject: Subject, findings: list[Finding]) -> list[LayerState]:
    counts = Counter(finding.layer for finding in findings)
    states = []
    for norm in subject.norms:
        state = LayerState(norm.name, norm.kind, type(norm.module).__name__, findings=counts[norm.name])
        seen = subject.seen.get(norm.name)
        if seen is not None:
            state.values, state.calls = seen.values or None, seen.calls
            state.dead = None if seen.mean is None else seen.dead
            measured = gap_of(norm, seen)
            if measured is not None:
                state.gap, state.mean_gap, state.spread = map(_finite, measured)
        states.append(state)
    return states
