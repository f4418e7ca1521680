"""Saves of converted networks, whose norms are leannorm's own nodes, go without Python as torch's do."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from test_lean_memo import _asked_python, _passes, searched  # noqa: F401
from torch import nn

from leannorm import convert
from leannorm.autograd import fast
from leannorm.autograd.nodes import NODES
from leannorm.saving import lean
from leannorm.saving.graph import identity

pytestmark = pytest.mark.skipif(NODES is None, reason="the memo is a part of the C++ nodes")


OURS = {
    "batch": lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 8, 1)),
    "batch, no affine": lambda: nn.Sequential(
        nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8, affine=False), nn.SiLU(), nn.Conv2d(8, 8, 1)
    ),
    "evaluation": lambda: nn.Sequential(
        nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8).eval(), nn.SiLU(), nn.Conv2d(8, 8, 1)
    ),
    "group": lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 1)),
    "layer": lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 6)),
    "rms": lambda: nn.Sequential(nn.Linear(6, 6), nn.RMSNorm(6), nn.GELU(), nn.Linear(6, 6)),
}


@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("name", OURS)
def test_a_converted_network_is_packed_without_python(name, setting, monkeypatch):
    net = convert(OURS[name]())
    stock = _passes(net, None, 8)
    found = _passes(net, setting, 7)
    asked = []
    _asked_python(monkeypatch, asked)
    found += _passes(net, setting, 8)[7:]
    assert not asked
    for a, b in zip(stock, found, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))


@pytest.mark.parametrize("name", OURS)
def test_a_trial_serves_each_way_of_a_call(name, monkeypatch):
    """On a GPU the first call goes the whole way, later ones another: what is tried of the first serves."""
    norm, x = convert(OURS[name]())[1], torch.randn(4, 8, 6, 6, requires_grad=True)
    identities = [identity(norm(x).grad_fn)]
    monkeypatch.setattr(fast, "NODES", None)
    identities.append(identity(norm(x).grad_fn))
    monkeypatch.setattr(fast, "_serving", lambda x: None)
    identities.append(identity(norm(x).grad_fn))
    assert len(set(identities)) == 1
    norm.eps = 0.25  # which running statistics are read with, and then captured
    assert (identity(norm(x).grad_fn) in identities) == (name == "evaluation")


def test_a_class_of_a_user_is_not_kept():
    """A function that is defined within each forward pass goes with it, and with what it has closed over."""
    alive = []

    def step():
        big = torch.ones(100)

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * 2

            @staticmethod
            def backward(ctx, dy):
                return dy * 2 + 0 * big.sum()

        alive.append(weakref.ref(Twice))
        with lean("norm"):
            y = Twice.apply(torch.randn(8, 8, requires_grad=True).sin())
            loss = F.silu(y).square().sum()
        loss.backward()

    for _ in range(4):
        step()
    gc.collect()
    assert not any(reference() for reference in alive)
