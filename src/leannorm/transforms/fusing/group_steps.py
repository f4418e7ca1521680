"""Group norm with a scale and a shift of every sample behind it, in one pass.

As in `steps.py` and `row_steps.py`, whether it is one pass is decided at every call. In memory the samples of
a contiguous batch are further channels: (N, C, *) is (1, N * C, *) with N times as many groups, and what each
sample has of its own is then weight and bias.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from leannorm.functional.group import group_norm_act
from leannorm.ops.modes import autocasts, leaving
from leannorm.ops.precision import compute_dtype
from leannorm.transforms.fusing.observed import is_plain_tensor
from leannorm.transforms.fusing.row_steps import scaled_and_shifted

_GROUP_NORM = F.group_norm
SMALL = 1 << 16  # elements, below which making weight and bias takes longer than the passes that are saved
_PLAIN = (Tensor, Parameter)


class GroupForm(NamedTuple):
    """What a group norm is given beside its input."""

    num_groups: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def can_modulate(norm: GroupForm, x: Tensor, modulation: tuple[Any, ...]) -> bool:
    """Is `norm(x) * (1 + scale) + shift` one pass? `modulation` is scale, or scale and shift.

    Not of a small input, under autocast, or where a compiler joins the product and the sum itself.
    """
    if torch.compiler.is_compiling() or x.numel() < SMALL or leaving() or autocasts(x):
        return False
    parameters = [t for t in (norm.weight, norm.bias) if t is not None]
    if not all(map(_is_plain, (x, *modulation, *parameters))) or not x.is_floating_point():
        return False
    if x.dim() < 2 or x.shape[1] % norm.num_groups or any(t.shape != x.shape[1:2] for t in parameters):
        return False
    samples, *rest = x.shape
    if type(samples) is not int or samples == 0 or math.prod(rest) // norm.num_groups < 2:
        return False
    return (samples == 1 or x.is_contiguous()) and all(_is_of_samples(m, x) for m in modulation)


def modulated_group_norm(norm: GroupForm, x: Tensor, modulation: tuple[Tensor, ...], act: str) -> Tensor:
    """`act(norm(x) * (1 + scale) + shift)`, where `can_modulate` says so."""
    samples, dtype = x.shape[0], compute_dtype(x)
    scale, *shifts = (_of_each_sample(m, samples, dtype) for m in modulation)
    weight = scale + 1
    bias = shifts[0] if shifts else torch.zeros_like(weight)
    if norm.bias is not None:
        bias = torch.addcmul(bias.view(samples, -1), weight.view(samples, -1), norm.bias.to(dtype)).view(-1)
    if norm.weight is not None:
        weight = (weight.view(samples, -1) * norm.weight.to(dtype)).view(-1)
    if samples == 1:
        return group_norm_act(x, norm.num_groups, weight, bias, norm.eps, act=act)
    y = group_norm_act(
        x.view(1, -1, *x.shape[2:]), samples * norm.num_groups, weight, bias, norm.eps, act=act
    )
    return y.view(x.shape)


def _of_each_sample(value: Tensor, samples: int, dtype: torch.dtype) -> Tensor:
    """One value a channel of each sample, as one line."""
    value = value if value.shape[0] == samples else value.expand(samples, *value.shape[1:])
    return value.reshape(-1).to(dtype)


def function_then_modulate(
    function: Any, given: tuple[Any, ...], named: Mapping[str, Any], one: Any, scale: Any, *shift: Any
) -> Any:
    """`function(...) * (one + scale) + shift`, in one pass where it is torch's group norm. `one` is 1."""
    norm = _group_form(*given, **named) if function is _GROUP_NORM and given else None
    if norm is not None and can_modulate(norm, given[0], (scale, *shift)):
        return modulated_group_norm(norm, given[0], (scale, *shift), "identity")
    return scaled_and_shifted(function(*given, **named), one, scale, *shift)


def _group_form(
    input: Any, num_groups: Any = None, weight: Any = None, bias: Any = None, eps: Any = 1e-5, **more: Any
) -> GroupForm | None:
    """The arguments of torch's group norm; None where they are not what they should be."""
    fits = isinstance(input, Tensor) and type(num_groups) is int and num_groups > 0 and not more
    return GroupForm(num_groups, weight, bias, eps) if fits and type(eps) is float and eps >= 0 else None


def _is_plain(value: Any) -> bool:
    """Is it a dense tensor without a say of its own?"""
    if not is_plain_tensor(value) or value.layout is not torch.strided:
        return False
    return type(value) in _PLAIN or not is_traceable_wrapper_subclass(value)


def _is_of_samples(value: Tensor, x: Tensor) -> bool:
    """Is it one value a channel, of each sample or of all, in x's dtype?"""
    if (value.dtype, value.device, value.dim()) != (x.dtype, x.device, x.dim()):
        return False
    samples, channels, *positions = value.shape
    return samples in (1, x.shape[0]) and channels == x.shape[1] and all(n == 1 for n in positions)
