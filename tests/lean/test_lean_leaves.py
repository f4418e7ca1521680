"""A pass that opens under `no_grad`, as trainers open one around evaluation, too."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from leannorm import lean


def blocks(count):
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.SiLU()) for _ in range(count)))


@pytest.mark.parametrize(
    "setting", [{}, {"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.7}, {"verify": True}], ids=str
)
def test_a_pass_that_opens_under_no_grad_begins_where_something_is_saved(setting, with_and_without_nodes):
    model, x = blocks(3), torch.randn(64, 64)

    def loss_of(context, mode):
        with torch.no_grad(), context as saved:
            y = model[0](x)
            with mode():
                loss = model[1:](y).square().mean()
        return loss, saved

    def gradients_of(loss):
        return torch.autograd.grad(loss, list(model[1:].parameters()))

    stock = gradients_of(loss_of(nullcontext(), torch.enable_grad)[0])
    for _ in range(3):
        loss, saved = loss_of(lean(**setting), torch.enable_grad)
        assert all(map(torch.equal, gradients_of(loss), stock))
        assert saved.rebuilt_bytes > 0 or "recompute" not in setting
    _, saved = loss_of(lean(**setting), nullcontext)
    assert not saved.records
