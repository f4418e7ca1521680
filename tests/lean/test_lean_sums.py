"""Residual sums behind a batch norm: norm, addition and activation rebuilt in one pass."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lean_cases import assert_as_stock
from torch import nn

from leannorm import convert
from leannorm.saving import kinds, lean
from leannorm.saving.rates import table
from leannorm.saving.recipes import functions, fused_norm_act, norms
from leannorm.saving.recipes.fused_norm_act import by_scale_and_shift, scale_shift_act

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
    of_activations = "ReluBackward0", "aten::relu", "aten::relu_"
    return [r.rebuilt for r in saved.records if r.node in of_activations and r.bytes]


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("form", LAYOUTS, ids=str)
def test_conv_rebuilds_each_second_output_where_nothing_must_be_compared(
    form, converted, with_and_without_nodes
):
    x, second = torch.randn(2, 16, 24, 24).contiguous(memory_format=form), [False, True, False, True]
    if with_and_without_nodes:  # the log makes two sums in a row again
        two = [True, True, False, True]
        assert all(rebuilt(blocks(each, converted), x, recompute="conv") == two for each in (False, True))
        return
    assert rebuilt(blocks(False, converted), x, recompute="conv") == second
    assert rebuilt(blocks(True, converted), x, recompute="conv") == [False] * 4
    assert rebuilt(blocks(False, converted), x, recompute="norm") == [False] * 4


@pytest.mark.usefixtures("searched")
@pytest.mark.parametrize("autocast", [False, True])
def test_leannorms_own_norm_and_its_activation_are_one_pass(autocast, monkeypatch):
    """Not in 16 bits on a CPU, where the norm is rounded before."""
    ran, own = [], functions.norm_then
    monkeypatch.setattr(functions, "norm_then", lambda *given: ran.append(len(given)) or own(*given))
    monkeypatch.setattr(kinds, "_JOINED", {*kinds._JOINED, functions.norm_then})
    block = convert(Block(in_place=False))
    for _ in range(3):
        ran.clear()
        with lean("norm"), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = F.relu6(block.norm(block.conv(torch.randn(2, 16, 24, 24))))
            loss = block.conv(y).square().mean()
        loss.backward()
    assert ran == ([] if autocast else [8])


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


@pytest.mark.usefixtures("searched")
def test_a_sum_that_must_be_compared_has_twice_the_price(with_and_without_nodes):
    told = with_and_without_nodes  # which sums work in place

    def seconds(in_place, goal):
        with lean(overhead=goal) as saved:
            loss = blocks(in_place)(torch.randn(2, 16, 24, 24)).square().mean()
        loss.backward()
        plan = saved.plan
        of_sums = [
            value.seconds
            for value, places in zip(plan.made_for.lines.step.values, plan.made_for.places, strict=True)
            if places and plan.made_for.calls[places[0]][0] == "ReluBackward0" and value.seconds
        ]
        return min(of_sums) - table(torch.device("cpu")).rebuild  # the hooks

    times = 1 if told else 2
    assert seconds(True, 15.0 + told) == pytest.approx(times * seconds(False, 17.0 + told), rel=0.01)


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


@pytest.mark.parametrize("act", ["identity", "relu", "hardswish", "relu6"])
@pytest.mark.parametrize("of_added", LAYOUTS, ids=str)
@pytest.mark.parametrize("form", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_in_one_pass_the_bits_are_those_of_three(act, of_added, form, dtype):
    x, added = (
        torch.randn(2, 5, 9, 7, dtype=dtype).contiguous(memory_format=one) for one in (form, of_added)
    )
    scale, shift = torch.randn(5, dtype=dtype), torch.randn(5, dtype=dtype)
    stock = fused_norm_act.ACTIVATIONS[act](by_scale_and_shift(x, scale, shift) + added)
    assert torch.equal(scale_shift_act(x, added, scale, shift, act), stock)
    assert torch.equal(  # what broadcasts is no case of the kernel
        scale_shift_act(x, added[:, :, :1, :1], scale, shift, act),
        fused_norm_act.ACTIVATIONS[act](by_scale_and_shift(x, scale, shift) + added[:, :, :1, :1]),
    )


@pytest.mark.usefixtures("searched")
def test_without_the_kernel_the_sum_is_a_step_of_its_own(monkeypatch):
    monkeypatch.setattr(norms, "matches_torch", lambda act, dtype: False)
    assert rebuilt(blocks(in_place=False), torch.randn(2, 16, 20, 20), recompute="conv") == [False] * 4
