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
from leannorm.autograd.rows import row_norm
from leannorm.functional import stock
from leannorm.functional.declare import Arguments
from leannorm.functional.shards import by_row, modulation
from leannorm.functional.valid import UNMASKED, Masking, masking_of, valid_positions
from leannorm.ops.modes import exporting, sharded
from leannorm.ops.plan import row_statistics_shape

_EPS, _EPS_OF_DOUBLE = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


def dtype_of_cast(call: Arguments) -> torch.dtype:
    """The dtype of a row norm's output: wider than the input if it is rounded before it is multiplied by a
    wider weight."""
    x, weight, cast = call["input"], call["weight"], call.get("cast", "after")
    if weight is None or cast == "after" or call.get("norm_before_gate", False):
        return x.dtype  # type: ignore[no-any-return]
    return torch.promote_types(x.dtype, weight.dtype)


def normalized_rows(call: Arguments) -> Any:
    """y, and of a function that takes a residual also x + gate * residual."""
    get, x, weight, bias, eps = call.get, call["input"], call["weight"], call.get("bias"), call["eps"]
    added, offset, cast, act = "branch" if "branch" in call else "residual", 0.0, "after", get("act")
    tensors = RowTensors(x, get(added), get("gate"), get("scale"), get("shift"), weight, bias)
    if "cast" in call:
        offset, cast = get("weight_offset", 0.0), call["cast"]
        _checks.weight_offset(offset)
        _checks.cast(cast)
    if act is not None:
        _checks.activation(act)
    if tensors.scale is not None:  # it is a weight, or a factor of the weight
        offset = weight is None and bias is None
    if eps is None:
        eps = _EPS_OF_DOUBLE if x.dtype is torch.float64 else _EPS
    of_gate = act, bool(get("norm_before_gate", True))
    form = eps, "bias" not in call, float(offset), cast == "before", *of_gate
    shape, dim = tuple(call["normalized_shape"]), get("dim")
    masking = masking_of(call) if "mask" in call else UNMASKED
    if exporting():  # no size may be read
        start = x.dim() - len(shape) if dim is None else dim % x.dim()
        made = stock.row_norm(tensors, shape, Rows(start, start + len(shape), *form), masking)
    else:
        rows = _checked(tensors, shape, dim, form, added)
        if sharded(*tensors):
            made = _of_shards(tensors, rows, masking)
        else:
            made = row_norm(tensors, rows, _valid_rows(x, rows, masking))
    return made if added in call else made[0]


def _checked(
    tensors: RowTensors, shape: Sequence[int], dim: int | None, form: tuple[Any, ...], added: str
) -> Rows:
    """The norm over the axes that have this shape."""
    x, residual, gate, scale, shift, weight, bias = tensors
    _checks.floating("input", x)
    start, stop = _checks.normalized_axes(x, shape, dim)
    rows = Rows(start, stop, *form)
    _checks.row_parameters(x, shape, weight=weight, bias=bias)
    if scale is not None:
        _checks.modulations(x, start, scale=scale, shift=shift, gate=gate)
        _checks.same_modulation(scale, shift)
    elif rows.act is not None:
        _checks.like_input("gate", gate, x)
    _checks.like_input(added, residual, x)
    _checks.non_negative_eps(rows.eps)
    return rows


def _valid_rows(x: Tensor, rows: Rows, masking: Masking) -> Maybe:
    """Which rows are data, in the statistics' shape; None if all are."""
    if masking is UNMASKED:
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
