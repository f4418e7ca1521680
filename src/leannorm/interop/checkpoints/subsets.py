"""Which of a norm's four tensors is an array that has only a number, or no name at all?

A layer may have been made without its scale or its shift, so neither the number of arrays nor their shapes
identify them. Arrays that can be only one set of tensors get its names; all others are rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from leannorm._catalog import torchs_kind
from leannorm._errors import InputError
from leannorm._report import grouped
from leannorm.interop.checkpoints.arrays import Checkpoint
from leannorm.interop.checkpoints.conventions import Convention
from leannorm.interop.checkpoints.matching import STATISTICS, Slot, joined, number_of, to_ours

_AFFINE = (("weight", "bias"), ("weight",), ("bias",), ())
_REMEDY = {
    "keras": "pass the model's .keras file, whose configuration says it, or names, "
    "{v.path: v.numpy() for v in model.weights}, with strict=False where a layer has no gamma or beta",
    "caffe": "pass both arrays, the missing one as ones (gamma) or zeros (beta)",
}


def _sets_of(slots: Sequence[Slot], theirs: Convention) -> list[list[Slot]]:
    """All sets of tensors that the source's layer may have had, in the order in which it stores them."""
    by_role = {slot.role: slot for slot in slots}
    norm, kind = torchs_kind(slots[0].module), slots[0].kind
    if kind == "rms_norm":  # Keras never lacks the scale, but files that `save` writes may
        return [[by_role["weight"]], *([[]] if by_role["weight"].absent else [])]
    tracks = not by_role["running_mean"].absent
    statistics: list[tuple[str, ...]] = []
    if norm == "batch" or (norm == "instance" and tracks):
        statistics.append(STATISTICS)
    if norm != "batch" or not tracks:  # the same for a batch norm without statistics
        statistics.append(())
    if theirs.framework == "caffe":  # those belong to another layer there, and have names
        statistics = [()]
    return [[by_role[role] for role in (*affine, *more)] for affine in _AFFINE for more in statistics]


def _layers(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """The slots of each module, in the model's order; a module with two names only once."""
    seen = set()
    for layer in grouped((slot.module_name, slot) for slot in slots).values():
        if id(layer[0].module) not in seen:
            seen.add(id(layer[0].module))
            yield layer


def _is_norm(layer: Sequence[Slot]) -> bool:
    return any(slot.of_norm for slot in layer)


def _leaf(slot: Slot) -> str:
    return slot.candidates[0].rpartition(".")[2]


def _words(sets: Sequence[Sequence[Slot]]) -> str:
    return " or ".join(", ".join(map(_leaf, chosen)) or "nothing" for chosen in sets)


def name_numbers(
    checkpoint: Checkpoint, slots: Sequence[Slot], theirs: Convention
) -> tuple[Checkpoint, list[str]]:
    """The checkpoint with names for the numbered arrays of norms, and why some of them can have none."""
    tensors, absent, problems = dict(checkpoint.tensors), set(checkpoint.absent), []
    numbers = grouped((its, key) for key in tensors if (its := number_of(key)) is not None)
    norms = [norm for norm in _layers(slots) if _is_norm(norm) and theirs.framework in _REMEDY]
    for layer, prefix in ((norm, prefix) for norm in norms for prefix in norm[0].prefixes):
        there = sorted(numbers.pop(prefix, ()), key=lambda key: int(key.rpartition(".")[2]))
        if not there:
            continue
        sets = [chosen for chosen in _sets_of(layer, theirs) if len(chosen) == len(there)]
        names = {slot.role: joined(prefix, _leaf(slot)) for slot in layer if slot.of_norm}
        if len(sets) == 1:
            tensors |= {names[s.role]: tensors.pop(key) for s, key in zip(sets[0], there, strict=True)}
            if theirs.framework == "keras":  # in other formats one norm is several layers
                absent |= set(names.values()) - {names[slot.role] for slot in sets[0]}
            continue
        ours = [_leaf(slot) for slot in layer if slot.of_norm and not slot.absent]
        count = (
            f"{prefix or 'it'} holds {len(there)} numbered arrays, the model {len(ours)}: {', '.join(ours)}"
        )
        why = f"; they may be {_words(sets)}: {_REMEDY[theirs.framework]}" if sets else ""
        problems.append(count + why)
        for key in there:
            del tensors[key]
        absent |= set(names.values())
    return replace(checkpoint, tensors=tensors, absent=frozenset(absent)), problems


def name_list(arrays: Sequence[Tensor], slots: Sequence[Slot], theirs: Convention) -> Checkpoint:
    """A list from Keras' `get_weights()`, layer by layer in the model's order, with names.

    Convolutions and linear layers may have had no bias there, and have none if the model's have none.
    """
    sets: list[list[list[Slot]]] = []
    own: list[Slot] = []
    seen: set[int] = set()
    for layer in _layers(slots):
        new = [s for s in layer if s.candidates and not (s.optional or s.absent or id(s.tensor) in seen)]
        seen |= {id(slot.tensor) for slot in new}
        own += new
        if _is_norm(layer):
            sets.append(_sets_of(layer, theirs))
        elif new:
            without = [slot for slot in new if slot.kind is None or slot.role != "bias"]
            sets.append([new, without] if len(without) < len(new) else [new])
    divisions = _divisions(arrays, sets, theirs)
    # a wrong shape is reported when the shapes are compared
    if not any(divisions) and len(arrays) == len(own):
        divisions = [[own]]
    unclear = [choices for choices in divisions if len(choices) > 1]
    if unclear or sum(len(choices[0]) for choices in divisions if choices) != len(arrays):
        keys = ", ".join(repr(slot.key) for slot in own[:4]) + ", ..." * (len(own) > 4)
        count = f"the list must hold one array for each of the model's {len(own)} tensors ({keys}), got"
        problems = [] if len(arrays) == len(own) else [f"{count} {len(arrays)}"]
        for choices in unclear[:1]:
            name = next(slot.module_name for chosen in choices for slot in chosen)
            problems.append(f"a list has no names, and the arrays of {name!r} may be {_words(choices)}")
        raise InputError(f"{'; '.join(problems)}; {_REMEDY['keras']}")
    chosen = [slot for choices in divisions for slot in choices[0]]
    names = {slot.candidates[0]: array for slot, array in zip(chosen, arrays, strict=True)}
    every = {c for layer in _layers(slots) if _is_norm(layer) for slot in layer for c in slot.candidates}
    return Checkpoint(names, absent=frozenset(every - set(names)))


def _divisions(
    arrays: Sequence[Tensor], sets: Sequence[Sequence[list[Slot]]], theirs: Convention
) -> list[list[list[Slot]]]:
    """For each layer, the sets that it has in any division of all arrays, in order, among the layers."""

    def fits(at: int, chosen: Sequence[Slot]) -> bool:
        return at + len(chosen) <= len(arrays) and all(
            to_ours(array, slot, theirs).shape == slot.tensor.shape
            for array, slot in zip(arrays[at:], chosen, strict=False)
        )

    starts = [{0}]
    for choices in sets:
        starts.append({at + len(c) for at in starts[-1] for c in choices if fits(at, c)})
    ends = {len(arrays)} & starts.pop()
    found: list[list[list[Slot]]] = []
    for at, choices in zip(reversed(starts), reversed(sets), strict=True):
        steps = [(a, c) for a in at for c in choices if a + len(c) in ends and fits(a, c)]
        found.append([c for c in choices if any(c is step for _, step in steps)])
        ends = {a for a, _ in steps}
    return found[::-1]
