"""`save`: write a model as a checkpoint of another framework."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leannorm._errors import InputError
from leannorm._files import replacing
from leannorm.interop.checkpoints.arrays import to_array
from leannorm.interop.checkpoints.conventions import Convention, convention
from leannorm.interop.checkpoints.files import TEMPLATES, WRITERS
from leannorm.interop.checkpoints.matching import STATISTICS, Slot, match, slots_of, to_theirs
from leannorm.interop.checkpoints.settings import Names, PerLayer, factors_of, listed, variance_note, warn_of
from leannorm.interop.checkpoints.sources import read_any
from leannorm.interop.checkpoints.subsets import name_numbers


def _tree(values: Mapping[str, Any], target: str, slots: Sequence[Slot]) -> dict[str, Any]:
    """The values as the framework arranges them: nested in collections for Flax, flat for the others."""
    if target != "flax":
        return dict(values)
    statistics = {
        slot.candidates[0] for slot in slots if slot.kind == "batch_norm" and slot.role in STATISTICS
    }
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, leaf = ["batch_stats" if key in statistics else "params", *key.split(".")]
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[leaf] = value
    return tree


def _array(value: Tensor, target: str) -> Any:
    if target == "torch":
        return value
    if target == "paddle" and value.dtype == torch.bfloat16:
        return value.view(torch.uint16).numpy()
    return to_array(value)


def save(
    model: torch.nn.Module,
    path: str | os.PathLike[str] | None,
    target: str,
    *,
    names: Names | None = None,
    count: PerLayer = None,
    like: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Write a model's parameters and statistics under another framework's conventions; the inverse of `load`.

        var = running_var * (n - 1) / n if the target keeps the biased variance and `count` gives n.

    Args:
        model: any module that `load` takes.
        path: the file to write (.pdparams, .msgpack, .safetensors, .pt), or None to write none. Formats that
            only their framework can lay out (.h5, .weights.h5, .keras, .onnx) need `like`.
        target: as `source` of `load`; "caffe" can only be read.
        names: as for `load`: modules here → their names there.
        count: as for `load`.
        like: a file of the same network, saved by the target framework: the new file is a copy of it with the
            model's values.

    Returns the mapping: for Paddle and ONNX flat, for Keras flat in the order of `set_weights`, for Flax
    nested in params and batch_stats, arrays of numpy; for torch a state_dict. bfloat16, which numpy lacks,
    is widened to float32 in it (for Paddle: its bits as uint16, as Paddle stores them).

    Raises: `InputError` for a layer that the target has no rule for, or a `like` that does not fit; no file
    is written then, and none is ever left half-written. Warns (`ConventionWarning`) if count is not given.

    >>> import math
    >>> import torch
    >>> from leannorm import interop
    >>> sorted(interop.save(torch.nn.BatchNorm1d(2), None, "paddle", count=math.inf))
    ['_mean', '_variance', 'bias', 'weight']
    """
    theirs = convention(target, "target")
    if theirs.framework == "caffe":
        raise InputError(
            "target 'caffe' cannot be written, only read; write ONNX or another framework's file"
        )
    names = names or {}
    every = slots_of(model, theirs, names)
    slots = [s for s in every if not s.absent and (theirs.framework == "torch" or not s.optional)]
    factors = factors_of(count, slots, theirs)
    unruled = [f"{s.key} ({type(s.module).__name__})" for s in slots if not s.candidates]
    if unruled:
        raise InputError(
            f"there is no rule how {target} writes {listed(unruled)}; save those with target='torch'"
        )
    values = {}
    for slot in slots:
        value = to_theirs(slot, theirs)
        factor = factors.get(slot.module_name, 1.0)
        if slot.role == "running_var" and factor != 1:
            value = (value.double() / factor).to(value.dtype)
        values[slot.candidates[0]] = value
    arrays = {key: _array(value, theirs.framework) for key, value in values.items()}
    if path is not None:
        content = _content(Path(path), like, theirs, every, slots, values, arrays)
        with replacing(Path(path)) as file:
            file.write(content)
    warn_of(variance_note(slots, factors, theirs, "saved"))
    return _tree(arrays, theirs.framework, slots)


def _content(
    path: Path,
    like: str | os.PathLike[str] | None,
    theirs: Convention,
    every: Sequence[Slot],
    slots: Sequence[Slot],
    values: Mapping[str, Tensor],
    arrays: Mapping[str, Any],
) -> bytes:
    """What will be written to the file."""
    if path.suffix in WRITERS:
        pickled = path.suffix == ".pdparams"  # this one stores numpy arrays, the others tensors
        return WRITERS[path.suffix](_tree(arrays if pickled else values, theirs.framework, slots))
    if path.suffix not in TEMPLATES:
        raise InputError(f"{path} must end in one of {', '.join([*WRITERS, *TEMPLATES])}")
    if like is None or Path(like).suffix != path.suffix:
        raise InputError(
            f"only {theirs.framework} can lay out a new {path.suffix} file; pass like= one that "
            f"it saved of the same network, got {like!r}"
        )
    template = read_any(like, theirs, every)
    there = template.tensors
    pairing = match(slots, list(there))
    problems = [
        *name_numbers(template, every, theirs)[1],
        *pairing.problems,
        *(f"missing: {m}" for m in pairing.missing),
        *(f"surplus: {key}" for key in pairing.surplus),
    ]
    filling = {key: values[slot.candidates[0]] for slot, key in pairing.pairs}
    problems += [
        f"{key} has shape {tuple(there[key].shape)}, the model gives {tuple(value.shape)}"
        for key, value in filling.items()
        if value.shape != there[key].shape
    ]
    if problems:
        raise InputError(
            f"{like} is not of the same network, nothing was written:\n  " + "\n  ".join(problems)
        )
    return TEMPLATES[path.suffix](Path(like), filling)
