"""A model that follows another: an average, a target network, a federated server's."""

from __future__ import annotations

from collections.abc import Iterator

from leannorm._catalog import norms_of
from leannorm.report.doctor.measured import LEAST_GAP, distance
from leannorm.report.doctor.observe import unwrapped
from leannorm.report.doctor.subject import Found, Subject, check, initial, values_of


@check("error", "The averaged model's statistics do not follow", "standard deviations")
def averaged_buffers(subject: Subject) -> Iterator[Found]:
    """Running statistics that are as made, or of fewer batches and far from the model's, which have moved."""
    if subject.averaged is None:
        return
    core = unwrapped(subject.averaged)
    followers = {norm.name: norm for norm in norms_of(getattr(core, "module", core))}
    names = {id(module): name for name, module in unwrapped(subject.model).named_modules()}
    for norm in subject.norms:
        other = followers.get(names.get(id(norm.module), "") or norm.name)
        if other is None or not norm.tracks or initial(norm) or other.mean is None or other.var is None:
            continue
        means = [values_of(t) for t in (norm.mean, norm.var, other.mean, other.var) if t is not None]
        if len(means) < 4 or any(t is None for t in means) or means[0].shape != means[2].shape:  # type: ignore[union-attr]
            continue
        mean, var, mean_there, var_there = (t.double().cpu() for t in means if t is not None)
        gap = distance(mean, var.sqrt(), mean_there, var_there, norm.eps or 0.0)[0]
        behind = norm.batches is None or other.batches is None or bool(other.batches < norm.batches)
        if initial(other) or (behind and gap > LEAST_GAP):
            yield Found(
                norm.name,
                gap,
                "parameters are averaged or copied, buffers are not: in evaluation mode it normalizes by "
                + ("mean 0 and variance 1" if initial(other) else "the statistics of another model"),
                "copy or average its buffers too, as torch's AveragedModel does, or "
                " leannorm.recalibrate(averaged, batches)",
            )
