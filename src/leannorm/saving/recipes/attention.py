"""Scaled dot product attention: its output is computed again from queries, keys and values.

Only without dropout, whose random numbers a kernel draws itself. The statistics of the softmax, one number a
row, are held.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from leannorm.saving.graph import inputs_of, kind_of, saved
from leannorm.saving.recipes.products import is_long
from leannorm.saving.recipes.registry import ValueOf, recipe
from leannorm.saving.steps import Step

_aten = torch.ops.aten
MOST = 1024
"""Operations for each value of the output, above which it is costly: 256 keys. At a width of 384 this is a
thirtieth of a step."""


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    *mask, causal, scale = rest
    attend = _aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = attend(q, k, v, 0.0, causal, attn_mask=mask[0] if mask else None, scale=scale)[0]
    return output


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    output: Tensor = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[0]
    return output


def _efficient(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    *mask, causal, scale = rest
    attend = _aten._scaled_dot_product_efficient_attention
    output: Tensor = attend(q, k, v, mask[0] if mask else None, True, 0.0, causal, scale=scale)[0]
    return output


def _cudnn(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    *mask, causal, scale = rest
    attend = _aten._scaled_dot_product_cudnn_attention
    output: Tensor = attend(q, k, v, mask[0] if mask else None, True, 0.0, causal, False, scale=scale)[0]
    return output


_ATTENTIONS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "ScaledDotProductFlashAttentionForCpuBackward0": (_on_cpu, "attn_mask"),
    "ScaledDotProductFlashAttentionBackward0": (_flash, ""),
    "ScaledDotProductEfficientAttentionBackward0": (_efficient, "attn_bias"),
    "ScaledDotProductCudnnAttentionBackward0": (_cudnn, "attn_bias"),
}
ATTENTIONS = set(_ATTENTIONS)


@recipe(*_ATTENTIONS)
def attention(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    function, mask_name = _ATTENTIONS[kind_of(node)]
    inputs = [saved(node, name) for name in ("query", "key", "value")]
    if mask_name and getattr(node, f"_raw_saved_{mask_name}").data is not None:
        inputs.append(saved(node, mask_name))
    q, k = inputs_of(node)[:2]
    if output or node._saved_dropout_p or None in inputs or q is None or k is None:
        return None
    known = tuple(value for value in inputs if value is not None)
    if any(map(is_long, known)):
        return None
    flops = 4 * prod(q.shape) * k.shape[-2]
    constants = node._saved_is_causal, node._saved_scale
    costly = flops > MOST * prod(node._input_metadata[0].shape)
    return Step(function, known, (), constants, kind="attention", flops=flops, costly=costly)
