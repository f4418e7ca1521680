"""Saves of views of copies become kinds, too: a cast's, as autocast makes them of activations and weights."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from memo_listings import Program
from test_lean_memo import _asked_python, pytestmark, searched  # noqa: F401
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
        run.gradients(lean(), False, seed)
    _asked_python(monkeypatch, asked)
    names = []
    for other in (False, True):
        asked.clear()
        run.gradients(lean(), other, 7)
        names.append({type(node).__name__ for node in asked})
    assert names == [set(), {"SelectBackward0"}]
