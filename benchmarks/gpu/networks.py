"""ResNet-50 and a vision transformer: torchvision's or timm's, or plain versions if neither is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution with a shortcut; the 3x3 one has the stride, as in torchvision."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride > 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += shortcut
        return self.relu(out)


def resnet(width: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> nn.Module:
    """The bottleneck ResNet (He et al., 2015, arXiv:1512.03385); ResNet-50 by default."""
    widths = [width * 2**i for i in range(len(blocks))]
    inputs = [width, *(4 * w for w in widths)]
    stages = []
    for i, ((before, _), here, count) in enumerate(zip(pairwise(inputs), widths, blocks, strict=True)):
        first = Bottleneck(before, here, 1 if i == 0 else 2)
        stages.append(nn.Sequential(first, *(Bottleneck(4 * here, here, 1) for _ in range(count - 1))))
    stem = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs[-1], classes)
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *stages, *head)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, c // self.heads)
        attention = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
        x = x + self.proj(attention.transpose(1, 2).reshape(b, n, c))
        return x + self.mlp(self.norm2(x))


class Tokens(nn.Module):
    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2).transpose(1, 2)


class FirstToken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def vit(
    width: int = 768, depth: int = 12, heads: int = 12, patch: int = 16, classes: int = 1000
) -> nn.Module:
    """A vision transformer (Dosovitskiy et al., 2020, arXiv:2010.11929) without position embedding."""
    blocks = (Block(width, heads) for _ in range(depth))
    head = nn.LayerNorm(width), FirstToken(), nn.Linear(width, classes)
    return nn.Sequential(Tokens(width, patch), nn.Sequential(*blocks), *head)


_NAMES = {"resnet50": ("resnet50", "resnet50"), "vit": ("vit_b_16", "vit_base_patch16_224")}


def builder(name: str, smoke: bool) -> tuple[str, Callable[[], nn.Module]]:
    """The source of the network, and a function that makes one with random weights."""
    if smoke:
        tiny = {"resnet50": lambda: resnet(8, (1,), 10), "vit": lambda: vit(32, 1, 2, 8, 10)}
        return "plain, tiny", tiny[name]
    for library, entry in zip(("torchvision", "timm"), _NAMES[name], strict=True):
        try:
            if library == "torchvision":
                from torchvision.models import get_model as make
            else:
                from timm import create_model as make
            make(entry)
        except Exception:  # not installed, or built for another torch
            continue
        return f"{library}:{entry}", partial(make, entry)
    plain: dict[str, Callable[[], nn.Module]] = {"resnet50": resnet, "vit": vit}
    return "plain", plain[name]
