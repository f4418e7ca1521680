"""Checks of running statistics, without data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from leannorm._batch import unwrapped
from leannorm._catalog import Norm, norms_of
from leannorm.report.doctor.findings import LEAST_GAP
from leannorm.report.doctor.remedy import (
    CHECKPOINT,
    frozen,
    momentum_set,
    path_to,
    recalibrated,
    remeasured,
)
from leannorm.report.doctor.subject import Found, Subject, check, initial, running_of, values_of

HALF = (torch.float16, torch.bfloat16)
LARGEST_MOMENTUM = 0.5
_AFTERWARDS = "# layers of leannorm.convert(model) are not moved by a batch that is not finite"


@check("error", "Running statistics are not finite", "not finite")
def nonfinite_statistics(subject: Subject) -> Iterator[Found]:
    """NaN, infinity or a negative variance: no later batch removes the first two."""
    for norm in subject.norms:
        bad = 0
        for part, below in ((norm.mean, float("-inf")), (norm.var, 0.0)):
            values = values_of(part)
            if values is not None:
                bad += int((~torch.isfinite(values) | (values < below)).sum())
        if bad:
            yield Found(
                norm.name,
                bad,
                "every output in evaluation mode is NaN, and torch's layer never forgets it",
                CHECKPOINT if norm.kind == "frozen" else f"{remeasured(subject, norm)}\n{_AFTERWARDS}",
            )


@check("error", "Gamma or beta is not finite", "not finite")
def nonfinite_parameters(subject: Subject) -> Iterator[Found]:
    """NaN or infinity in gamma or beta."""
    for norm in subject.norms:
        parts = [values_of(p) for _, p in norm.affine]
        bad = sum(int((~torch.isfinite(part)).sum()) for part in parts if part is not None)
        if bad:
            yield Found(
                norm.name,
                bad,
                "every output of these channels is NaN, in both modes",
                f"{CHECKPOINT}\n# from there on clip gradients: torch.nn.utils.clip_grad_norm_",
            )


@check("error", "Running statistics were never updated", "batches")
def never_updated_statistics(subject: Subject) -> Iterator[Found]:
    """Mean 0 and variance 1, as initialized, while others have been updated or gamma has been trained.

    A new model in training mode has them everywhere, and a new head on a trained model in all of the head:
    both are fine if they learn. In evaluation mode a new model is one finding.
    """
    tracked = [norm for norm in subject.norms if norm.tracks and subject.reached(norm)]
    consequence = "evaluation mode normalizes by mean 0 and variance 1, which are nobody's statistics"
    if subject.fresh:
        if subject.untouched and not subject.training:
            yield Found("(model)", len(tracked), consequence, remeasured(subject))
        return
    moved = [place for place, norm in enumerate(tracked) if norm.name not in subject.untouched]
    begun = {_child_of(tracked[place]) for place in moved}
    for place, norm in enumerate(tracked):
        new = (
            place > max(moved, default=-1)
            and _child_of(norm) not in begun
            and norm.name not in subject.learned
        )
        learns = subject.training and subject.moves(norm)
        if norm.name in subject.untouched and not (new and learns):
            yield Found(norm.name, 0, consequence, remeasured(subject, norm))


def _child_of(norm: Norm) -> str:
    """The child of the model that contains it; "" for a norm of the model itself."""
    return norm.name.split(".")[0] if "." in norm.name else ""


@check("warning", "Running statistics in 16 bits")
def half_precision_statistics(subject: Subject) -> Iterator[Found]:
    """Running statistics in 16 bits, which momentum cannot change by less than half of their last digit."""
    for norm in subject.norms:
        kept = [t.dtype for t in (norm.mean, norm.var) if t is not None and t.dtype in HALF]
        if kept:
            moves = subject.moves(norm)
            yield Found(
                norm.name,
                str(kept[0]).removeprefix("torch."),
                "small updates are lost: a true mean of 100 is learned as 98 or less"
                if moves
                else "statistics are rounded to two or three digits",
                "leannorm.convert(model, stats_dtype=torch.float32)"
                "\n# what is rounded stays so until leannorm.recalibrate(model, batches) measures it again",
            )


@check("warning", "Momentum forgets at once, or never learns")
def momentum(subject: Subject) -> Iterator[Found]:
    """Momentum above 0.5, which is usually the decay of another framework; or 0, with which nothing is
    updated."""
    for norm in subject.norms:
        value = norm.momentum
        if value is None or not subject.moves(norm):
            continue
        if value > LARGEST_MOMENTUM:
            yield Found(
                norm.name,
                value,
                f"running statistics are {100 * value:.3g} % those of the last batch, and evaluation mode is "
                "as noisy as one batch; other frameworks' momentum weighs the old value, torch's the new one",
                momentum_set(norm, round(1 - value, 6) or 0.1)
                + ("" if norm.name in subject.untouched else f"\n{remeasured(subject, norm)}"),
            )
        elif value == 0:
            yield Found(
                norm.name,
                value,
                "running statistics never move",
                f"{momentum_set(norm, 0.1)}\n# or {frozen(norm)}  # where they are to stay",
                1.0,
            )


@check("error", "The averaged model's statistics do not follow", "standard deviations")
def averaged_buffers(subject: Subject) -> Iterator[Found]:
    """Running statistics as initialized, or of fewer batches and far from the model's, which have been
    updated.

    The second is a warning, because a slow average of buffers is far for a while, too.
    """
    if subject.averaged is None:
        return
    core = unwrapped(subject.averaged)
    core = getattr(core, "module", core)
    followers = {norm.name: norm for norm in norms_of(core)}
    names = {id(module): name for name, module in unwrapped(subject.model).named_modules()}
    for norm in subject.norms:
        other = followers.get(names.get(id(norm.module), "") or norm.name)
        if other is None or not norm.tracks or initial(norm):
            continue
        here, there = running_of(norm), running_of(other)
        if here is None or there is None or here[0].shape != there[0].shape:
            continue
        gap = distance(here[0], here[1].sqrt(), *there, norm.eps or 0.0)[0]
        behind = norm.batches is None or other.batches is None or bool(other.batches < norm.batches)
        made = initial(other)
        if made or (behind and gap > LEAST_GAP):
            whose = "mean 0 and variance 1" if made else "the statistics of another model"
            yield Found(
                norm.name,
                gap,
                f"parameters are averaged or copied, buffers are not: in evaluation mode it has {whose}",
                f"{path_to(core, subject.averaged, 'averaged')}.load_state_dict(dict("
                f"{path_to(unwrapped(subject.model), subject.model, 'model')}.named_buffers()), strict=False)"
                "  # whenever it follows\n"
                f"# or {recalibrated(subject.averaged, 'averaged', subject.passed)}",
                severity=None if made else "warning",
            )


def distance(
    mean: Tensor, std: Tensor, running_mean: Tensor, running_var: Tensor, eps: float
) -> tuple[float, float, float]:
    """The gap between statistics of channels, its part of the means, and the ratio; see `gap_of`."""
    running_std = (running_var + eps).sqrt().clamp_min(1e-30)
    ratio = ((std.square() + eps).sqrt().clamp_min(1e-30) / running_std).log()
    apart = (mean - running_mean) / running_std
    return (
        float((apart.square() + ratio.square()).mean().sqrt()),
        float(apart.square().mean().sqrt()),
        float(ratio.mean().exp()),
    )
