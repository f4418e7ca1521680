"""A checkpoint from a path, a mapping or a list, with keys and values in one form for `match`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leannorm._errors import InputError
from leannorm.interop.checkpoints.arrays import Checkpoint, from_mapping, to_tensor
from leannorm.interop.checkpoints.conventions import Convention
from leannorm.interop.checkpoints.files import read
from leannorm.interop.checkpoints.matching import Slot
from leannorm.interop.checkpoints.subsets import name_list

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


def read_any(source: Any, theirs: Convention, slots: Sequence[Slot]) -> Checkpoint:
    """The checkpoint from a path, a mapping or Keras' list of arrays."""
    if isinstance(source, (str, os.PathLike)):
        checkpoint = read(Path(source))
    elif isinstance(source, Mapping):
        checkpoint = from_mapping(source)
    elif isinstance(source, Sequence) and theirs.framework == "keras":
        return name_list([to_tensor(str(i), array) for i, array in enumerate(source)], slots, theirs)
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
