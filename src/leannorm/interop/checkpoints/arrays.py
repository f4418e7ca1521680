"""Arrays of any library as tensors under dotted names, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leannorm._errors import InputError, MissingDependencyError

# entries of Paddle's files that are not parameters
IGNORED = ("StructuredToParameterName@@",)


@dataclass(frozen=True)
class Checkpoint:
    """Arrays by "layer.name"; `settings`: the eps and momentum of the layers for which the file states them.

    `absent`: the keys of scales and shifts that a layer was made without, according to the file.
    """

    tensors: dict[str, Tensor]
    settings: dict[str, dict[str, float]] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()


def optional(module: str, purpose: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingDependencyError(
            f"{purpose} needs the package {package}, which is not installed; "
            "install it with: pip install 'leannorm[interop]'"
        ) from error


def to_tensor(key: str, value: Any) -> Tensor:
    """A copy of the array as a tensor, bfloat16 of other libraries included; a tensor is only detached."""
    if isinstance(value, Tensor):
        return value.detach()
    array = np.array(value)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise InputError(
            f"the entry {key!r} must be an array of numbers, got a {type(value).__name__} of {array.dtype}; "
            "pass the part of the checkpoint that holds the parameters"
        )
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def to_array(value: Tensor) -> np.ndarray[Any, Any]:
    """The tensor as a numpy array; bfloat16, which numpy lacks, becomes float32."""
    value = value.detach().cpu()
    return np.asarray((value.float() if value.dtype == torch.bfloat16 else value).numpy())


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and sequences as one mapping with dotted keys."""
    if isinstance(tree, Mapping):
        items = [(str(key), value) for key, value in tree.items() if key not in IGNORED]
    elif isinstance(tree, (list, tuple)):
        if len(tree) == 2 and isinstance(tree[0], str):  # Paddle: (name, tensor)
            return flat(tree[1], prefix)
        if all(isinstance(value, (int, float)) for value in tree):
            return {prefix: tree}  # an array as a list of numbers
        items = [(str(index), value) for index, value in enumerate(tree)]
    else:
        return {prefix: tree}
    result: dict[str, Any] = {}
    for name, value in items:
        part = name.replace("/", ".")
        for key, leaf in flat(value, f"{prefix}.{part}" if prefix else part).items():
            if key in result:
                raise InputError(f"the checkpoint holds {key!r} twice; rename one of the two")
            result[key] = leaf
    return result


def from_mapping(mapping: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint({key: to_tensor(key, value) for key, value in flat(mapping).items()})
