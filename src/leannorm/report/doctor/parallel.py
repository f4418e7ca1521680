"""Checks over ranks: each is asked once, on the first rank, of what all of them told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from leannorm._errors import SyncError
from leannorm.report.doctor.meeting import ranks_in_words
from leannorm.report.doctor.ranks import Held, Rank
from leannorm.report.doctor.subject import Found, Subject, check, layer

SAME = 0.01  # of a gradient's size: copies of it that a rank computed in another order


def same_model(ranks: Sequence[Rank]) -> None:
    """Raises: `SyncError` where ranks have other layers, or some have batches and others none."""
    first = ranks[0]
    for other in ranks[1:]:
        for mine, theirs in zip(first.layers, other.layers, strict=False):
            if mine != theirs:
                have = [
                    f"rank {r.number} has {one[0]!r} ({one[1]})"
                    for r, one in ((first, mine), (other, theirs))
                ]
                raise SyncError(f"doctor compares ranks that have one model, but {', '.join(have)}; {_GROUP}")
        counts = len(first.layers), len(other.layers), len(first.modes), len(other.modes)
        if counts[0] != counts[1] or counts[2] != counts[3]:
            have = [
                f"rank {r.number} has {len(r.layers)} norms in {len(r.modes)} modules" for r in (first, other)
            ]
            raise SyncError(f"doctor compares ranks that have one model, but {', '.join(have)}; {_GROUP}")
        if (first.batches is None) != (other.batches is None):
            have = [f"rank {r.number} has {'no' if r.batches is None else 'some'}" for r in (first, other)]
            raise SyncError(f"batches must be given on all ranks or on none, but {', '.join(have)}")


_GROUP = "pass group= of the ranks with this one's model, such as those of a pipeline's stage"


@check("error", "Ranks have other settings", of_ranks=True)
def rank_settings(subject: Subject) -> Iterator[Found]:
    """Class, eps, momentum, groups or modes that are not those of the other ranks."""
    for norm in subject.norms:
        told = [(rank.number, rank.settings[norm.name]) for rank in subject.ranks]
        ranks, usual = _odd(told)
        if ranks:
            mine = dict(told)[ranks[0]]
            yield Found(
                norm.name,
                f"{ranks_in_words(ranks)}: {_apart(mine, usual)}",
                "one layer computes two things: ranks send gradients of different functions, and which of them "
                "a checkpoint's weights fit depends on the rank that wrote it",
                "make the model by the same arguments on every rank",
                len(ranks),
            )
    names = [(name or "(model)") for name, _ in subject.model.named_modules(remove_duplicate=True)]
    above: tuple[str, ...] = ()
    for place, name in enumerate(names):
        ranks, usual = _odd([(rank.number, rank.modes[place]) for rank in subject.ranks])
        if ranks and not (name.startswith(above) if above else False):
            above = ("",) if name == "(model)" else (*above, f"{name}.")
            yield Found(
                name,
                f"{ranks_in_words(ranks)}: {'evaluation' if usual == 't' else 'training'} mode",
                "these ranks normalize by other statistics, or drop other values; where norms are synchronized "
                "the others wait for them",
                f"{layer(name)}.train() or .eval(), on every rank",
                len(ranks),
            )


def _apart(mine: str, usual: str) -> str:
    here, there = mine.split(", "), usual.split(", ")
    own = ", ".join(one for one in here if one not in there) or "fewer settings"
    return f"{own} (elsewhere {', '.join(one for one in there if one not in here) or 'none of these'})"


@check("error", "SyncBatchNorm shares with the wrong ranks", "ranks", of_ranks=True)
def sync_group(subject: Subject) -> Iterator[Found]:
    """A group that its ranks do not agree on, or that is not of data-parallel ranks, or of one rank alone."""
    ranks = {rank.number: rank for rank in subject.ranks}
    batches = {rank.batch for rank in subject.ranks}
    for norm in subject.norms:
        groups = {
            n: _members(rank, norm.name, subject.ranks)
            for n, rank in ranks.items()
            if norm.name in rank.sharing
        }
        agree = all(n in g and all(groups.get(m) == g for m in g if m in ranks) for n, g in groups.items())
        for number, group in groups.items():
            inside = [n for n in group if n in ranks]
            given = [ranks[n].batch for n in inside if ranks[n].batch is not None]
            parallel = ranks[number].wrapped
            if not agree:
                why = "its ranks have other groups: each waits for sums that the others do not send"
            elif parallel is not None and not set(group) <= set(parallel):
                why = (
                    f"data-parallel are the {ranks_in_words(parallel)}: the others have parts of the same "
                    "samples, or other layers, and their statistics do not belong together"
                )
            elif len(set(given)) < len(given) and len(batches) > 1:
                why = "some of them have the same batch, so they are no data-parallel ranks: samples count twice"
            elif len(group) == 1 and (len(parallel or ()) > 1 or (not parallel and len(batches) > 1)):
                why = "it shares with no other rank, and is batch norm of each rank's own samples"
            else:
                continue
            yield Found(
                norm.name,
                f"{len(group)} on rank {number}: {', '.join(map(str, group)) or 'not its own'}",
                why,
                f'{layer(norm.name)}.process_group = the data-parallel group, such as mesh.get_group("dp")',
                len(group),
            )
            break


def _members(rank: Rank, name: str, ranks: Iterable[Rank]) -> list[int]:
    group: Any = rank.sharing[name]
    return [r.number for r in ranks if r.host == rank.host] if group == "node" else group


@check("error", "Weights that differ between ranks", of_ranks=True)
def rank_weights(subject: Subject) -> Iterator[Found]:
    """Parameters whose copies are not equal on the ranks that hold the same part."""
    names = {name for name, _ in subject.model.named_parameters(remove_duplicate=False)}
    yield from _copies(
        subject,
        names,
        "ranks train different models, and gradients are summed at weights that they do not belong to",
        "torch.distributed.broadcast({0}.data, src) from one rank, and find what changed it alone: a seed, a "
        "checkpoint, an optimizer, a gradient that is not summed",
    )


@check("warning", "Buffers that differ between ranks", of_ranks=True)
def rank_buffers(subject: Subject) -> Iterator[Found]:
    """Running statistics, and other buffers, whose copies are not equal; of DDP only those it does not send."""
    names = {name for name, _ in subject.model.named_buffers(remove_duplicate=False)}
    yield from _copies(
        subject,
        names,
        "evaluation differs from rank to rank, and a checkpoint holds those of one",
        'leannorm.convert(model, to="sync") before training; now torch.distributed.broadcast({0}, src)',
    )


def _copies(subject: Subject, names: set[str], why: str, remedy: str) -> Iterator[Found]:
    """The tensors of these names that differ, by layer."""
    layers: dict[str, list[tuple[str, list[int], float, str]]] = {}
    for name in subject.ranks[0].held:
        if name not in names:
            continue
        parts: dict[str, list[tuple[int, Held]]] = {}
        for rank in subject.ranks:
            if name in rank.held:
                parts.setdefault(rank.held[name].part, []).append((rank.number, rank.held[name]))
        for told in parts.values():
            ranks, usual = _odd([(number, held.digest) for number, held in told])
            if ranks:
                held, other = dict(told)[ranks[0]], next(h for _, h in told if h.digest == usual)
                apart = abs(held.norm - other.norm) / max(other.norm, 1e-30)
                size = f"of norm {held.norm:.6g} ({other.norm:.6g} elsewhere)"
                path, _, own = name.rpartition(".")
                layers.setdefault(path or "(model)", []).append((own, ranks, apart, size))
                break
    for path, several in layers.items():
        own, ranks, apart, size = several[0]
        whose = ", ".join(one[0] for one in several)
        yield Found(
            path,
            f"{ranks_in_words(ranks)}: {whose}, {size}",
            why,
            remedy.format(f"{layer(path)}.{own}"),
            apart,
        )


@check("error", "Gradients of norms are parts of a sum", "of the gradient", of_ranks=True)
def partial_gradients(subject: Subject) -> Iterator[Found]:
    """Gamma and beta that ranks hold whole, and whose gradients differ: each has a summand, none the sum."""
    for name in subject.gradients[0] if subject.gradients else ():
        parts: dict[str, list[tuple[int, list[float]]]] = {}
        for rank, told in zip(subject.ranks, subject.gradients, strict=True):
            if name in told:
                part, values = told[name]
                parts.setdefault(part, []).append((rank.number, values))
        for told in parts.values():
            first = told[0][1]
            size = max(_length(values) for _, values in told)
            apart = max(_length(_minus(values, first)) for _, values in told)
            if len(told) > 1 and apart > SAME * size:
                whole = [sum(column) for column in zip(*(values for _, values in told), strict=True)]
                off = _length(_minus(first, whole)) / max(_length(whole), 1e-30)
                path, _, own = name.rpartition(".")
                each = ", ".join(f"{_length(values):.3g}" for _, values in told[:4])
                yield Found(
                    path or "(model)",
                    off,
                    f"the gradient of {own} on {ranks_in_words([n for n, _ in told])} has the sizes {each}, the sum "
                    f"{_length(whole):.3g}: each rank trains {own} by its own part of the tokens or channels, and "
                    "the copies part",
                    f"sum {layer(path)}.{own}.grad over these ranks after the backward pass (Megatron-LM: "
                    "sequence_parallel=True on the weight; torch: SequenceParallel)",
                )
                break


def _length(values: Sequence[float]) -> float:
    return float(sum(v * v for v in values)) ** 0.5


def _minus(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _odd(told: Sequence[tuple[int, Any]]) -> tuple[list[int], Any]:
    """The ranks that have not what most have (the first of equals), and what most have."""
    counts: dict[Any, int] = {}
    for _, value in told:
        counts[value] = counts.get(value, 0) + 1
    usual = max(counts, key=lambda value: counts[value])
    return [number for number, value in told if value != usual], usual
