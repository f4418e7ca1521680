"""What the norms of rows compute of their arguments: every rule is checked, then one call.

The names of a function's arguments say which norm it is: an RMS norm takes no bias, a gated one an
activation. What a function does not take has its default here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leannorm import _checks
from leannorm._types import Maybe, Rows, RowTensors
from leannorm.autograd.fast import eps_of
from leannorm.autograd.rows import row_norm
from leannorm.functional import stock
from leannorm.functional.declare import Arguments
from leannorm.functional.shards import by_row, modulation
from leannorm.functional.valid import UNMASKED, Masking, masking_of, valid_positions
from leannorm.ops.modes import exporting, sharded
from leannorm.ops.plan import row_statistics_shape


def dtype_of_cast(call: Arguments) -> torch.dtype:
    """The dtype of a row norm's output: wider than the input if it is rounded before it is multiplied by a
    wider weight."""
    x, weight, cast = call["input"], call["weight"], call.get("cast", "after")
    if weight is None or cast == "after" or call.get("norm_before_gate", False):
        return x.dtype  # type: ignore[no-any-return]
    return torch.promote_types(x.dtype, weight.dtype)


def normalized_rows(call: Arguments) -> Any:
    """y, and of a function that takes a residual also x + gate * residual."""
    get, x, weight, bias = call.get, call["input"], call["weight"], call.get("bias")
    added, act, first = "branch" if "branch" in call else "residual", get("act"), True
    tensors = RowTensors(x, get(added), get("gate"), get("scale"), get("shift"), weight, bias)
    offset, before = 0.0, False
    if act is not None:
        _checks.activation(act)
        first = bool(call["norm_before_gate"])
    if "cast" in call:
        _checks.weight_offset(get("weight_offset", 0.0))
        _checks.cast(call["cast"])
        offset, before = float(get("weight_offset", 0.0)), call["cast"] == "before"
    if tensors.scale is not None and weight is None and bias is None:  # then the scale is the weight
        offset = 1.0
    shape, dim, exported = tuple(call["normalized_shape"]), get("dim"), exporting()
    if exported:  # no size may be read
        start = x.dim() - len(shape) if dim is None else dim % x.dim()
        stop = start + len(shape)
    else:
        _checks.floating("input", x)
        start, stop = _checks.normalized_axes(x, shape, dim)
    rows = Rows(start, stop, eps_of(x, call["eps"]), "bias" not in call, offset, before, act, first)
    masking = masking_of(call) if "mask" in call else UNMASKED
    if exported:
        made = stock.row_norm(tensors, shape, rows, masking)
    else:
        _check(tensors, shape, rows, added)
        if sharded(*tensors):
            made = _of_shards(tensors, rows, masking)
        else:
            made = row_norm(tensors, rows, _valid_rows(x, rows, masking))
    return made if added in call else made[0]


def _check(tensors: RowTensors, shape: Sequence[int], rows: Rows, added: str) -> None:
    x, residual, gate, scale, shift, weight, bias = tensors
    _checks.row_parameters(x, shape, weight=weight, bias=bias)
    if scale is not None:
        _checks.modulations(x, rows.start, scale=scale, shift=shift, gate=gate)
        _checks.same_modulation(scale, shift)
    elif rows.act is not None:
        _checks.like_input("gate", gate, x)
    _checks.like_input(added, residual, x)
    _checks.non_negative_eps(rows.eps)


def _valid_rows(x: Tensor, rows: Rows, masking: Masking) -> Maybe:
    """Which rows are data, in the statistics' shape; None if all are."""
    if masking[0] is None and masking[1] is None:
        return None
    if masking[1] is not None:
        _checks.lengths_of_rows(x, rows.start, rows.stop)
    valid = valid_positions(x, *masking, kept=(rows.start, rows.stop))
    return None if valid is None else valid.mask.view(row_statistics_shape(x.shape, rows.start, rows.stop))


def _of_shards(tensors: RowTensors, rows: Rows, masking: Masking) -> tuple[Tensor, Tensor]:
    x, _, *of_scale, _, _ = tensors
    elements, normalized = range(x.dim()), (rows.start, rows.stop)
    if masking[1] is not None:
        _checks.lengths_of_rows(x, *normalized)

    def run(*parts: Any) -> tuple[Tensor, Tensor]:
        local = RowTensors(*parts[:-1])
        return row_norm(local, rows, _valid_rows(local.x, rows, (parts[-1], None, "zero")))

    axes = elements, elements, *(modulation(v, x, rows.start) for v in of_scale), *(range(*normalized),) * 2
    made: tuple[Tensor, Tensor] = by_row(run, tensors, axes, normalized, masking)
    return made
