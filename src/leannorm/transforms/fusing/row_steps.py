"""The calls of a converted block around a layer or RMS norm: an addition before it, a modulation behind it.

As in `steps.py`, whether they are one pass is decided at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from leannorm import nn
from leannorm.functional.layer import add_layer_norm, add_rms_norm
from leannorm.functional.modulated import ada_layer_norm, ada_rms_norm, add_ada_layer_norm, add_ada_rms_norm
from leannorm.ops.modes import autocasts, leaving
from leannorm.transforms.fusing.observed import is_plain_tensor, is_unobserved
from leannorm.transforms.recognizing.formula_call import RowNorm

_ROW_NORMS = (nn.LayerNorm, nn.RMSNorm)
SMALL = 1 << 17  # elements, below which the norm once and its products are as fast as the norm twice


def is_row_norm(cls: type) -> bool:
    """Is it a class of leannorm's whose layers can be computed with an addition before them?"""
    return cls in _ROW_NORMS or hasattr(cls, "add_and_normalize")


def add_then_norm(a: Any, b: Any, norm: Any, *modulation: Any) -> Any:
    """`r = a + b` and `norm(r)`: in one pass, if the norm is leannorm's and both are plain tensors alike.

    `modulation` is that of `norm_then_modulate`, for `norm(r) * (one + scale) + shift`.
    """
    found = _added_and_normalized(a, b, norm, *modulation[1:]) if is_row_norm(type(norm)) else None
    if found is not None:
        return found
    r = a + b
    return r, norm_then_modulate(norm, r, *modulation) if modulation else norm(r)


def _added_and_normalized(a: Any, b: Any, norm: Any, *modulation: Any) -> Any:
    if not (is_plain_tensor(a) and is_plain_tensor(b) and is_unobserved(norm)) or leaving():
        return None
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device) or not a.is_floating_point():
        return None
    if modulation:
        return _modulated(norm, a, b, modulation)
    if type(norm) not in _ROW_NORMS:
        return norm.add_and_normalize(a, b)
    if not all(t is None or is_plain_tensor(t) for t in norm._parameters.values()):
        return None
    given = (a, b, norm.normalized_shape, norm.weight)
    if type(norm) is nn.LayerNorm:
        y, r = add_layer_norm(*given, norm.bias, norm.eps, dim=norm.dim)
    else:
        how = {"dim": norm.dim, "weight_offset": norm.weight_offset, "cast": norm.cast}
        y, r = add_rms_norm(*given, norm.eps, **how)
    return r, y


def norm_then_modulate(norm: Any, x: Any, one: Any, scale: Any, *shift: Any) -> Any:
    """`norm(x) * (one + scale) + shift`, with or without shift; in one pass, if it can be. `one` is 1."""
    if _may_be_modulated(norm, x):
        found = _modulated(norm, x, None, (scale, *shift))
        if found is not None:
            return found
    return scaled_and_shifted(norm(x), one, scale, *shift)


def norm_then_modulate_each(norm: Any, x: Any, *modulations: tuple[Any, ...]) -> tuple[Any, ...]:
    """`y * (one + scale) + shift` for each of the modulations of `y = norm(x)`; each is that of
    `norm_then_modulate`, and in one pass, if all of them can be."""
    if _may_be_modulated(norm, x) and x.numel() >= SMALL:
        found = [_modulated(norm, x, None, given) for _, *given in modulations]
        if all(y is not None for y in found):
            return tuple(found)
    y = norm(x)
    return tuple(scaled_and_shifted(y, *modulation) for modulation in modulations)


def scaled_and_shifted(y: Any, one: Any, scale: Any, *shift: Any) -> Any:
    """`y * (one + scale) + shift`, with or without shift, as it is written."""
    scaled = y * (one + scale)
    return scaled + shift[0] if shift else scaled


def _may_be_modulated(norm: Any, x: Any) -> bool:
    """May a norm of x and what is behind it be one pass, as far as the norm and x tell?"""
    return is_row_norm(type(norm)) and is_plain_tensor(x) and is_unobserved(norm) and not leaving()


def _modulated(norm: Any, x: Tensor, branch: Tensor | None, modulation: Sequence[Any]) -> Any:
    """The modulated norm of x, or of x + branch behind the sum; None where ours computes another thing."""
    row = _as_row_norm(norm, x)
    if row is None or autocasts(x):
        return None
    start = x.dim() - len(row.sizes)
    if not all(is_plain_tensor(m) and _modulates(m, x, start) for m in modulation):
        return None
    scale, shift = (*modulation, None)[:2]
    if shift is not None and shift.shape != scale.shape:
        return None
    if row.rms:
        rms = (row.sizes, scale, row.eps, row.weight, shift)
        return ada_rms_norm(x, *rms) if branch is None else add_ada_rms_norm(x, branch, None, *rms)[::-1]
    assert row.eps is not None
    layer = (row.sizes, scale, shift, row.eps, row.weight, row.bias)
    return ada_layer_norm(x, *layer) if branch is None else add_ada_layer_norm(x, branch, None, *layer)[::-1]


def _as_row_norm(norm: Any, x: Tensor) -> RowNorm | None:
    """What the norm computes of x, if it is the plain norm of the last axes."""
    if type(norm) not in _ROW_NORMS:
        return norm.row_norm_of(x)  # type: ignore[no-any-return]
    if norm.dim is not None or not all(t is None or is_plain_tensor(t) for t in norm._parameters.values()):
        return None
    sizes, weight = tuple(norm.normalized_shape), norm.weight
    if type(norm) is nn.LayerNorm:
        return RowNorm(False, sizes, norm.eps, weight, norm.bias)
    plain = not norm.weight_offset and norm.cast == "after"
    return RowNorm(True, sizes, norm.eps, weight) if plain else None


def _modulates(value: Tensor, x: Tensor, start: int) -> bool:
    """Is it one of x's dtype that torch broadcasts as our functions do?"""
    if (value.dtype, value.device, value.dim()) != (x.dtype, x.device, x.dim()):
        return False
    sizes = zip(value.shape[:start], x.shape[:start], strict=True)
    return value.shape[start:] == x.shape[start:] and all(n in (1, m) for n, m in sizes)
