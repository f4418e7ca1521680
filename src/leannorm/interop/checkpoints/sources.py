"""A checkpoint from a path, a mapping or a list, with keys and values in one form for `match`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leannorm._errors import InputError
from leannorm.interop.checkpoints.arrays import Checkpoint, from_mapping
from leannorm.interop.checkpoints.conventions import Convention
from leannorm.interop.checkpoints.files import read
from leannorm.interop.checkpoints.matching import Slot
from leannorm.interop.checkpoints.settings import listed

# Flax's collections of parameters and running statistics; a batch norm has tensors in both
COLLECTIONS = ("params.", "batch_stats.")


def _blobs(checkpoint: Checkpoint) -> Checkpoint:
    """Caffe stores sums of means and variances; divide them by its third blob, the accumulated weight."""
    tensors = dict(checkpoint.tensors)
    for key, factor in checkpoint.tensors.items():
        layer, _, number = key.rpartition(".")
        sums = [tensors.get(f"{layer}.{i}") for i in (0, 1)]
        if number == "2" and factor.numel() == 1 and all(s is not None for s in sums):
            scale = 0.0 if factor.item() == 0 else 1 / factor.double().item()
            for i, name in enumerate(("mean", "variance")):
                tensors[f"{layer}.{name}"] = tensors.pop(f"{layer}.{i}").double() * scale
            del tensors[key]
    return Checkpoint(tensors)


def _numbered(arrays: Sequence[Any], slots: Sequence[Slot]) -> Checkpoint:
    """A list from Keras' `get_weights()`: arrays layer by layer, in the model's order."""
    first: dict[int, Slot] = {}
    for slot in slots:
        if slot.candidates and not slot.optional:
            first.setdefault(id(slot.tensor), slot)
    wanted = list(first.values())
    if len(wanted) != len(arrays):
        raise InputError(
            f"the list must hold one array for each of the model's {len(wanted)} tensors "
            f"({listed([slot.key for slot in wanted])}), got {len(arrays)}; "
            "pass a mapping of names where the layers differ"
        )
    return from_mapping({slot.candidates[0]: array for slot, array in zip(wanted, arrays, strict=True)})


def read_any(source: Any, theirs: Convention, slots: Sequence[Slot]) -> Checkpoint:
    """The checkpoint from a path, a mapping or Keras' list of arrays."""
    if isinstance(source, (str, os.PathLike)):
        checkpoint = read(Path(source))
    elif isinstance(source, Mapping):
        checkpoint = from_mapping(source)
    elif isinstance(source, Sequence) and theirs.framework == "keras":
        return _numbered(source, slots)
    else:
        raise InputError(
            "the checkpoint must be a path, a mapping of names to arrays or (from keras) a list of arrays, "
            f"got {type(source).__name__}"
        )
    if theirs.framework == "caffe":
        return _blobs(checkpoint)
    if theirs.framework == "flax":
        merged: dict[str, Tensor] = {}
        for key, value in checkpoint.tensors.items():
            inner = next((key.removeprefix(c) for c in COLLECTIONS if key.startswith(c)), key)
            if inner in merged:
                raise InputError(f"two collections hold {inner!r}; pass the one to load")
            merged[inner] = value
        return Checkpoint(merged)
    if theirs.framework == "paddle":
        # numpy has no bfloat16: Paddle saves its bits as uint16
        return Checkpoint(
            {
                k: v.view(torch.bfloat16) if v.dtype == torch.uint16 else v
                for k, v in checkpoint.tensors.items()
            }
        )
    return checkpoint
