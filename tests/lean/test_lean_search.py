"""What a search of `lean()` looks at, and what it knows uncompared, with the C++ nodes and without."""

from __future__ import annotations

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
