"""A model as an exported graph in which every call of a leannorm function is one operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from leannorm._errors import InputError
from leannorm.functional.door import AsOperators
from leannorm.ops.select import use_backend


def export(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """`torch.export.export` in the mode that the model is in.

    Raises: `InputError` with torch's reason if the model cannot be exported.
    """
    try:
        with use_backend("reference"), AsOperators():
            return torch.export.export(model, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
    except Exception as error:  # torch.export has no error of its own
        mode = "train" if model.training else "infer"
        reason = str(error).strip().split("\n", 1)[0]
        raise InputError(
            f"torch.export cannot trace {type(model).__name__} in the {mode} mode: "
            f"{type(error).__name__}: {reason}"
        ) from error
