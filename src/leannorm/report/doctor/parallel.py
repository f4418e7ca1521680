"""Checks over ranks: each runs once, on the first rank, on what all of them posted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from leannorm._catalog import Norm
from leannorm._errors import SyncError
from leannorm._report import grouped
from leannorm.report.doctor.meeting import ranks_in_words
from leannorm.report.doctor.ranks import Held, Rank
from leannorm.report.doctor.remedy import EPS, attribute, momentum_set
from leannorm.report.doctor.subject import Found, Subject, check, layer

SAME = 0.01  # of a gradient's size: the difference of copies that a rank computed in another order
TWIN = 1e-4  # of the size of statistics: the difference between two ranks for one batch
ROUNDING = 1e-5  # of the layer's largest gradient: anything smaller is a sum of which only rounding is left


def same_model(ranks: Sequence[Rank]) -> None:
    """Raises: `SyncError` if ranks have other layers, or some have batches or a step and others none."""
    first = ranks[0]
    for other in ranks[1:]:
        pairs = zip(first.layers, other.layers, strict=False)
        told = [(f"{a[0]!r} ({a[1]})", f"{b[0]!r} ({b[1]})", _ONE) for a, b in pairs]
        told += [(_counts(first), _counts(other), _ONE)]
        told += [(_some(first.batches is not None), _some(other.batches is not None), _ALL.format("batches"))]
        told += [(_some(first.steps), _some(other.steps), _ALL.format("backward"))]
        for mine, theirs, rule in told:
            if mine != theirs:
                raise SyncError(f"{rule} (rank {first.number} has {mine}, rank {other.number} has {theirs})")


_ONE = (
    "doctor compares ranks that have one model; pass group= of those, such as the ranks of a pipeline's stage"
)
_ALL = "{} must be given on all ranks or on none"


def _counts(rank: Rank) -> str:
    return f"{len(rank.layers)} norms in {len(rank.modes)} modules"


def _some(passed: bool) -> str:
    return "some" if passed else "none"


def cut_one_model(ranks: Sequence[Rank]) -> bool:
    """Whether two of them have the same batch, so that they should have the same gradients.

    Not if DistributedDataParallel sums over both.
    """
    known = {(rank.batch, _summing(rank)) for rank in ranks if rank.batch is not None}
    return len({batch for batch, _ in known}) < len(known)


def _summing(rank: Rank) -> tuple[int, ...]:
    """The ranks over which a wrapper sums gradients that were measured without it."""
    return (rank.number,) if rank.steps or rank.wrapped is None else tuple(rank.wrapped)


@check("error", "Ranks have other settings", of_ranks=True)
def rank_settings(subject: Subject) -> Iterator[Found]:
    """Class, eps, momentum, groups, frozen parameters or modes that differ from the other ranks'."""
    for norm in subject.norms:
        told = [(rank.number, rank.settings[norm.name].split(", ")) for rank in subject.ranks]
        common = set(told[0][1]).intersection(*(one for _, one in told))
        sides = _sides([(number, ", ".join(w for w in one if w not in common)) for number, one in told])
        if sides:
            yield Found(
                norm.name,
                sides,
                "one layer computes two things: ranks send gradients of different functions, and to which of "
                "them a checkpoint's weights belong depends on the rank that wrote it",
                _same_settings(norm, subject.ranks),
                1.0,
            )
    above: tuple[str, ...] = ()
    norms = {norm.path for norm in subject.norms}
    for place, (name, _) in enumerate(subject.model.named_modules()):
        words = {"t": "training", "f": "evaluation"}
        sides = _sides([(rank.number, words[rank.modes[place]]) for rank in subject.ranks])
        if sides and not (above and name.startswith(above)):
            above = (*above, f"{name}." if name else "")
            yield Found(
                name or "(model)",
                f"mode, {sides}",
                "these ranks normalize by other statistics, or drop other values; where norms are "
                "synchronized the others wait for them",
                f"{layer(name)}.train()" + ("" if name in norms else f"\n# or {layer(name)}.eval()"),
                1.0,
            )


@check("error", "SyncBatchNorm shares with the wrong ranks", of_ranks=True)
def sync_group(subject: Subject) -> Iterator[Found]:
    """A group that its ranks do not agree on, or that is not of data-parallel ranks, or of one rank alone."""
    ranks = {rank.number: rank for rank in subject.ranks}
    shown = dict(zip(ranks, subject.shown, strict=False))
    for norm in subject.norms:
        sharing = [(rank.sharing[norm.name], rank) for rank in subject.ranks if norm.name in rank.sharing]
        told = grouped(((words, r.host if words == "node" else ""), r.number) for words, r in sharing)
        groups = [(_members(*words, subject.ranks), have) for words, have in told.items()]
        seen = {n: sums[norm.name] for n, sums in shown.items() if norm.name in sums}
        agree = all({n for n in group if n in ranks} == set(have) for group, have in groups)
        for group, (number, *_) in groups:
            fault = _wrong(group, ranks, seen, ranks[number].wrapped or []) if agree else _OTHERS
            if fault:
                yield Found(
                    norm.name,
                    f"rank {number} with {ranks_in_words(group) if group else 'a group that it is not in'}",
                    fault[0],
                    f"{layer(norm.name)}.process_group = group"
                    '  # group: of the data-parallel ranks, such as mesh.get_group("dp")',
                    len(group),
                    fault[1],
                )
                break


_OTHERS = "its ranks have other groups: each waits for sums that the others do not send", "error"


def _wrong(
    group: list[int], ranks: dict[int, Rank], seen: dict[int, list[float]], parallel: list[int]
) -> tuple[str, str] | None:
    """What is wrong with a group that its ranks agree on, and how bad it is.

    Ranks whose norm gets the same input are not data-parallel. Ranks with parts of one sample get different
    values: their statistics belong together, though DistributedDataParallel's group does not include them
    all.
    """
    batches = {rank.batch for rank in ranks.values()}
    outside = bool(parallel) and not set(group) <= set(parallel)
    if len(group) == 1 and (len(parallel) > 1 or (not parallel and len(batches) > 1)):
        return "it shares with no other rank, and is batch norm of each rank's own samples", "error"
    inside = sorted((batch, n) for n in group if n in seen and (batch := ranks[n].batch) is not None)
    twins = [(a, b) for (one, a), (other, b) in pairwise(inside) if one == other]
    same = [(a, b) for a, b in twins if math.dist(seen[a], seen[b]) <= TWIN * math.hypot(*seen[a])]
    if same and (outside or len(batches) > 1):
        apart = f"; data-parallel are the {ranks_in_words(parallel)}" if outside else ""
        return f"{ranks_in_words([*same[0]])} have the same samples, which count twice{apart}", "error"
    if outside and batches == {None}:
        return (
            f"data-parallel are the {ranks_in_words(parallel)}: unless the others have parts of the same "
            "samples, cut in space, their statistics do not belong together (with batches that is seen)"
        ), "warning"
    return None


def _members(words: str, host: str, ranks: Iterable[Rank]) -> list[int]:
    if host:
        return [rank.number for rank in ranks if rank.host == host]
    return [*range(dist.get_world_size())] if words == "all" else [int(n) for n in words.split(",") if n]


@check("error", "Weights that differ between ranks", of_ranks=True)
def rank_weights(subject: Subject) -> Iterator[Found]:
    """Parameters whose copies are not equal on the ranks that have the same part.

    Parameters of norms, DTensors and those in a wrapper are copies. Whether other plain tensors are is
    unknown, so they get a warning.
    """
    yield from _copies(
        subject,
        {name for name, _ in subject.model.named_parameters(remove_duplicate=False)},
        "ranks train different models, and gradients are summed at weights that they do not belong to",
        "# and find what changed it alone: a seed, a checkpoint, an optimizer, a gradient that is not summed",
        "where it is a part that was cut by hand, or an expert of its rank",
    )


@check("warning", "Buffers that differ between ranks", of_ranks=True)
def rank_buffers(subject: Subject) -> Iterator[Found]:
    """Running statistics and other buffers whose copies are not equal, except those that DDP broadcasts."""
    yield from _copies(
        subject,
        {name for name, _ in subject.model.named_buffers(remove_duplicate=False)},
        "evaluation differs from rank to rank, and a checkpoint holds those of one",
        '# and leannorm.convert(model, to="sync") before training, or DistributedDataParallel',
    )


def _copies(subject: Subject, names: set[str], why: str, then: str, unknown: str = "") -> Iterator[Found]:
    """The tensors of these names that differ, by layer."""
    norms = {norm.path for norm in subject.norms}
    layers: dict[str, list[tuple[str, str, str, float, bool]]] = {}
    for name in dict.fromkeys(name for rank in subject.ranks for name in rank.held if name in names):
        tensors = [(rank.number, rank.held[name]) for rank in subject.ranks if name in rank.held]
        parts = grouped((held.part, (number, held)) for number, held in tensors)
        for told in parts.values():
            if len({held.digest for _, held in told}) > 1:
                path, _, own = name.rpartition(".")
                sizes = [held.norm for _, held in told]
                apart = (max(sizes) - min(sizes)) / max(*sizes, 1e-30)
                apart = apart if math.isfinite(apart) else 1.0
                by = _sides([(n, held.digest) for n, held in told], _sizes(held for _, held in told))
                known = told[0][1].known or path in norms
                layers.setdefault(path, []).append((own, by, _sent(subject, path, own, told), apart, known))
                break
    for path, several in layers.items():
        _, by, _, apart, known = several[0]
        marked = "; ".join(f"{layer(path)}.{own}.tensor_model_parallel = True" for own, *_ in several)
        doubt = "" if known or not unknown else f"# or {marked}  # {unknown}"
        yield Found(
            path or "(model)",
            f"{', '.join(one[0] for one in several)}: {by}",
            why,
            "\n".join(filter(None, [*(one[2] for one in several), doubt, then])),
            apart,
            "warning" if doubt else None,
        )


def _sent(subject: Subject, path: str, own: str, told: Sequence[tuple[int, Held]]) -> str:
    """The line, for all ranks that have it, that sets a tensor to the value on most of them."""
    whose = Counter(held.digest for _, held in told).most_common(1)[0][0]
    source = next(number for number, held in told if held.digest == whose)
    tensor = f"{layer(path)}.{own}.detach()" + ".to_local()" * _is_dtensors(told[0][1].part)
    return (
        f"torch.distributed.broadcast({tensor}, src={source}{_among(subject, [number for number, _ in told])}"
    )


def _among(subject: Subject, ranks: Sequence[int]) -> str:
    """The closing arguments of a collective's call by these ranks."""
    if len(ranks) == len(subject.ranks):
        return ", group=group)" if "process_group" in subject.passed else ")"
    return f", group=group)  # group: of {ranks_in_words([*ranks])}"


def _same_settings(norm: Norm, ranks: Sequence[Rank]) -> str:
    """The lines that set eps and momentum to their value on most ranks; other settings are chosen in the
    constructor."""
    told = [rank.settings[norm.name].split(", ") for rank in ranks]
    common = set(told[0]).intersection(*told)
    made = "# make the model by the same arguments on every rank"
    odd = [[word.partition("=") for word in words if word not in common] for words in told]
    usual = Counter(map(tuple, odd)).most_common(1)[0][0]
    lines: dict[str, str] = {}
    for name, _, value in usual:
        if name == "eps":
            lines[name] = f"{attribute(norm, EPS)} = {value}"
        elif name == "momentum":
            lines[name] = momentum_set(norm, value)
    settled = all(len(words) == len(lines) for words in odd)
    return "\n".join([*lines.values(), made] if settled else [made])


@check("error", "Gradients of norms are parts of a sum", of_ranks=True)
def partial_gradients(subject: Subject) -> Iterator[Found]:
    """Gamma and beta that are whole on every rank and whose gradients differ: each rank has a summand, none
    the sum."""
    told: dict[str, dict[str, dict[tuple[int, ...], tuple[int, list[float]]]]] = {}
    largest: dict[str, float] = {}
    for rank, gradients in zip(subject.ranks, subject.gradients, strict=False):
        for name, (part, values) in gradients.items():
            sums = told.setdefault(name, {}).setdefault(part, {})
            first, others = sums.get(_summing(rank), (rank.number, [0.0] * len(values)))
            sums[_summing(rank)] = first, [a + b for a, b in zip(values, others, strict=True)]
            path, size = name.rpartition(".")[0], math.hypot(*values)
            largest[path] = max(largest.get(path, 0.0), size if math.isfinite(size) else 0.0)
    for name, parts in told.items():
        path, _, own = name.rpartition(".")
        for part, copies in parts.items():
            fault = _partial(
                path, own, list(copies.values()), ROUNDING * largest[path], _summed(subject, part)
            )
            if fault:
                yield fault
                break


def _summed(subject: Subject, part: str) -> str:
    """The line after which gradients are sums, in each backward pass."""
    if _is_dtensors(part):
        return (
            "# weight.to_local(grad_placements=...) in its forward says that the gradient is a part of a sum"
        )
    if any(rank.wrapped for rank in subject.ranks):
        end = ", group=group))  # group: of the ranks with parts of one sample"
    else:
        end = _among(subject, [rank.number for rank in subject.ranks]).replace(")", "))", 1)
    return f"{{0}}.register_post_accumulate_grad_hook(lambda p: torch.distributed.all_reduce(p.grad{end}"


def _is_dtensors(part: str) -> bool:
    """Whether a part of a tensor, or of a gradient, belongs to a mesh."""
    return part.partition(" ")[2] != ""


def _partial(
    path: str, own: str, copies: list[tuple[int, list[float]]], least: float, remedy: str
) -> Found | None:
    lost = [number for number, values in copies if not math.isfinite(math.hypot(*values))]
    if lost:
        return Found(
            path or "(model)",
            f"not finite on {ranks_in_words(lost)}",
            f"the gradient of {own} is NaN or infinite, and cannot be compared",
            "torch.autograd.set_detect_anomaly(True)  # the next backward pass says where",
            0.0,
            "warning",
        )
    first = copies[0][1]
    size = max(math.hypot(*values) for _, values in copies)
    apart = max(math.dist(values, first) for _, values in copies)
    if size <= least or apart <= SAME * size:
        return None
    whole = [sum(column) for column in zip(*(values for _, values in copies), strict=True)]
    each = ", ".join(f"{math.hypot(*values):.3g}" for _, values in copies[:4])
    off = max(math.dist(values, whole) for _, values in copies) / max(math.hypot(*whole), 1e-30)
    around = [number for number, values in copies if not any(values)]
    if around:  # a hook would wait for those
        remedy = f"# look at why {path} has no gradient on {ranks_in_words(around)}: all ranks are to call it"
    return Found(
        path or "(model)",
        f"off by {off:.2g} of the sum",
        f"the gradient of {own} on {ranks_in_words([n for n, _ in copies])} has the size {each}, the sum "
        f"{math.hypot(*whole):.3g}: each rank trains {own} by its own part of the tokens or channels, and "
        "the copies part",
        f"{remedy.format(f'{layer(path)}.{own}')}\n# by itself: sequence_parallel = True on a weight of "
        "Megatron-LM, SequenceParallel of torch",
        off,
    )


def _sides(told: Sequence[tuple[int, Any]], words: dict[Any, str] | None = None) -> str:
    """Which rank has what, if not all have the same: the odd ones first, and what most others have as
    "elsewhere".

    >>> _sides([(0, "eps=1e-05"), (1, "eps=1e-06")])
    'rank 0: eps=1e-05; rank 1: eps=1e-06'
    >>> _sides([(0, "a"), (1, "b"), (2, "a")])
    'rank 1: b (elsewhere a)'
    >>> _sides([(0, "a"), (1, "a")])
    ''
    """
    sides = grouped((value, number) for number, value in told)
    if len(sides) < 2:
        return ""
    said = {value: (words[value] if words else value) or "none of these" for value in sides}
    common = max(sides, key=lambda value: len(sides[value]))
    most = 2 * len(sides[common]) > len(told)
    odd = [value for value in sides if not (most and value == common)]
    each = "; ".join(f"{ranks_in_words(sides[value])}: {said[value]}" for value in odd[:4])
    more = f"; {len(odd) - 4} more" if len(odd) > 4 else ""
    return each + more + (f" (elsewhere {said[common]})" if most else "")


def _sizes(held: Iterable[Held]) -> dict[int, str]:
    """Tensors in words: their norms, and if those look the same, some of their digests."""
    words = {one.digest: f"norm {one.norm:.6g}" for one in held}
    alike = len(set(words.values())) < len(words)
    return {
        digest: f"{word} (bits {digest % 2**16:04x})" if alike else word for digest, word in words.items()
    }
