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
from leannorm._errors import InputError, SyncError
from leannorm.report.doctor.checks import CHECKS
from leannorm.report.doctor.findings import DoctorReport, Finding, LayerState
from leannorm.report.doctor.gradients import Gradients, gradients_of
from leannorm.report.doctor.measured import gap_of
from leannorm.report.doctor.meeting import Meeting, meeting_of
from leannorm.report.doctor.observe import first_batches, observe, unwrapped
from leannorm.report.doctor.parallel import partial_gradients, same_model
from leannorm.report.doctor.ranks import Rank, described
from leannorm.report.doctor.subject import SEVERITIES, Check, Found, Subject


def doctor(
    model: Module,
    batches: Tensor | Mapping[str, Any] | Iterable[Any] | None = None,
    *,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    forward: Callable[[Module, Any], Any] | None = None,
    backward: Callable[[Module, Any], Any] | None = None,
    averaged: Module | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> DoctorReport:
    """Look at every norm layer of a model, and say what is wrong, where, by which number, and what mends it.

    Knows leannorm's, torch's, timm's and torchvision's layers and their subclasses, frozen batch norms, and
    layer and RMS norms of other packages by the name of their class. Nothing of the model is changed:
    parameters, buffers, counters, modes, hooks, gradients, random numbers; also where a forward pass raises.

    A model in training mode is taken with the modes that its layers have. One in evaluation mode is run in
    the modes that its `train()` gives, and its layers' modes are not judged. Passes run without gradients, on
    copies of parameters and buffers.

    In a job of several ranks, call it on each of them with the batches that it would train on. They then
    compare settings, modes, the groups of synchronized norms, and the copies of weights and buffers, and on
    one small backward pass the gradients of gamma and beta. A finding names ranks and layer, and is the same
    on all of them. Where ranks say that something is wrong, no pass is run. A rank that raises, or does not
    come, is an error on all of them.

    Args:
        batches: a tensor or a mapping is one batch; of an iterable, such as a DataLoader, the first eight are
            taken. They should be those of training. Of a tuple what the model's forward must have is taken.
        optimizer: one or several; then weight decay on gamma and beta, and what no optimizer has, are found.
        forward: called as `forward(model, batch)`, where a batch is passed otherwise.
        backward: of several ranks, `backward(model, batch)` leaves the gradients that an optimizer takes:
            forward and backward pass, and the sums that a trainer makes after it. Without it gradients are
            compared between ranks with equal batches, those that cut one model's work.
        averaged: a model that follows this one (an `AveragedModel`, a target network, a federated server's).
        group: the ranks with this rank's model, whole or cut; by default all. A pipeline gives its stage's.

    Raises: `SyncError` on every rank where ranks have other models, one raises or dies, or does not come
        within the group's timeout. `InputError` for no batch, and for batches where lazy layers have no parameters yet; and what the
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
    if averaged is not None:
        _checks.module(averaged, "doctor(averaged=)")
    others = {"backward": backward, "averaged": averaged, "group": group, "ranks": True}
    return examine(model, batches, () if optimizer is None else _optimizers(optimizer), forward, **others)


def examine(
    model: Module,
    batches: Any = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    forward: Callable[[Module, Any], Any] | None = None,
    checks: Sequence[Check] = CHECKS,
    *,
    backward: Callable[[Module, Any], Any] | None = None,
    averaged: Module | None = None,
    group: Any = None,
    ranks: bool = False,
) -> DoctorReport:
    """`doctor` by some of the checks; `ranks`: with the other ranks of the group."""
    norms = [norm for norm in norms_of(model) if not _is_lazy(norm.module)]
    subject = Subject(model, norms, optimizers, averaged=averaged)
    meeting = meeting_of(group) if ranks else None
    try:
        taken = _taken(model, batches)
        common = Common(meeting, subject, taken) if meeting else None
        taken = common.batches if common else taken
        if taken and subject.norms:
            subject.batches = len(taken)
            subject.seen, subject.difference = observe(model, subject.norms, taken, forward)
            if common:
                common.compare_gradients(gradients_of(model, subject.norms, taken[0], forward, backward))
        found = common.found if common else []
        found += [(check, one) for check in checks if not check.of_ranks for one in check.find(subject)]
    except BaseException as error:
        said = None if meeting is None or meeting.told else meeting.fail(error)
        if said:
            raise SyncError(said) from error
        raise
    findings = [
        Finding(check.name, *one[:4], one.severity or check.severity, _size(one), check.title, check.unit)
        for check, one in found
    ]
    order = {check.name: place for place, check in enumerate(CHECKS)}
    findings.sort(key=lambda f: (SEVERITIES.index(f.severity), order[f.check], -f.size))
    report = DoctorReport(type(unwrapped(model)).__name__, findings, batches=subject.batches)
    report.layers, report.difference = _layers(subject, findings), _finite(subject.difference)
    return report


class Common:
    """What the ranks of a meeting find together, the same on each; `batches` are those to run."""

    def __init__(self, meeting: Meeting, subject: Subject, batches: list[Any] | None) -> None:
        self._meeting, self._subject = meeting, subject

        def decide(posts: list[Any]) -> Any:
            subject.ranks = [Rank.posted(post) for post in posts]
            same_model(subject.ranks)
            found = self._found(lambda check: check is not partial_gradients)
            runs = not any(CHECKS[place].severity == "error" for place, _ in found)
            return found, min(rank.batches or 0 for rank in subject.ranks) if runs else 0

        found, count = meeting.decide(described(subject, batches), decide)
        self.found = [(CHECKS[place], Found(*one)) for place, one in found]
        self.batches = (batches or [])[:count]

    def compare_gradients(self, gradients: Gradients) -> None:
        def decide(posts: list[Any]) -> Any:
            self._subject.gradients = posts
            return self._found(lambda check: check is partial_gradients)

        found = self._meeting.decide(gradients, decide)
        self.found += [(CHECKS[place], Found(*one)) for place, one in found]

    def _found(self, asked: Callable[[Check], bool]) -> list[Any]:
        of_ranks = [(place, check) for place, check in enumerate(CHECKS) if check.of_ranks and asked(check)]
        return [(place, one) for place, check in of_ranks for one in check.find(self._subject)]


def _taken(model: Module, batches: Any) -> list[Any] | None:
    if batches is None:
        return None
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
    return taken


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
