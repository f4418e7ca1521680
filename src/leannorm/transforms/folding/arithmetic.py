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


def _by_feature(v: Tensor, w: Tensor, axis: int, groups: int) -> Tensor:
    """A value a feature, to multiply a weight; features are on axis 1 or 2 of (groups, rows, columns)."""
    sizes = [groups, 1, 1]
    sizes[axis] = -1
    of_weight = v.reshape(sizes).expand(groups, w.shape[0] // groups, w.shape[1])
    return of_weight.reshape(*w.shape[:2], *(1,) * (w.dim() - 2))


def into_layer_before(
    norm: Affine, kind: str, weight: Tensor, bias: Tensor | None, groups: int
) -> tuple[Tensor, Tensor]:
    """Weight and bias of one layer that computes the layer, then the norm; in the layer's dtype.

    A convolution's weight is (out, in / groups, *), a linear layer's (out, in), a transposed convolution's
    (in, out / groups, *), where the outputs of a group are neighbours.
    """
    w = weight.detach().double()
    w = w * _by_feature(norm.scale, w, 2 if kind == "transposed" else 1, groups)
    b = norm.shift if bias is None else norm.shift + norm.scale * bias.detach().double()
    return w.to(weight.dtype), b.to(weight.dtype if bias is None else bias.dtype)


def into_layer_after(
    norm: Affine, kind: str, weight: Tensor, bias: Tensor | None, groups: int
) -> tuple[Tensor, Tensor]:
    """Weight and bias of one layer that computes the norm, then the layer.

    Exact only if the layer reads no zeros that are not of its input, or the norm's shift is 0.
    """
    w, axis = weight.detach().double(), 1 if kind == "transposed" else 2
    taps = w.reshape(*w.shape[:2], -1).sum(-1)
    b = (taps * _by_feature(norm.shift, taps, axis, groups)).unflatten(0, (groups, -1)).sum(axis).flatten()
    b = b if bias is None else b + bias.detach().double()
    w = w * _by_feature(norm.scale, w, axis, groups)
    return w.to(weight.dtype), b.to(weight.dtype if bias is None else bias.dtype)
