"""What only a GPU can show of `lean()`: what CUDA's kernels make again has the same bits."""

from __future__ import annotations

import copy

import lean_cases
import pytest
import torch
from test_cuda import pytestmark, repeatable, same_twice, step  # noqa: F401
from test_lean import assert_same
from torch import nn

from leannorm.saving import lean

BLOCKS = {
    "batch norm": (lambda: lean_cases.around(nn.ReLU(), nn.SiLU()), lean_cases.IMAGE),
    "layer norm": (lambda: lean_cases.on_tokens(nn.LayerNorm(32), nn.GELU()), lean_cases.TOKENS),
    "RMS norm": (lambda: lean_cases.on_tokens(nn.RMSNorm(32), nn.GELU()), lean_cases.TOKENS),
    "attention": (lambda: lean_cases.on_tokens(lean_cases.Attention(False)), lean_cases.TOKENS),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 8, 3)),
        lean_cases.IMAGE,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("name", BLOCKS)
def test_later_passes_have_the_same_bits(name, setting, dtype):
    make, shape = BLOCKS[name]
    model = make().cuda().to(dtype)
    for _ in range(3):
        x = torch.randn(shape, device="cuda", dtype=dtype)
        step(model, x, lean(setting), False)
    stock = same_twice(copy.deepcopy(model), x, False)
    saved = lean(setting)
    ours = step(model, x, saved, False)
    assert_same({key: ours[key] for key in stock}, stock)
    assert saved.rebuilt_bytes > 0


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x):
        y = self.norm(self.conv(x))
        y += x
        return y.relu_()


def test_sums_in_place_behind_batch_norms():
    model = nn.Sequential(*(Residual() for _ in range(4))).cuda()
    for _ in range(4):
        x = torch.randn(8, 16, 32, 32, device="cuda")
        step(model, x, lean("conv"), True)  # in float32 the norms are cuDNN's
    stock = same_twice(copy.deepcopy(model), x, True)
    ours = step(model, x, lean("conv"), True)
    assert_same({key: ours[key] for key in stock}, stock)
