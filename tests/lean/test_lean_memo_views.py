"""Saves of views of copies become kinds, too: a cast's, as autocast makes them of activations and weights.

And what a node saved is no part of a circle that lasts.
"""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from memo_listings import Program
from test_lean_memo import _asked_python, on_both, pytestmark, searched  # noqa: F401
from torch import nn

from leannorm.saving import lean


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("transposed", [False, True])
def test_autocast_is_packed_in_cpp(setting, transposed, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), Block(), Block())

    def gradients(context, seed):
        torch.manual_seed(seed)
        x = torch.randn(6, 5, 8)
        x = x.transpose(0, 1) if transposed else x  # what follows is laid out so, and is copied to be cast
        model.zero_grad()
        with context, torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    for seed in range(5):
        gradients(lean(setting), seed)
    asked = []
    _asked_python(monkeypatch, asked)
    found, stock = gradients(lean(setting), 7), gradients(contextlib.nullcontext(), 7)
    assert all(torch.equal(a, b) for a, b in zip(found, stock, strict=True))
    assert {type(node).__name__ for node in asked} <= {"ToCopyBackward0"}  # of the loss, held in fewer bytes


def test_a_copy_is_laid_out_as_the_base_of_its_view(monkeypatch):
    """No node tells how; two copies of which the same view looks the same are two kinds."""

    def program(m, x, other):
        form = torch.contiguous_format if other else torch.channels_last
        copy = F.silu(m[0](x)).clone(memory_format=form)
        return copy[:, 0, 0, 0].square().sum()

    asked = []
    run = Program(program)
    for seed in range(5):
        run.gradients(lean("norm"), False, seed)
    _asked_python(monkeypatch, asked)
    names = []
    for other in (False, True):
        asked.clear()
        run.gradients(lean("norm"), other, 7)
        names.append({type(node).__name__ for node in asked})
    assert names == [set(), {"SelectBackward0"}]


@pytest.mark.usefixtures("on_both")
@pytest.mark.parametrize("affine", [True, False])
def test_what_others_can_reach_is_collected_with_its_circles(affine):
    """A norm without weights is rebuilt by the very tensor that its node saved; others can add to that what
    they like."""
    layers = [m for _ in range(3) for m in (nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8, affine=affine), nn.SiLU())]
    net, seen = nn.Sequential(*layers), []
    for _ in range(4):
        with lean("norm"):
            loss = net(torch.randn(4, 8, 6, 6)).square().sum()
        node = loss.grad_fn
        while node.name() != "NativeBatchNormBackward0":
            node = node.next_functions[0][0]
        for name in ("_saved_result1", "_saved_result2", "_saved_input"):
            kept = getattr(node, name)
            kept.itself = [kept]
            seen.append(weakref.ref(kept))
        loss.backward()
    del kept, node, loss
    gc.collect()
    assert not [kept for kept in seen if kept() is not None]
