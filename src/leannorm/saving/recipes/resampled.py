"""Pooling and interpolation: one pass over tensors that are mostly smaller than those around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leannorm.saving.graph import constant, kind_of, saved
from leannorm.saving.recipes.registry import OfInput, ValueOf, of_input, recipe
from leannorm.saving.steps import Step

_aten = torch.ops.aten
_L, _HW = ("output_size", "scales"), ("output_size", "scales_h", "scales_w")
_DHW = "output_size", "scales_d", "scales_h", "scales_w"


def _between(names: tuple[str, ...]) -> tuple[str, ...]:
    return names[0], "align_corners", *names[1:]


# Moves elements, as a pyramid's sums need them
NEAREST = of_input({
    "UpsampleNearest1DBackward0": OfInput(_aten.upsample_nearest1d, _L, "scale"),
    "UpsampleNearest2DBackward0": OfInput(_aten.upsample_nearest2d, _HW, "scale"),
    "UpsampleNearest3DBackward0": OfInput(_aten.upsample_nearest3d, _DHW, "scale"),
    "UpsampleNearestExact1DBackward0": OfInput(_aten._upsample_nearest_exact1d, _L, "scale"),
    "UpsampleNearestExact2DBackward0": OfInput(_aten._upsample_nearest_exact2d, _HW, "scale"),
    "UpsampleNearestExact3DBackward0": OfInput(_aten._upsample_nearest_exact3d, _DHW, "scale"),
})  # fmt: skip
of_input({
    "UpsampleLinear1DBackward0": OfInput(_aten.upsample_linear1d, _between(_L)),
    "UpsampleBilinear2DBackward0": OfInput(_aten.upsample_bilinear2d, _between(_HW)),
    "UpsampleBicubic2DBackward0": OfInput(_aten.upsample_bicubic2d, _between(_HW)),
    "UpsampleTrilinear3DBackward0": OfInput(_aten.upsample_trilinear3d, _between(_DHW)),
})  # fmt: skip


def _max_pool2d(x: Tensor, *window: Any) -> Tensor:
    y: Tensor = _aten.max_pool2d_with_indices(x, *window)[0]
    return y


def _max_pool3d(x: Tensor, *window: Any) -> Tensor:
    y: Tensor = _aten.max_pool3d_with_indices(x, *window)[0]
    return y


_MAX = "kernel_size", "stride", "padding", "dilation", "ceil_mode"
_AVERAGE = "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"
_POOLED: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "MaxPool2DWithIndicesBackward0": (_max_pool2d, _MAX),
    "MaxPool3DWithIndicesBackward0": (_max_pool3d, _MAX),
    "AvgPool2DBackward0": (_aten.avg_pool2d, _AVERAGE),
    "AvgPool3DBackward0": (_aten.avg_pool3d, _AVERAGE),
}


@recipe(*_POOLED)
def pooled(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """From the input that the node saved; a maximum's positions are held, as its gradient needs them.

    Behind a rebuilt product it is held: it is small, and the next product is then one in a row, not two. A
    maximum takes 10 (on a GPU) to 90 times as long as an activation for the same bytes.
    """
    function, names = _POOLED[kind_of(node)]
    x, constants = saved(node, "self"), tuple(constant(node, name) for name in names)
    if output or x is None or x.products:
        return None
    return Step(function, (x,), (), constants, costly=names is _MAX)
