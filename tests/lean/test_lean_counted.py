"""`kept_bytes` and `rebuilt_bytes` add up to what stock holds, and a budget is met by what is really held."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leannorm import lean

SETTINGS = {"norm": {"recompute": "norm"}, "conv": {"recompute": "conv"}, "budget": {"budget": 0.3}}


@pytest.mark.parametrize("read", [lambda y: y, lambda y: y[:]], ids=["itself", "a view"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_copied_for_a_concatenation_is_held(setting, read):
    """A part that nothing repeats: its copy lives until the backward pass, is neither rebuilt nor free."""
    x, kernel = torch.randn(2, 8, 32, 32, requires_grad=True), torch.randn(8, 16, 3, 3, requires_grad=True)
    for _ in range(2):
        with lean(**SETTINGS[setting]) as saved:
            y = torch.cat([x + torch.rand_like(x), F.silu(x)], 1)
            z = torch.cat([y[:, :8] * 2, y[:, 8:]], 1)
            loss = sum(F.conv2d(read(w), kernel).sum() for w in (y, z))
        assert saved.kept_bytes + saved.rebuilt_bytes == y.nbytes + z.nbytes
        assert x.nbytes <= saved.kept_bytes <= x.nbytes + 8  # the part, once; perhaps the factor
        loss.backward()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_copy_in_another_layout_has_memory_of_its_own(setting):
    """Attention's heads, put side by side for the product behind it."""
    x, weight = torch.randn(2, 4, 128, 16, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    for _ in range(2):
        with lean(**SETTINGS[setting]) as saved:
            y = F.silu(x)
            square = y * y
            z = y.transpose(1, 2).reshape(256, 64)
            loss = square.sum() + (z @ weight).sum()
        assert saved.kept_bytes + saved.rebuilt_bytes == y.nbytes + z.nbytes
        loss.backward()


class Block(nn.Module):
    """The attention of a width for which torch lays its result out by heads."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (4, 16)).transpose(1, 2).contiguous()
            for y in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        y = F.silu(F.scaled_dot_product_attention(q, k, v).clone(memory_format=torch.contiguous_format))
        return x + self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("budget", [0.6, 0.45, 0.3])
def test_a_budget_is_met_where_copies_are_held(budget):
    """Where the plan holds a tensor and its copy, it counts both."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(2, 128, 64)
    for _ in range(3):
        with lean(budget=budget) as saved:
            loss = model(x).square().mean()
        loss.backward()
        assert not saved.reasons
    assert saved.kept_bytes <= budget * (saved.kept_bytes + saved.rebuilt_bytes)
