"""Blocks of transformers and of a diffusion model with 16-bit parameters, timed by steps.py."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.networks import Block


class LlamaBlock(nn.Module):
    """RMS norms, causal attention with rotary positions, SwiGLU (Touvron et al., 2023, arXiv:2302.13971)."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        size = c // self.heads
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, size).permute(2, 0, 3, 1, 4)
        rate = 10000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
        angle = torch.outer(torch.arange(n, device=x.device), rate).repeat(1, 2)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        q, k = (t * cos + torch.cat((-t[..., size // 2 :], t[..., : size // 2]), -1) * sin for t in (q, k))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(b, n, c))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Residual(nn.Module):
    """GroupNorm, SiLU and a convolution, twice, with a shortcut."""

    def __init__(self, width: int, groups: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(groups, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(groups, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Attention(nn.Module):
    """Attention over all positions of an image."""

    def __init__(self, width: int, groups: int = 32) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        qkv = self.qkv(self.norm(x).flatten(2).transpose(1, 2)).view(n, h * w, 3, c // 64, 64)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(n, h * w, c)).transpose(1, 2).view(n, c, h, w)


Made = tuple[nn.Module, tuple[int, ...]]
# several blocks each, as one keeps little; shapes of Llama-2-7B, ViT-L/16 and Stable Diffusion's UNet
BLOCKS: dict[str, tuple[Callable[[], Made], Callable[[], Made]]] = {
    "Llama": (
        lambda: (nn.Sequential(*(LlamaBlock(4096, 11008, 32) for _ in range(4))), (2, 4096, 4096)),
        lambda: (nn.Sequential(LlamaBlock(32, 48, 2)), (2, 6, 32)),
    ),
    "ViT": (
        lambda: (nn.Sequential(*(Block(1024, 16) for _ in range(8))), (128, 197, 1024)),
        lambda: (nn.Sequential(Block(32, 2)), (2, 5, 32)),
    ),
    "UNet": (
        lambda: (
            nn.Sequential(Residual(320), Attention(320), Residual(320), Attention(320)),
            (8, 320, 64, 64),
        ),
        lambda: (nn.Sequential(Residual(64, 2), Attention(64, 2)), (2, 64, 3, 3)),
    ),
}


def with_liger(model: nn.Module) -> nn.Module | None:
    """A copy with Liger's RMS norms; None if Liger cannot be imported, or has no norm of the model."""
    try:
        from liger_kernel.transformers import LigerRMSNorm
    except Exception:  # not installed, or built for another torch
        return None
    model = copy.deepcopy(model)
    found = False
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.RMSNorm:
                other = LigerRMSNorm(child.normalized_shape[0], child.eps)
                other.weight = child.weight
                setattr(module, name, other)
                found = True
    return model if found else None
