"""A small UNet that denoises digits, as in diffusion models: GroupNorm, SiLU, convolution, attention.

    python examples/unet_denoising.py

Needs scikit-learn. Trains the same network twice and compares every weight, then prints what `lean("norm")`
and `lean("conv")` keep.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from digits import data
from measure import held, same_weights
from torch import nn

import leannorm

BATCH, STEPS = 32, 8


class Residual(nn.Module):
    """Two convolutions; the diffusion time scales and shifts the output of the second norm."""

    def __init__(self, channels_in, channels):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, channels_in), nn.Conv2d(channels_in, channels, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(32, 2 * channels)
        self.skip = nn.Identity() if channels_in == channels else nn.Conv2d(channels_in, channels, 1)

    def forward(self, x, time):
        y = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(time)[:, :, None, None].chunk(2, 1)
        return self.skip(x) + self.conv2(F.silu(self.norm2(y) * (1 + scale) + shift))


class Attention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x):
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).unsqueeze(1).chunk(3, -1)
        y = self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return x + y.transpose(1, 2).view_as(x)


class UNet(nn.Module):
    """Maps images (N, 1, 16, 16) and times (N,) in [0, 1] to the noise in the images."""

    def __init__(self, width=32):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.fine, self.coarse = Residual(width, width), Residual(width, 2 * width)
        self.attention = Attention(2 * width)
        self.up = Residual(3 * width, width)

    def forward(self, x, time):
        angles = time[:, None] * torch.exp(torch.linspace(0.0, 6.0, 16))
        time = torch.cat([angles.sin(), angles.cos()], 1)
        fine = self.fine(self.first(x), time)
        coarse = self.attention(self.coarse(F.avg_pool2d(fine, 2), time))
        joined = torch.cat([fine, F.interpolate(coarse, scale_factor=2.0)], 1)
        return self.last(F.silu(self.up(joined, time)))


def loss_of(model, images, seed):
    """The squared error of the predicted noise, at random times."""
    random = torch.Generator().manual_seed(seed)
    time, noise = torch.rand(len(images), generator=random), torch.randn(images.shape, generator=random)
    share = torch.cos(time * torch.pi / 2)[:, None, None, None]
    return F.mse_loss(model(share * images + (1 - share**2).sqrt() * noise, time), noise)


def train(around):
    (images, _), _ = data()
    torch.manual_seed(0)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step, batch in enumerate(images.split(BATCH)[:STEPS]):
        with around:
            loss = loss_of(model, batch, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
    return model, images


def main():
    stock, images = train(nullcontext())
    model, _ = train(leannorm.lean())
    same_weights(stock, model)
    for recompute in ("norm", "conv"):
        print(f"lean({recompute!r})", end=" ")
        held(model, lambda: loss_of(model, images[:BATCH], 0), recompute=recompute)


if __name__ == "__main__":
    main()
