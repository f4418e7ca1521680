"""Arrays of any library as tensors under dotted names, and back; files written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leannorm._errors import InputError, MissingDependencyError

# what Keras and Paddle put beside the parameters
PASSED_OVER = ("StructuredToParameterName@@",)


@dataclass(frozen=True)
class Checkpoint:
    """Arrays by "layer.name"; `settings`: the eps and momentum of those layers whose file states them."""

    tensors: dict[str, Tensor]
    settings: dict[str, dict[str, float]] = field(default_factory=dict)


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
    """The array as a tensor of its own; bfloat16 of other libraries included."""
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
    """For numpy; bfloat16, which numpy lacks, widens to float32."""
    value = value.detach().cpu()
    return np.asarray((value.float() if value.dtype == torch.bfloat16 else value).numpy())


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and sequences as one mapping with dotted keys."""
    if isinstance(tree, Mapping):
        items = [(str(key), value) for key, value in tree.items() if key not in PASSED_OVER]
    elif isinstance(tree, (list, tuple)):
        if len(tree) == 2 and isinstance(tree[0], str):  # Paddle: a tensor with its name
            return flat(tree[1], prefix)
        if all(isinstance(value, (int, float)) for value in tree):
            return {prefix: tree}  # an array written out
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


def write(path: Path, content: bytes) -> None:
    """Under another name first, then renamed: the file is there whole or not at all."""
    if not path.absolute().parent.is_dir():
        raise InputError(f"there is no folder {str(path.absolute().parent)!r}: create it, or name another")
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)  # mkstemp's own mode shuts everyone else out
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
