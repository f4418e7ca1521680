"""Residual sums behind a batch norm: norm, addition and activation."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lean_cases import assert_as_stock
from torch import nn

from leannorm import convert
from leannorm.saving import lean

LAYOUTS = torch.contiguous_format, torch.channels_last


class Block(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.conv, self.norm, self.in_place = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), in_place

    def forward(self, x):
        y = self.norm(self.conv(x))
        if not self.in_place:
            return torch.relu(x + y)
        y += x
        return torch.relu_(y)


def blocks(in_place, converted=False):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(in_place) for _ in range(4)))
    return convert(model) if converted else model


def rebuilt(model, x, **settings):
    """After some passes, by each block: is its output rebuilt?"""
    for _ in range(3):
        with lean(**settings) as saved:
            loss = model(x).square().mean()
        loss.backward()
    of_activations = "aten::relu", "aten::relu_"
    return [r.rebuilt for r in saved.records if r.node in of_activations and r.bytes]


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("form", LAYOUTS, ids=str)
def test_conv_rebuilds_two_sums_in_a_row(form, converted, with_and_without_nodes):
    """Two sums in a row are made again, then one is kept."""
    x, two = torch.randn(2, 16, 24, 24).contiguous(memory_format=form), [True, True, False, True]
    assert all(rebuilt(blocks(each, converted), x, recompute="conv") == two for each in (False, True))


class Signs(torch.autograd.Function):
    """Its gradient depends on the sign of a zero."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return torch.where(x.signbit(), 2 * dy, dy)


@pytest.mark.parametrize("act", [F.relu, F.relu6])
def test_what_16_bits_round_to_a_zero_keeps_its_sign(act):
    norm = convert(nn.BatchNorm2d(8)).to(torch.float16)

    def gradient(context, seed):
        torch.manual_seed(seed)
        norm.weight.data.fill_(1.0 if seed < 6 else 1e-5)
        x = torch.randn(4, 8, 32, 32).half().requires_grad_()
        with context:
            loss = (Signs.apply(act(norm(x))) * 1000).float().sum()
        loss.backward()
        return x.grad

    for seed in range(8):
        assert torch.equal(gradient(lean("norm"), seed), gradient(nullcontext(), seed))


@pytest.mark.parametrize("make", [nn.BatchNorm2d, lambda n: convert(nn.BatchNorm2d(n))], ids=["torch", "own"])
@pytest.mark.parametrize("program", ["copy", "order"])
def test_what_follows_is_added_up_in_the_layout_of_stock(program, make, with_and_without_nodes):
    """A copy, or the first operand of a sum, says how the result lies, and that how a mean is added up."""
    torch.manual_seed(0)
    norm, conv, other = make(16), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
    parameters = [*norm.parameters(), *conv.parameters(), *other.parameters()]

    def gradients(context, changed, seed):
        torch.manual_seed(seed)
        x = torch.randn(4, 16, 24, 24)
        for p in parameters:
            p.grad = None
        with context:
            y = norm(conv(x))
            if program == "copy":
                form = torch.channels_last if changed else torch.contiguous_format
                z = F.relu6(y.clone(memory_format=form))
            else:
                s = torch.exp(other(x).contiguous(memory_format=torch.channels_last) * 0.1)
                z = s + y if changed else y + s
            w = z.mean(1, keepdim=True)
            loss = F.silu(w).sum() + other(z if program == "copy" else s).square().mean()
        loss.backward()
        return [p.grad.clone() for p in parameters if p.grad is not None]

    for seed in range(5):
        gradients(lean("conv"), False, seed)
    for seed, changed in enumerate([True, False, True], 5):
        stock = gradients(nullcontext(), changed, seed)
        assert all(map(torch.equal, gradients(lean("conv"), changed, seed), stock))


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "setting", [{}, {"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.4}], ids=str
)
def test_gradients_are_those_of_stock(in_place, setting, converted, with_and_without_nodes):
    model = blocks(in_place, converted)
    inputs = [torch.randn(2, 16, 24, 24) for _ in range(3)]

    def program(context):
        for x in inputs:
            model.zero_grad()
            with context():
                loss = model(x).square().mean()
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    assert_as_stock(program, **setting)
