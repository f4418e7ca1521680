"""Programs whose rebuilds depend on flags and layouts that no tensor shows."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from lean_cases import assert_as_stock, forget_trials
from torch import nn


@pytest.fixture(autouse=True)
def nothing_remembered():
    forget_trials()


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_flags_that_are_set_for_one_layer(with_and_without_nodes):

    def program(context):
        first, second, seen = nn.Conv2d(8, 32, 3), nn.Conv2d(32, 8, 3), []
        x = torch.randn(4, 8, 16, 16, requires_grad=True)
        for _ in range(3):
            with context():
                with torch.backends.mkldnn.flags(enabled=False):
                    y = first(x * 1.0)
                loss = F.silu(second(F.relu(y).sin())).square().sum()
            x.grad = None
            loss.backward()
            seen.append(x.grad)
        return seen

    assert_as_stock(program, recompute="conv")


SOFTMAXES = torch.softmax, torch.log_softmax, torch._safe_softmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("softmax", SOFTMAXES, ids=lambda f: f.__name__)
def test_a_softmax_has_the_same_bits_in_any_layout(softmax, dtype):
    for shape in ((3, 49, 49), (5, 4, 7, 33), (2, 4, 5, 130), (2, 8, 1), (64, 1000)):
        x = (torch.randn(shape) * 4).to(dtype)
        for dim in range(len(shape)):
            expected = softmax(x, dim)
            for order in permutations(range(len(shape))):
                moved = x.permute(order).contiguous().permute(*map(order.index, range(len(shape))))
                assert torch.equal(softmax(moved, dim), expected)
            assert torch.equal(softmax(torch.stack([x, x], -1)[..., 0], dim), expected)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.preserve_format], ids=str)
@pytest.mark.parametrize("attention", ["softmax", "log_softmax", "_safe_softmax", "masked product"])
def test_a_bias_that_is_permuted_and_copied(attention, form, with_and_without_nodes):
    """As of Swin, BEiT, CoAtNet: a table's rows by position, which no node saves."""

    def program(context):
        table, linear = nn.Parameter(torch.randn(49, 2)), nn.Linear(32, 96)
        where, seen = torch.randint(49, (16, 16)), []
        for _ in range(6):
            x = torch.randn(8, 16, 32, requires_grad=True)
            with context():
                q, k, v = linear(x).view(8, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
                bias = table[where.view(-1)].view(16, 16, 2).permute(2, 0, 1).clone(memory_format=form)
                if attention == "masked product":
                    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))
                else:
                    y = getattr(torch, attention)(q @ k.transpose(-2, -1) + bias.unsqueeze(0), -1) @ v
                loss = y.square().sum()
            loss.backward()
            seen.append(x.grad)
        return [*seen, table.grad, *(p.grad for p in linear.parameters())]

    assert_as_stock(program, recompute="conv")
