"""The networks that are trained on the stand-in for a GPU, and the settings."""

import torch
import torch.nn.functional as F
from torch import nn

from leannorm import convert

SETTINGS = {
    "plain": {},
    "norm": {"recompute": "norm"},
    "conv": {"recompute": "conv"},
    "budget": {"budget": 0.4},
    "limit": {"limit": "64GiB"},
}
REPLAYED, GRAPHED = ("plain", "norm", "conv", "budget"), ("norm", "conv")
"""Of captured steps, and of `torch.cuda.make_graphed_callables`."""

LAUNCHED = [
    (name, which)
    for name in ("cnn", "vit", "vit with dropout", "llama", "unet")
    for which in ("norm", "conv", "budget")
]
"""Whose passes are counted."""


class Rotary(nn.Module):
    """A block of a Llama: RMS norms, rotary embeddings, attention, a gated linear unit."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads, self.one, self.two = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def turned(self, x):
        angles = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] * 0.1
        one, two = x.float().chunk(2, -1)
        turned = torch.cat(
            [one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], -1
        )
        return turned.to(x.dtype)

    def forward(self, x):
        q, k, v = self.qkv(self.one(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.two(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class UNet(nn.Module):
    """Down, up, and a skip connection."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(48, 8, 3, padding=1)
        self.norm, self.below, self.pool = (
            nn.GroupNorm(4, 16),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.MaxPool2d(2),
        )
        self.after = nn.GroupNorm(4, 48)

    def forward(self, x):
        skip = F.silu(self.norm(self.first(x)))
        y = F.interpolate(F.silu(self.below(self.pool(skip))), scale_factor=2.0)
        return self.last(F.silu(self.after(torch.cat([y, skip], 1))))


def cnn():
    """Convolutions, batch norms, an activation in place, pooling and dropout."""
    one, two = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)
    head = nn.Flatten(), nn.Linear(16 * 100, 10)
    norms = nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2), two, nn.BatchNorm2d(16), nn.SiLU()
    return nn.Sequential(one, *norms, *head)


def vit(dropout=0.0):
    """Two blocks of a transformer."""
    layer = nn.TransformerEncoderLayer(
        32, 4, 96, dropout=dropout, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


IMAGE, TOKENS = (4, 3, 26, 26), (4, 48, 32)
MODELS = {
    "cnn": (cnn, IMAGE),
    "converted cnn": (lambda: convert(cnn()), IMAGE),
    "vit": (vit, TOKENS),
    "vit with dropout": (lambda: vit(0.1), TOKENS),
    "converted vit": (lambda: convert(vit()), TOKENS),
    "llama": (lambda: nn.Sequential(Rotary(), Rotary()), TOKENS),
    "unet": (UNet, (4, 3, 16, 16)),
}
CASTS = ("cnn", "vit", "llama")
