"""What `lean()` once had wrong, written out: no fuzzer between the program and what it checks."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leannorm import lean

BOTH = [contextlib.nullcontext, lean]


def image(seed=0):
    return torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradient(run):
    """Of the weight that `run(context, conv, x)` trains, by stock autograd and under lean()."""
    found = []
    for context in BOTH:
        torch.manual_seed(0)
        conv = nn.Conv2d(8, 8, 3)
        run(context, conv, image())
        found.append(conv.weight.grad)
    return found


def test_the_copy_of_a_weight_is_not_written_into():
    w, v = nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64, requires_grad=True)
    before = w.detach().clone()
    with lean():
        loss = (torch.relu(w.to(w.dtype, copy=True)) @ v).sum()
    loss.backward()
    assert torch.equal(w, before)


NORMS = {
    "batch": lambda x, b: F.batch_norm(x, None, None, None, b, True),
    "batch, evaluation": lambda x, b: F.batch_norm(x, torch.zeros(8), torch.ones(8), None, b),
    "instance": lambda x, b: F.instance_norm(x, None, None, None, b),
    "group": lambda x, b: F.group_norm(x, 2, None, b),
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_bias_without_a_weight(norm):
    def run(context, conv, x):
        for bias in (None, torch.randn(8)):  # the first is rebuilt exactly, and so trusted
            with context():
                loss = conv(NORMS[norm](x * 1.0, bias)).square().sum()
            loss.backward()

    assert torch.equal(*gradient(run))


def test_casts_that_autocast_keeps_over_an_optimizer_step():
    def run(context):
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())))
        optimizer, x = torch.optim.SGD(model.parameters(), 1.0), torch.randn(32, 64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                with context():
                    loss = model(x).float().square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    stock, ours = map(run, BOTH)
    assert all(map(torch.equal, stock, ours))


def test_an_edit_under_no_grad_of_what_an_activation_made():
    def run(context, conv, x):
        for most in (None, 0.1):
            with context():
                y = F.silu(x.clone())
                if most is not None:
                    with torch.no_grad():
                        y.clamp_(max=most)
                loss = conv(y).square().sum()
            loss.backward()

    assert torch.equal(*gradient(run))


def test_a_logged_tensor_that_is_edited():
    def run(context, conv, x):
        with context():
            y = conv(x)
            log = y.square().mean()  # not part of the loss
            loss = conv(F.relu(y, inplace=True)).square().sum()
        loss.backward()
        assert log.isfinite()

    assert torch.equal(*gradient(run))


class ConvNorm(torch.autograd.Function):
    """A user's own, called as one of leannorm's."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x, x, x, x, x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_a_user_function_that_is_called_as_ours():
    def run(context, conv, x):
        with context("conv") if context is lean else context():
            loss = conv(ConvNorm.apply(x)).square().sum()
        loss.backward()

    assert torch.equal(*gradient(run))
