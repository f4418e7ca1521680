"""Norms of today's networks: their tensors, leannorm's functions, and the formulas that networks write.

The names of tensors are those of `shapes.Set`: `weight` and `bias` are also a scale and a shift, `residual`
is also a branch or a gate of the input's shape, and `mean` is also the gate of a branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leannorm import functional

EPS = 1e-5
GROUPS = 32
# memory traffic forward and backward, in sizes of the input, if it is not that of a Set's tensors
MOVED = {"ada of a token": (4, 5), "add ada": (4, 6), "gated": (3, 5)}
KINDS = ("ada", "ada of a token", "add ada", "gated", "offset", "heads", "group")


def tensors(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """x, weight, bias, residual, mean, var and dy."""

    def full() -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def line(*places: int) -> Tensor:
        features = shape[1] if kind == "group" else shape[-1]
        return (torch.randn(*places, features, device=device) / 2).to(dtype).requires_grad_()

    if kind == "heads":
        batch, length, heads, size = shape
        x = torch.randn(batch, length, 3, heads, size, device=device, dtype=dtype)[:, :, 0]
    else:
        x = full()
    if kind == "group":
        x = x.contiguous(memory_format=torch.channels_last)
    places = {"ada": shape[:1], "ada of a token": shape[:2], "add ada": shape[:1]}.get(kind, ())
    gate = line(*places) if kind == "add ada" else torch.zeros((), device=device)
    residual = full().requires_grad_() if kind in ("add ada", "gated") else None
    var = torch.ones((), device=device)
    dy = torch.randn_like(x.contiguous() if kind == "heads" else x)
    return x.requires_grad_(), line(*places), line(*places), residual, gate, var, dy


def _wide(line: Tensor, x: Tensor) -> Tensor:
    """(N, C) as (N, 1, C)."""
    return line.unsqueeze(1) if line.dim() < x.dim() else line


def _root(value: Tensor) -> Tensor:
    return value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + EPS)


def _float(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def _modulated(s: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], None, None, EPS) * (1 + _wide(s.weight, x)) + _wide(s.bias, x)


def formula(kind: str) -> Callable[[Any], Tensor]:
    """The norm as diffusers, Mamba and transformers write it."""
    return {
        "ada": lambda s: _modulated(s, s.x),
        "ada of a token": lambda s: _modulated(s, s.x),
        "add ada": lambda s: _modulated(s, s.x + _wide(s.mean, s.x) * s.residual),
        "gated": lambda s: (_root(_float(s.x)) * s.weight * F.silu(_float(s.residual))).to(s.x.dtype),
        "offset": lambda s: (_root(_float(s.x)) * (1.0 + _float(s.weight))).to(s.x.dtype),
        "heads": lambda s: s.weight * _root(_float(s.x)).to(s.x.dtype),
        "group": lambda s: F.silu(F.group_norm(s.x, min(GROUPS, s.x.shape[1]), s.weight, s.bias, EPS)),
    }[kind]


def ours(kind: str) -> Callable[[Any], Tensor]:
    def last(s: Any) -> torch.Size:
        return s.x.shape[-1:]

    return {
        "ada": lambda s: functional.ada_layer_norm(s.x, last(s), s.weight, s.bias, EPS),
        "ada of a token": lambda s: functional.ada_layer_norm(s.x, last(s), s.weight, s.bias, EPS),
        "add ada": lambda s: functional.add_ada_layer_norm(
            s.x, s.residual, s.mean, last(s), s.weight, s.bias, EPS
        )[0],
        "gated": lambda s: functional.gated_rms_norm(s.x, s.residual, last(s), s.weight, EPS),
        "offset": lambda s: functional.rms_norm(s.x, last(s), s.weight, EPS, weight_offset=1.0),
        "heads": lambda s: functional.rms_norm(s.x, last(s), s.weight, EPS, cast="before"),
        "group": lambda s: functional.group_norm_act(
            s.x, min(GROUPS, s.x.shape[1]), s.weight, s.bias, EPS, act="silu"
        ),
    }[kind]


def others(kind: str) -> dict[str, Callable[[Any], Tensor]]:
    """The norm of other libraries that have it and can be imported."""
    found: dict[str, Callable[[Any], Tensor]] = {}
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        how = {"offset": (1.0, "gemma", False), "heads": (0.0, "llama", False)}.get(kind)
        if how is not None:
            found["liger"] = lambda s: LigerRMSNormFunction.apply(s.x, s.weight, EPS, *how)
    except Exception:  # not installed, or built for another torch
        pass
    try:
        from quack import rmsnorm

        if kind == "offset":
            found["quack"] = lambda s: rmsnorm(s.x, 1.0 + s.weight, eps=EPS)
    except Exception:
        pass
    return found
