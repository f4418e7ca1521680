"""Norms of jagged tensors (`torch.nested`): of their packed values, without padding, with the same
offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor as NestedTensor

from leannorm._errors import InputError
from leannorm.functional.declare import Arguments


def _packed(name: str, input: Any) -> Tensor:
    if input.lengths() is not None:
        raise InputError(
            f"{name} must be a jagged tensor without holes, got one with lengths as well as offsets (a "
            "narrowed one); pass its .contiguous()"
        )
    values: Tensor = input.values()
    return values


def _like(input: Any, values: Tensor) -> Tensor:
    """A jagged tensor of values packed like the input's."""
    return torch.nested.nested_tensor_from_jagged(
        values,
        input.offsets(),
        jagged_dim=input._ragged_idx,
        min_seqlen=input._maybe_min_seqlen,
        max_seqlen=input._maybe_max_seqlen,
    )


def _plain(arguments: Arguments) -> dict[str, Any]:
    """The arguments with the residual's values; it and the input must be packed alike."""
    if arguments.get("mask") is not None or arguments.get("lengths") is not None:
        raise InputError(
            "mask and lengths are for padded tensors, got one of them with a jagged tensor, whose offsets "
            "say the lengths already; leave it out"
        )
    input, residual, plain = arguments["input"], arguments.get("residual"), dict(arguments)
    if residual is not None:
        same = type(residual) is NestedTensor and residual._ragged_idx == input._ragged_idx
        if not (same and residual.offsets() is input.offsets()):
            raise InputError(
                "residual must be a jagged tensor with the very offsets of the input, got another; make both "
                "from one, or with torch.nested.nested_tensor_from_jagged(values, input.offsets())"
            )
        plain["residual"] = _packed("residual", residual)
    plain["input"] = _packed("input", input)
    return plain


def channels(function: Callable[..., Any], arguments: Arguments) -> Tensor:
    """A batch norm: (N, j, C, *) is (positions, C, *), and (N, C, *, j, *) is (1, C, *, positions, *)."""
    if arguments.get("group_size") is not None:
        raise InputError(
            "group_size counts samples, which packed values have none of, got "
            f"{arguments['group_size']} with a jagged tensor; use group_size=None"
        )
    input, plain = arguments["input"], _plain(arguments)
    if input._ragged_idx == 1:
        return _like(input, function(**plain))
    for name in ("input", "residual"):
        if plain.get(name) is not None:
            plain[name] = plain[name].unsqueeze(0)
    return _like(input, function(**plain).squeeze(0))


def rows(function: Callable[..., Any], arguments: Arguments) -> Tensor | tuple[Tensor, Tensor]:
    """A row norm over axes that are neither the samples' nor the ragged one."""
    input, plain, wanted = arguments["input"], _plain(arguments), len(tuple(arguments["normalized_shape"]))
    rank, ragged, dim = input.dim(), input._ragged_idx, arguments["dim"]
    first = rank - wanted if dim is None else dim % rank
    if first < 1 or first <= ragged < first + wanted:
        raise InputError(
            "the normalized axes of a jagged tensor must have one size in all samples, got the axes "
            f"{first} to {first + wanted - 1} of {rank} where axis 0 is the samples' and axis {ragged} is "
            "ragged; normalize others, or pass each sample by itself"
        )
    if dim is not None:
        plain["dim"] = first - 1
    made = function(**plain)
    return (_like(input, made[0]), _like(input, made[1])) if isinstance(made, tuple) else _like(input, made)
