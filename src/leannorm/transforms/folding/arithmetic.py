"""The arithmetic of folding a batch norm in evaluation into a neighbouring layer's weight and bias."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Affine(NamedTuple):
    """y = scale * x + shift for each channel, in float64."""

    scale: Tensor
    shift: Tensor


def affine(mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Affine:
    """Evaluation-mode batch norm as scale and shift of each channel."""
    mean, var = mean.detach().double(), var.detach().double()
    scale = torch.rsqrt(var + eps)
    scale = scale if weight is None else scale * weight.detach().double()
    shift = -mean * scale
    return Affine(scale, shift if bias is None else shift + bias.detach().double())


def into_layer_before(
    norm: Affine, kind: str, weight: Tensor, bias: Tensor | None, groups: int
) -> tuple[Tensor, Tensor]:
    """Weight and bias of one layer that computes the layer, then the norm; in the layer's dtype.

    A convolution's weight is (out, in / groups, *), a linear layer's (out, in), a transposed convolution's
    (in, out / groups, *), where the outputs of a group are neighbours.
    """
    w = weight.detach().double()
    if kind == "transposed":
        rows, per_group = w.shape[0], w.shape[1]
        scale = norm.scale.reshape(groups, 1, per_group).expand(groups, rows // groups, per_group)
        scale = scale.reshape(rows, per_group)
        w = w * scale.reshape(*scale.shape, *(1,) * (w.dim() - 2))
    else:
        w = w * norm.scale.reshape(-1, *(1,) * (w.dim() - 1))
    b = norm.shift if bias is None else norm.shift + norm.scale * bias.detach().double()
    return w.to(weight.dtype), b.to(weight.dtype if bias is None else bias.dtype)


def into_layer_after(
    norm: Affine, kind: str, weight: Tensor, bias: Tensor | None, groups: int
) -> tuple[Tensor, Tensor]:
    """Weight and bias of one layer that computes the norm, then the layer.

    Exact only if the layer reads no zeros that are not of its input, or the norm's shift is 0.
    """
    w = weight.detach().double()
    if kind == "transposed":
        inputs, outputs = w.shape[0] // groups, w.shape[1]
        grouped = w.reshape(groups, inputs, outputs, -1)
        scaled = (grouped * norm.scale.reshape(groups, inputs, 1, 1)).reshape(w.shape)
        added = (grouped.sum(-1) * norm.shift.reshape(groups, inputs, 1)).sum(1).flatten()
    else:
        outputs, inputs = w.shape[0] // groups, w.shape[1]
        grouped = w.reshape(groups, outputs, inputs, -1)
        scaled = (grouped * norm.scale.reshape(groups, 1, inputs, 1)).reshape(w.shape)
        added = (grouped.sum(-1) * norm.shift.reshape(groups, 1, inputs)).sum(-1).flatten()
    b = added if bias is None else added + bias.detach().double()
    return scaled.to(weight.dtype), b.to(weight.dtype if bias is None else bias.dtype)
