"""Checks of running statistics, without data."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from leannorm.report.doctor.subject import Found, Subject, check, child_of, layer, values_of

HALF = (torch.float16, torch.bfloat16)
LARGEST_MOMENTUM = 0.5


@check("error", "Running statistics are not finite", "not finite")
def nonfinite_statistics(subject: Subject) -> Iterator[Found]:
    """NaN, infinity or a negative variance: no later batch removes the first two."""
    for norm in subject.norms:
        bad = 0
        for part, below in ((norm.mean, float("-inf")), (norm.var, 0.0)):
            values = None if part is None else values_of(part)
            if values is not None:
                bad += int((~torch.isfinite(values) | (values < below)).sum())
        if bad:
            yield Found(
                norm.name,
                bad,
                "every output in evaluation mode is NaN, and torch's layer never forgets it",
                "leannorm.recalibrate(model, batches) measures them again; leannorm.convert(model) gives "
                "layers that such a batch does not move",
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
                "load the last checkpoint without them, and clip gradients: torch.nn.utils.clip_grad_norm_",
            )


@check("error", "Running statistics were never updated", "batches")
def never_updated_statistics(subject: Subject) -> Iterator[Found]:
    """Mean 0 and variance 1, as made, where others have moved or gamma has been trained.

    A new model in training mode has them everywhere, and a new head behind a trained model in all of the
    head: both are as they should be. In evaluation mode a new model is one finding.
    """
    tracked = [norm for norm in subject.norms if norm.tracks]
    consequence = "evaluation mode normalizes by mean 0 and variance 1, which are nobody's statistics"
    remedy = "leannorm.recalibrate(model.train(), batches)"
    if subject.fresh:
        if subject.untouched and not subject.training:
            yield Found("(model)", len(tracked), consequence, remedy)
        return
    moved = [place for place, norm in enumerate(tracked) if norm.name not in subject.untouched]
    begun = {child_of(tracked[place]) for place in moved}
    for place, norm in enumerate(tracked):
        new = (
            place > max(moved, default=-1)
            and child_of(norm) not in begun
            and norm.name not in subject.learned
        )
        if norm.name in subject.untouched and not (new and subject.training):
            yield Found(norm.name, 0, consequence, remedy)


@check("warning", "Running statistics in 16 bits")
def half_precision_statistics(subject: Subject) -> Iterator[Found]:
    """Running statistics in 16 bits, which momentum cannot move by less than half of their last digit."""
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
                "leannorm.convert(model, stats_dtype=torch.float32), before the statistics are learned",
            )


@check("warning", "Momentum forgets at once, or never learns")
def momentum(subject: Subject) -> Iterator[Found]:
    """Momentum above 0.5, which is mostly the decay of another framework; or 0, by which nothing moves."""
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
                f"{layer(norm.name)}.momentum = {round(1 - value, 6) or 0.1:g}",
            )
        elif value == 0:
            yield Found(
                norm.name,
                value,
                "running statistics never move",
                f"{layer(norm.name)}.momentum = 0.1, or leannorm.freeze(model) where that is meant",
                1.0,
            )
