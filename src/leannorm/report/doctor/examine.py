"""`doctor`: every check of a model's norms, and the findings ranked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

from leannorm import _checks
from leannorm._batch import call_for, unwrapped
from leannorm._catalog import norms_of
from leannorm._errors import InputError
from leannorm._report import grouped
from leannorm.report.doctor.checks import CHECKS
from leannorm.report.doctor.findings import DoctorReport, Finding, LayerState
from leannorm.report.doctor.gradients import Gradients, gradients_of
from leannorm.report.doctor.measured import gap_of, least_gap, what_follows
from leannorm.report.doctor.meeting import Meeting, meeting_of, ranks_in_words
from leannorm.report.doctor.observe import first_batches, observe
from leannorm.report.doctor.parallel import cut_one_model, same_model
from leannorm.report.doctor.ranks import Rank, described, shown_by
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
    """Examine every norm layer of a model, and report what is wrong, where, a number, and what fixes it.

    Knows leannorm's, torch's, timm's and torchvision's layers and their subclasses, frozen batch norms, and
    layer and RMS norms of other packages by the name of their class. Nothing of the model is changed:
    parameters, buffers, counters, modes, hooks, gradients, random numbers; even if a forward pass raises.

    A model in training mode is examined with the modes that its layers have. One in evaluation mode is run in
    the modes that its `train()` sets, and its layers' modes are not judged. Passes run without gradients, on
    copies of parameters and buffers.

    In a job of several ranks, call it on each of them with the batches that it would train on. They then
    compare settings, modes, the groups of synchronized norms, and the copies of weights and buffers, and on
    one small backward pass the gradients of gamma and beta. All have the same findings; a finding that not
    all ranks have names its ranks. If ranks disagree, no pass is run.

    Args:
        batches: a tensor, a mapping, or a tuple of all arguments is one batch; from a list or another
            iterable, such as a DataLoader, the first eight are used, on several ranks as many as all have.
            They should be those of training. If a batch among several is a tuple, the entries that the
            model's forward requires are used.
        optimizer: one or several; needed to find weight decay on gamma and beta, and parameters in no
            optimizer.
        forward: called as `forward(model, batch)`, if a batch is to be passed in another way.
        backward: on several ranks, `backward(model, batch)` leaves the gradients that an optimizer takes:
            forward and backward pass, and the sums that a trainer makes after it. Without it gradients are
            compared between ranks with equal batches, which share one model's work. Do not call it between a
            forward and its backward pass: under DistributedDataParallel it is a step.
        averaged: a model that follows this one (an `AveragedModel`, a target network, a federated server's).
        group: the ranks with this rank's model, whole or sharded; by default all. In a pipeline, pass
            the stage's.

    Raises: `SyncError` on every rank if ranks have other models, or one raises, dies, or does not arrive
        within the group's timeout. `InputError` for no batch, for lazy layers without parameters, and for an
        optimizer's step in the backward pass; and what the model's passes raise.

    >>> import torch, leannorm
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8, momentum=0.9))
    >>> report = leannorm.doctor(model, torch.randn(8, 3, 16, 16))
    >>> [(finding.check, finding.layer, finding.value) for finding in report.findings]
    [('momentum', '1', 0.9), ('removed_bias', '0', 8)]
    >>> report.findings[0].remedy
    'model.get_submodule("1").momentum = 0.1'
    """
    passed = ", forward=forward" if forward is not None else ""
    passed += ", process_group=group" if group is not None else ""
    runs = Runs(forward, backward, passed)
    return examine(model, batches, runs, optimizer=optimizer, averaged=averaged, meeting=meeting_of(group))


class Runs(NamedTuple):
    """How the model is run. `passed`: the same as the arguments of a call, for the remedies that make one."""

    forward: Callable[[Module, Any], Any] | None = None
    backward: Callable[[Module, Any], Any] | None = None
    passed: str = ""


def examine(
    model: Module,
    batches: Any = None,
    runs: Runs = Runs(),  # noqa: B008
    checks: Sequence[Check] = CHECKS,
    *,
    optimizer: Any = None,
    averaged: Module | None = None,
    meeting: Meeting | None = None,
) -> DoctorReport:
    """`doctor` with some of the checks, and with the other ranks of a meeting."""
    with meeting or nullcontext():
        _checks.module(model, "doctor")
        if averaged is not None:
            _checks.module(averaged, "doctor(averaged=)")
        norms = [norm for norm in norms_of(model) if not _is_lazy(norm.module)]
        subject = Subject(model, norms, _optimizers(optimizer), averaged=averaged, passed=runs.passed)
        own = _taken(model, batches)
        common = None if meeting is None else Common(meeting, subject, own, runs.backward is not None)
        taken = own if common is None else common.batches
        gradients, shown = Gradients(), dict[str, list[float]]()
        if taken and subject.norms:
            subject.batches, forward = len(taken), runs.forward or call_for(batches)
            subject.seen, subject.difference = observe(model, subject.norms, taken, forward)
            shown = shown_by(subject) if common else shown
            if common and common.compares:
                gradients = gradients_of(model, subject.norms, taken[0], forward, runs.backward)
        faults = [(check, one) for check in checks if not check.of_ranks for one in check.find(subject)]
        if common:
            faults = common.joined(faults, gradients, shown)
    findings = [
        Finding(check.name, *one[:4], one.severity or check.severity, _size(one), check.title, check.unit)
        for check, one in faults
    ]
    order = {check.name: place for place, check in enumerate(CHECKS)}
    findings.sort(key=lambda f: (SEVERITIES.index(f.severity), order[f.check], -f.size))
    report = DoctorReport(type(unwrapped(model)).__name__, findings, batches=subject.batches)
    report.waiting = 0 if taken else len(own or ())
    report.layers, report.difference = _layers(subject, findings), _finite(subject.difference)
    explained = any(finding.severity != "note" for finding in findings)
    report.follows = "" if explained else what_follows(subject)
    return report


class Common:
    """What the ranks of a meeting find together, the same on each.

    `batches` are those to run, none if something is wrong; `compares`: whether to compare gradients.
    """

    def __init__(self, meeting: Meeting, subject: Subject, batches: list[Any] | None, steps: bool) -> None:
        self._meeting, self._subject = meeting, subject

        def decide(posts: list[Any]) -> Any:
            subject.ranks = ranks = [Rank.posted(post) for post in posts]
            same_model(ranks)
            runs = all((one.severity or check.severity) != "error" for check, one in self._faults())
            return min(rank.batches or 0 for rank in ranks) if runs else 0, steps or cut_one_model(ranks)

        count, self.compares = meeting.decide(described(subject, batches, steps), decide)
        self.batches = (batches or [])[:count]

    def _faults(self) -> list[tuple[Check, Found]]:
        return [(check, one) for check in CHECKS if check.of_ranks for one in check.find(self._subject)]

    def joined(
        self, faults: list[tuple[Check, Found]], gradients: Gradients, shown: dict[str, list[float]]
    ) -> list[tuple[Check, Found]]:
        """What ranks found together and each by itself; if several ranks have one fault, the largest
        finding."""

        def decide(posts: list[Any]) -> Any:
            subject = self._subject
            subject.gradients, subject.shown = [post[1] for post in posts], [post[2] for post in posts]
            every = ((rank, one) for rank, post in zip(subject.ranks, posts, strict=True) for one in post[0])
            own = grouped(((name, one[0]), (Found(*one), rank.number)) for rank, (name, one) in every)
            return [(check.name, one) for check, one in self._faults()] + [
                (name, _of_some(several, len(posts))) for (name, _), several in own.items()
            ]

        checks = {check.name: check for check in CHECKS}
        own = [(check.name, one) for check, one in faults]
        told = self._meeting.decide([own, gradients, shown], decide)
        return [(checks[name], Found(*one)) for name, one in told]


def _of_some(several: list[tuple[Found, int]], ranks: int) -> Found:
    """The largest finding of one fault; says on which ranks it occurs, if not on all."""
    one = max((one for one, _ in several), key=_size)
    if len(several) == ranks:
        return one
    return one._replace(consequence=f"on {ranks_in_words([n for _, n in several])}: {one.consequence}")


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


def _optimizers(optimizers: Any) -> dict[str, torch.optim.Optimizer]:
    """Each optimizer by the expression that names it."""
    if optimizers is None:
        return {}
    if hasattr(optimizers, "param_groups"):
        return {"optimizer": optimizers}
    several = {f"optimizer[{i}]": one for i, one in enumerate(optimizers)}
    for one in several.values():
        if not hasattr(one, "param_groups"):
            raise InputError(
                f"optimizer must be one of torch.optim or several of them, got a {type(one).__name__}"
            )
    return several


def _size(one: Found) -> float:
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
                state.least = least_gap(seen)
                state.gap, state.mean_gap, state.spread = map(_finite, measured)
        states.append(state)
    return states
