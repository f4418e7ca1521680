"""Saves of converted networks, whose norms are leannorm's own nodes, go without Python as torch's do."""

import pytest
import torch
from test_lean_memo import _asked_python, _passes, searched  # noqa: F401
from torch import nn

from leannorm import convert
from leannorm.autograd.nodes import NODES

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
