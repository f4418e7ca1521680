"""Which leaves a pass samples when it opens: those that passes at its place have asked for."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from leannorm import lean, make_lean
from leannorm.saving import leaves


@pytest.fixture
def sampled(monkeypatch):
    found, sample_of = [], leaves.sample_of
    monkeypatch.setattr(leaves, "sample_of", lambda leaf: found.append(leaf) or sample_of(leaf))
    return found


def blocks(count):
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.SiLU()) for _ in range(count)))


def in_a_step(model, x, sampled):
    """Leaves that are sampled in the fourth step."""
    for _ in range(4):
        sampled.clear()
        model(x).square().mean().backward()
    return len(sampled)


@pytest.mark.usefixtures("searched")
def test_lean_blocks_sample_each_its_own_leaves(sampled):
    model, x = blocks(6), torch.randn(64, 64)
    for block in model:
        make_lean(block, "conv")
    assert 0 < in_a_step(model, x, sampled) <= len(list(model.parameters()))


@pytest.mark.usefixtures("searched")
def test_another_model_samples_its_own_leaves(sampled):
    large, little, x = make_lean(blocks(6), "conv"), make_lean(blocks(1), "conv"), torch.randn(64, 64)
    of_large = in_a_step(large, x, sampled)
    assert in_a_step(little, x, sampled) <= len(list(little.parameters())) < of_large


@pytest.mark.usefixtures("searched")
def test_a_pass_under_no_grad_samples_no_leaves(sampled):
    model, x = make_lean(blocks(3), "conv"), torch.randn(64, 64)
    assert in_a_step(model, x, sampled) > 0
    sampled.clear()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(x)
    assert not sampled


@pytest.mark.parametrize(
    "setting", [{}, {"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.7}, {"verify": True}], ids=str
)
def test_a_pass_that_opens_under_no_grad_begins_where_something_is_saved(
    setting, sampled, with_and_without_nodes
):
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
    sampled.clear()
    _, saved = loss_of(lean(**setting), nullcontext)
    assert not sampled
    assert not saved.records
