"""Many steps in a row, and steps that are read twice: a graph of n nodes may have 2 ** n paths.

What walks from a value to what it is made of must visit each once, or few; what the backward pass rebuilds
one after another must not be calls in one another.
"""

from contextlib import nullcontext
from time import process_time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leannorm.saving import lean

SETTINGS = {
    "norm": {"recompute": "norm"},
    "conv": {"recompute": "conv"},
    "budget": {"budget": 0.1},
    "overhead": {"overhead": 1.0},
    "verify": {"recompute": "conv", "verify": True},
}


def decay(x, turns):
    for _ in range(turns):
        x = (x * 0.999).relu()
    return x


def euler(x, turns):
    """Two paths a step, through sums that no node saves."""
    for _ in range(turns):
        x = x + 0.1 * (x * 0.5 - x)
    return x.relu()


def scan(x, turns):
    """The state of a recurrence, as a state space model's loop in Python has it: each one is saved."""
    for i in range(turns):
        x = 0.5 * (x.sigmoid() * x + x[i % len(x)])
    return x.relu()


def gates(x, turns):
    """Two paths a step, through tensors that are saved."""
    for _ in range(turns):
        x = 0.5 * (x + F.silu(x))
    return x.relu()


def residual(x, turns):
    for _ in range(turns):
        x = F.relu(x + F.silu(F.layer_norm(x, x.shape[-1:])))
    return x


def gradients(f, turns, weight, x, around):
    with around as saved:
        loss = f(F.linear(x, weight), turns).square().sum()
    return torch.autograd.grad(loss, weight), saved


@pytest.mark.sampled(of=5)
@pytest.mark.filterwarnings("ignore:leannorm. budget=0.1 is out of reach")  # of what takes no memory
@pytest.mark.parametrize("f", [decay, euler, scan, gates, residual])
@pytest.mark.parametrize("setting", SETTINGS)
def test_many_steps_in_a_row(f, setting, with_and_without_nodes):
    """As stock, in seconds. Once 8 turns of an Euler loop took 15, and 400 steps had no backward pass."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64, requires_grad=True)
    start = process_time()
    for turns in (24, 24, 350):
        x = torch.randn(64, 64)
        stock, _ = gradients(f, turns, weight, x, nullcontext())
        found, _ = gradients(f, turns, weight, x, lean(**SETTINGS[setting]))
        assert all(map(torch.equal, stock, found))
    assert process_time() - start < 30


def test_a_row_of_steps_that_grows_from_its_end(with_and_without_nodes):
    """Each sum waits for the output of a product that is saved after all of them, the last one first."""
    linear, norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def loss_of(inputs):
        x, parts, loss = linear(inputs[0]), [], 0
        for one in inputs[1:]:
            parts.append(linear(one))
            x = x + parts[-1]
            loss = loss + x.sin().sum()
        for part in reversed(parts):
            loss = loss + part.cos().sum()
        return loss + F.gelu(norm(x)).sum()

    inputs = torch.randn(600, 4, 8)
    stock = torch.autograd.grad(loss_of(inputs), linear.weight)
    with lean("norm") as saved:
        loss = loss_of(inputs)
    assert not [reason for reason in saved.reasons if "Error" in reason]
    assert all(map(torch.equal, stock, torch.autograd.grad(loss, linear.weight)))


class Shared(nn.Module):
    """One value that many steps read."""

    def forward(self, x, turns):
        y = x.relu()
        for _ in range(turns):
            y = 0.5 * (y + x.sigmoid() * y)
        return y.relu()


def test_what_many_steps_read_is_rebuilt_for_all(with_and_without_nodes):
    weight, x = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    stock, _ = gradients(Shared(), 50, weight, x, nullcontext())
    for _ in range(3):
        found, _ = gradients(Shared(), 50, weight, x, lean("conv"))
        assert all(map(torch.equal, stock, found))
