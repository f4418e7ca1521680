"""Checks of what batches showed."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite, sqrt

from leannorm._catalog import Norm
from leannorm._report import counted
from leannorm.report.doctor.findings import LEAST_GAP
from leannorm.report.doctor.observe import Seen, obeys
from leannorm.report.doctor.remedy import more_values, remeasured
from leannorm.report.doctor.running import distance
from leannorm.report.doctor.settings import SHARE
from leannorm.report.doctor.subject import Found, Subject, check, running_of

HANDFUL, FEW_SAMPLES = 8, 4
SAMPLING, AMPLIFIED = 3.0, 20.0
LEAST_PADDING = 0.05
LEAST_DIFFERENCE = 0.5


def gap_of(norm: Norm, seen: Seen) -> tuple[float, float, float] | None:
    """The gap of a layer, its part of the means, and the ratio of the standard deviations; root mean squares.

        gap = sqrt(mean over channels of ((m - M) / S)^2 + log(s / S)^2)

    m and s are mean and standard deviation of the batches, M and S the running ones; both s and S include
    eps.
    """
    if norm.kind not in ("batch", "frozen") or seen.mean is None or seen.std is None or seen.pooled < 2:
        return None
    running = running_of(norm)
    if running is None or running[0].shape != seen.mean.shape:
        return None
    return distance(seen.mean, seen.std, *running, norm.eps or 0.0)


def least_gap(seen: Seen) -> float:
    """The gap from which on it is reported: more than this many samples explain."""
    return max(LEAST_GAP, SAMPLING * sqrt(1.5 / max(seen.samples, 1)))


@check("warning", "Few values behind each statistic", "values")
def few_values(subject: Subject) -> Iterator[Found]:
    """Statistics of fewer than a handful of values."""
    for norm, seen in subject.observed():
        if not seen.values or not subject.by_batch(norm):
            continue
        if seen.values < (2 if norm.kind in ("layer", "rms") else HANDFUL):
            error = (2 / max(seen.values - 1, 1)) ** 0.5
            yield Found(
                norm.name,
                seen.values,
                f"a variance of {seen.values} values is off by {error:.0%} or so, and so is every output"
                if seen.values > 1
                else "one value is its own mean: the layer raises, or its output is beta whatever the input",
                more_values(subject, norm, seen, HANDFUL),
                -float(seen.values),
                "error" if seen.values == 1 else None,
            )


@check("warning", "Few samples behind each statistic", "samples")
def few_samples(subject: Subject) -> Iterator[Found]:
    """Batch statistics of two or three samples, however many values those have: values of one sample are
    alike."""
    for norm, seen in subject.observed():
        enough = seen.together >= FEW_SAMPLES or seen.values < HANDFUL  # `few_values` has reported it
        if norm.kind == "batch" and subject.by_batch(norm) and seen.together and not enough:
            yield Found(
                norm.name,
                seen.together,
                "values of one sample are alike: mean and variance change from batch to batch, a sample's "
                "output depends on which others are in its batch, and evaluation computes something else",
                more_values(subject, norm, seen, HANDFUL),
                -float(seen.together),
            )


@check("warning", "Batches are far from the running statistics", "standard deviations", of_data=True)
def train_eval_gap(subject: Subject) -> Iterator[Found]:
    """Batches whose statistics are further from the running ones than this many samples explain."""
    for norm, seen in subject.observed():
        measured = gap_of(norm, seen)
        if measured is None or norm.name in subject.untouched or not isfinite(measured[0]):
            continue
        gap, apart, ratio = measured
        if gap > least_gap(seen):
            differ = f"means differ by {apart:.2g} standard deviations, standard deviations by a factor of "
            trains = subject.by_batch(norm)
            yield Found(
                norm.name,
                gap,
                f"{differ}{ratio:.2g}: evaluation mode computes something else than was trained"
                if trains
                else f"{differ}{ratio:.2g}: it is frozen, and its statistics are of other data",
                remeasured(subject, norm, "on the data that it will see")
                if norm.kind != "frozen"
                else "# prepare the data as that of its statistics, or load a checkpoint of this data",
            )


@check("warning", "Dead channels", "channels", of_data=True)
def dead_channels(subject: Subject) -> Iterator[Found]:
    """Channels whose input is one number everywhere."""
    for norm, seen in subject.observed():
        if seen.mean is None:
            continue
        channels, dead = seen.mean.numel(), seen.dead
        if dead >= max(SHARE * channels, 1):
            yield Found(
                norm.name,
                f"{dead} of {channels}",
                "their normalized value is 0 or rounding, and their output beta: what is before them no "
                "longer learns",
                f"# look at what {norm.name} reads: a ReLU whose inputs are all below 0, weights at 0",
                dead / channels,
            )


@check("warning", "Padding in the statistics", "of the positions", of_data=True)
def padding_in_statistics(subject: Subject) -> Iterator[Found]:
    """Positions that repeat one another up to the end, in runs whose lengths differ between samples."""
    for norm, seen in subject.observed():
        if seen.uneven and seen.padded >= LEAST_PADDING and norm.kind != "frozen":
            yield Found(
                norm.name,
                seen.padded,
                f"{seen.padded:.0%} of its positions look like padding: mean and variance are those of the "
                "padding too, and depend on which samples share a batch",
                ("" if obeys(norm.module) else "leannorm.convert(model)  # torch's own layers take no mask\n")
                + "# in the forward that calls it: mask= or lengths= after its input",
            )


@check("warning", "The two modes give different outputs", "times the output's size", of_data=True)
def modes_differ(subject: Subject) -> Iterator[Found]:
    """Outputs of the two modes that differ by more than half of their size, on one batch, without dropout.

    Deep networks amplify the noise of a batch, so without a gap in some layer it must be far above that.
    """
    known = subject.difference
    if known is None or not isfinite(known) or subject.untouched:
        return
    gap = any(train_eval_gap.find(subject))
    counted = [seen.samples for seen in subject.seen.values() if seen.samples]  # rows have no samples
    samples = min(counted, default=0) / max(subject.batches, 1)
    if known > max(LEAST_DIFFERENCE, 0.0 if gap else AMPLIFIED * (1.5 / max(samples, 1)) ** 0.5):
        yield Found(
            "(model)",
            known,
            "what evaluation measures is not what was trained",
            remeasured(subject),
        )


def what_follows(subject: Subject) -> str:
    """The modes' outputs differ and no check found why: what the reasons may be, and what to do."""
    if subject.difference is None or subject.difference <= LEAST_DIFFERENCE:
        return ""
    if subject.untouched:
        return (
            f"running statistics of {counted(len(subject.untouched), 'layer')} have not moved yet, so train; "
            "what evaluation computes before is not the model"
        )
    together = min((seen.together for _, seen in subject.observed() if seen.together), default=0)
    return (
        "no layer by itself is far from its running statistics, so either many small gaps add up or "
        f"{counted(together, 'sample')} a batch are few, whose noise grows from layer to layer. With larger "
        "batches noise shrinks; what stays is a gap, which leannorm.recalibrate(model, batches) closes"
    )
