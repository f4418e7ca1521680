"""What a search of `lean()` looks at, and what it knows uncompared, with the C++ nodes and without."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from lean_cases import assert_as_stock
from torch import nn

from leannorm import lean
from leannorm.saving import provenance, search, trial


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(trial, "_SEEN", {})


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_flags_are_known_of_what_ran_after_their_last_change(with_and_without_nodes, monkeypatch):
    compared, tried = [], trial._try
    monkeypatch.setattr(trial, "_try", lambda step, like: (compared.append(like.shape), tried(step, like))[1])

    def program(context):
        first, second, seen = nn.Conv2d(8, 32, 3), nn.Conv2d(32, 8, 3), []
        x = torch.randn(4, 8, 16, 16, requires_grad=True)
        for _ in range(3):
            compared.clear()
            with context():
                with torch.backends.mkldnn.flags(enabled=False):
                    y = first(x * 1.0)
                loss = F.silu(second(F.relu(y).sin())).square().sum()
            x.grad = None
            loss.backward()
            seen.append(x.grad)
        return seen

    assert_as_stock(program, recompute="conv")
    assert (4, 8, 12, 12) not in compared


@pytest.mark.usefixtures("searched")
@pytest.mark.parametrize("grow", [lambda x: x + x, lambda x: x + x * 0.5], ids=["twice", "branch"])
def test_sums_of_sums_are_looked_at_once(grow, with_and_without_nodes, monkeypatch):
    """There are 2 ** 16 paths to the first of them."""
    looks, (step, saved_by) = [], (search.Search._step, provenance.saved_values)
    monkeypatch.setattr(search.Search, "_step", lambda *a: (looks.append(a[1]), step(*a))[1])
    monkeypatch.setattr(provenance, "saved_values", lambda node: (looks.append(node), saved_by(node))[1])
    w = torch.randn(64, 64, requires_grad=True)
    x = w
    for _ in range(16):
        x = grow(x)
    with lean("conv"):
        y = torch.relu(x)
        for _ in range(16):
            y = grow(y)
        torch.relu(y * 1.0)
    assert 0 < len(looks) < 1000


SOFTMAXES = torch.softmax, torch.log_softmax, torch._safe_softmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("softmax", SOFTMAXES, ids=lambda f: f.__name__)
def test_a_softmax_has_the_same_bits_in_any_layout(softmax, dtype):
    """What `_COPIES_FIRST` says of torch's kernels."""
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
def test_a_bias_of_unknown_layout_is_tried_a_few_times(attention, form, with_and_without_nodes, monkeypatch):
    """As of Swin, BEiT, CoAtNet: a table's rows by position, permuted and copied, which no node packs."""
    tried, each = [], trial._try
    monkeypatch.setattr(trial, "_try", lambda step, like: (tried.append(like.shape), each(step, like))[1])

    def program(context):
        table, linear = nn.Parameter(torch.randn(49, 2)), nn.Linear(32, 96)
        where, seen = torch.randint(49, (16, 16)), []
        for _ in range(6):
            x = torch.randn(8, 16, 32, requires_grad=True)
            tried.clear()
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
    assert tried == []
