"""Checks of eps, of gamma and beta, and of what trains them, without data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from leannorm._catalog import Norm
from leannorm._report import grouped
from leannorm.report.doctor.remedy import EPS, WEIGHT, added_to, attribute, frozen, undecayed
from leannorm.report.doctor.subject import Found, Subject, check, layer, values_of

# an eps within this factor is a neighbour: published models have 1e-5 next to 1e-6
NEIGHBOURS = 10.5
# the share of channels from which on dead ones are reported
SHARE = 0.1


@check("warning", "eps is out of place")
def eps(subject: Subject) -> Iterator[Found]:
    """An eps too small for its dtype, or far from that of most norms of the same kind."""
    kinds = grouped((norm.kind, (norm, norm.eps)) for norm in subject.norms if norm.eps is not None)
    for norms in kinds.values():
        common = Counter(value for _, value in norms).most_common(1)[0][0]
        borne = Counter(value for norm, value in norms if value >= _least_eps(norm)).most_common(1)
        near = sum(_ratio(value, common) <= NEIGHBOURS for _, value in norms)
        for norm, value in norms:
            least = _least_eps(norm)
            if value < least:
                yield Found(
                    norm.name,
                    value,
                    f"a constant channel is divided by about {value**0.5:.0e}, and its gradient overflows or "
                    "is all rounding"
                    if value > 0
                    else "a constant channel is divided by 0",
                    f"{attribute(norm, EPS)} = {_usual(borne[0][0] if borne else 0.0, least):g}",
                    -value,
                )
                continue
            ratio = _ratio(value, common)
            if near >= 2 and 2 * near > len(norms) and ratio > NEIGHBOURS:
                yield Found(
                    norm.name,
                    value,
                    f"{near} of {len(norms)} {norm.kind} norms have {common:g} or near it; weights trained "
                    "with one eps give other outputs with another where variances are small",
                    f"{attribute(norm, EPS)} = {common:g}"
                    f"\n# evaluation changes; where its weights were trained with {value:g}, leave it",
                    ratio,
                )


def _usual(value: float, least: float) -> float:
    """What others have, if a dtype with this least eps allows it."""
    return value if value >= least else 1e-5 if least < 1e-10 else 1e-3


def _ratio(one: float, other: float) -> float:
    return max(one, other) / max(min(one, other), 1e-45)


def _least_eps(norm: Norm) -> float:
    """The least eps that a dtype allows: in float16 1/sqrt(eps) must not overflow, in others it is the
    squared rounding."""
    dtype: torch.dtype = next((t.dtype for t in (norm.weight, norm.var) if t is not None), torch.float32)
    if dtype == torch.float16:
        overflows: float = torch.finfo(dtype).max
        return 1 / overflows**2
    accurate = torch.float64 if dtype == torch.float64 else torch.float32
    rounding: float = torch.finfo(accurate).eps
    return rounding**2


@check("warning", "Half frozen")
def half_frozen(subject: Subject) -> Iterator[Found]:
    """Statistics are updated and gamma and beta are not, or the other way round. For models in training
    mode."""
    if not subject.training:
        return
    for norm in subject.norms:
        parameters = [p for _, p in norm.affine]
        if not norm.tracks or not parameters or not subject.reached(norm):
            continue
        trained = any(p.requires_grad for p in parameters)
        name = layer(norm.name)
        if norm.module.training and not trained:
            yield Found(
                norm.name,
                "statistics move, gamma and beta do not",
                "requires_grad=False does not stop running statistics: the layer drifts from its weights",
                f"{frozen(norm)}  # whatever train() says",
                1.0,
            )
        elif trained and not norm.module.training and "train" not in vars(norm.module):
            yield Found(
                norm.name,
                "gamma and beta move, statistics do not",
                "gradients of gamma and beta adapt to statistics that stay as they were",
                f"{frozen(norm)}\n# or {name}.train()  # where the statistics are meant to move",
                0.5,
            )
        elif _left_out(subject, norm, parameters):
            yield Found(
                norm.name,
                "statistics move, gamma and beta are in no optimizer",
                "the layer drifts away from its weights, which stay",
                f"{added_to(subject, [parent for parent, _, _ in norm.parents], name)}"
                f"\n# or {frozen(norm)}  # where they are to stay",
                1.0,
            )


def _left_out(subject: Subject, norm: Norm, parameters: list[torch.Tensor]) -> bool:
    """Whether its neighbours' parameters are in an optimizer, and its own in none."""
    known = subject.decayed
    if not known or not norm.module.training or any(id(p) in known for p in parameters):
        return False
    return any(id(p) in known for parent, _, _ in norm.parents for p in parent.parameters())


@check("note", "Weight decay on gamma or beta")
def weight_decay(subject: Subject) -> Iterator[Found]:
    """Gamma or beta in a group of an optimizer that decays."""
    for norm in subject.norms:
        decays = [d for _, p in norm.affine if p.requires_grad and (d := subject.decayed.get(id(p), 0.0))]
        if decays and subject.reached(norm):
            yield Found(
                norm.name,
                max(decays),
                "gamma and beta are pulled to 0: channels die, and larger weights in the next layer make up "
                "for the rest; recipes leave norms out",
                undecayed(subject, norm),
            )


@check("warning", "Gamma is 0", "channels")
def gamma_zero(subject: Subject) -> Iterator[Found]:
    """Channels that gamma has switched off in a trained model; a new model may start with gamma at 0."""
    for norm in subject.norms:
        gamma = values_of(norm.gamma)
        if gamma is None:
            continue
        zeros = int((gamma == 0).sum())
        begins = zeros == gamma.numel() and (subject.fresh or norm.name in subject.untouched)
        if zeros < max(SHARE * gamma.numel(), 1) or begins:
            continue
        weight, offset = attribute(norm, WEIGHT), getattr(norm.module, "weight_offset", 0.0)
        yield Found(
            norm.name,
            f"{zeros} of {gamma.numel()}",
            "the output of these channels is beta, whatever the input",
            f"{weight}.data[{weight} == {0.0 - offset:g}] = {0.01 - offset:g}"
            "  # they can learn again; outputs change by a hundredth of a channel",
            zeros / gamma.numel(),
        )
