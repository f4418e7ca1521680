"""Norms that transformers and diffusers write by hand, paired with leannorm's: `benchmarks.rows` times them.

Each pair is called as a model calls it, so autograd's own overhead is included. `traffic` is the memory
traffic that is needed forward and backward, in copies of the input (`x.clone()`). `reach` is the goal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leannorm import functional

EPS = 1e-6
LINES = ((8192, 768), (4096, 1024), (2048, 4096))
TOKENS = ((4, 1024, 1152), (2, 2048, 3072))
HEADS = ((2, 1024, 16, 128), (2, 2048, 8, 64))
IMAGES = ((2, 320, 64, 64), (2, 640, 32, 32), (2, 1280, 16, 16))
Results = Tensor | tuple[Tensor, Tensor]


class Formula(NamedTuple):
    """A norm as both sides write it. `make` returns the leaves for a shape; the first one is the input."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    make: Callable[..., list[Tensor]]
    ours: Callable[..., Results]
    theirs: Callable[..., Results]
    traffic: tuple[float, float]
    reach: tuple[float, float]


def llama(x: Tensor, weight: Tensor) -> Tensor:
    """transformers' LlamaRMSNorm."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    """transformers' GemmaRMSNorm."""
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (y * (1.0 + weight.float())).type_as(x)


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """diffusers' AdaLayerNormZero, and DiT's `modulate`."""
    return F.layer_norm(x, x.shape[-1:], None, None, EPS) * (1 + scale[:, None]) + shift[:, None]


def gated_sum(x: Tensor, branch: Tensor, gate: Tensor, scale: Tensor, shift: Tensor) -> Results:
    """The step between two branches of a DiT block."""
    x = x + gate[:, None] * branch
    return modulated(x, scale, shift), x


def qwen(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """transformers' Qwen3NextRMSNormGated."""
    y = llama(x, weight)
    return (y * F.silu(gate.to(torch.float32))).to(x.dtype)


def mamba(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """transformers' MambaRMSNormGated."""
    wide = x.to(torch.float32) * F.silu(gate.to(torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def _random(*shapes: Any) -> Callable[..., list[Tensor]]:
    """Random leaves: of the input's shape ("x"), per sample ("n"), per channel ("c"), along axis 1 ("1")."""

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        sizes = {"x": shape, "n": (shape[0], shape[-1]), "c": shape[-1:], "1": shape[1:2]}
        return [torch.randn(sizes[s]).to(dtype).requires_grad_() for s in shapes]

    return make


def _heads(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """A slice of a fused QKV projection, as queries are."""
    n, tokens, heads, size = shape
    qkv = torch.randn(n, tokens, 3, heads, size).to(dtype)
    return [qkv[:, :, 0].requires_grad_(), torch.randn(size).to(dtype).requires_grad_()]


def _channels_last(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    x, *rest = _random("x", "1", "1")(shape, dtype)
    return [x.detach().to(memory_format=torch.channels_last).requires_grad_(), *rest]


def _group_act(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.group_norm_act(x, 32, weight, bias, EPS)


def _group_then_act(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32, weight, bias, EPS))


def _last(function: Callable[..., Results], **how: Any) -> Callable[..., Results]:
    """RMS norm over the last axis."""
    return lambda x, weight: function(x, x.shape[-1:], weight, EPS, **how)


FORMULAS = (
    Formula(
        "Llama's RMS norm",
        LINES,
        _random("x", "c"),
        _last(functional.rms_norm, cast="before"),
        llama,
        (1.0, 1.5),
        (4.0, 6.0),
    ),
    Formula(
        "Gemma's RMS norm",
        LINES,
        _random("x", "c"),
        _last(functional.rms_norm, weight_offset=1.0),
        gemma,
        (1.0, 1.5),
        (4.0, 6.0),
    ),
    Formula(
        "RMS norm of heads",
        HEADS,
        _heads,
        _last(functional.rms_norm, cast="before"),
        llama,
        (1.0, 1.5),
        (4.0, 4.0),
    ),
    Formula(
        "AdaLN",
        TOKENS,
        _random("x", "n", "n"),
        lambda x, scale, shift: functional.ada_layer_norm(x, x.shape[-1:], scale, shift, EPS),
        modulated,
        (1.0, 1.5),
        (3.0, 3.0),
    ),
    Formula(
        "gated sum, AdaLN",
        TOKENS,
        _random("x", "x", "n", "n", "n"),
        lambda x, branch, gate, scale, shift: functional.add_ada_layer_norm(
            x, branch, gate, x.shape[-1:], scale, shift, EPS
        ),
        gated_sum,
        (2.0, 3.5),
        (3.0, 3.0),
    ),
    Formula(
        "gate behind RMS norm",
        LINES,
        _random("x", "x", "c"),
        lambda x, gate, w: functional.gated_rms_norm(x, gate, w.shape, w, EPS, cast="before"),
        qwen,
        (1.5, 2.5),
        (3.0, 3.0),
    ),
    Formula(
        "gate before RMS norm",
        LINES,
        _random("x", "x", "c"),
        lambda x, gate, w: functional.gated_rms_norm(x, gate, w.shape, w, EPS, "silu", False, cast="before"),
        mamba,
        (1.5, 2.5),
        (3.0, 3.0),
    ),
    Formula(
        "group norm, SiLU",
        IMAGES,
        _random("x", "1", "1"),
        _group_act,
        _group_then_act,
        (1.0, 1.5),
        (1.8, 1.8),
    ),
    Formula(
        "group norm, SiLU, NHWC",
        IMAGES,
        _channels_last,
        _group_act,
        _group_then_act,
        (1.0, 1.5),
        (2.3, 2.3),
    ),
)
