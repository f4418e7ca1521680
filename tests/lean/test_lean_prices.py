"""What a plan repeats is priced by what the calls of its own pass took, on CPUs."""

from __future__ import annotations

import time

import pytest
import torch
from lean_cases import forget_trials
from torch import nn

from leannorm import lean

pytestmark = [
    pytest.mark.usefixtures("with_and_without_nodes"),
    pytest.mark.filterwarnings("ignore:leannorm. (plain lean.. spends|half of)"),
]


@pytest.fixture(autouse=True)
def measures(monkeypatch, tmp_path):
    """An empty LEANNORM_RATES would price plans by the table."""
    monkeypatch.setenv("LEANNORM_RATES", str(tmp_path / "rates.json"))
    forget_trials()


def slow_for(seconds):
    def run(x):
        time.sleep(seconds)
        return x.sin()

    return run


@torch.library.custom_op("leannorm_tests::slow_sine", mutates_args=())
def slow_sine(x: torch.Tensor, seconds: float) -> torch.Tensor:
    """A kernel of a user's, of which no table knows a price."""
    return slow_for(seconds)(x)


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


slow_sine.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[0].cos(), None), setup_context=setup_context
)


class Net(nn.Module):
    """Two branches that save as much as each other; each call of a branch takes its `seconds`."""

    def __init__(self, *seconds):
        super().__init__()
        self.seconds = seconds

    def branch(self, x, seconds):
        for _ in range(4):
            x = slow_sine(x, seconds).sin()
        return x

    def forward(self, x):
        for i, seconds in enumerate(self.seconds):
            x = x + self.branch(x * (i + 1), seconds)
        return x.sum()


def rebuilt_of(net, passes=4, **goal):
    """Which of the slow operator's outputs are rebuilt, in order."""
    for _ in range(passes):
        x = torch.randn(64, 256, requires_grad=True)
        with lean(**goal) as saved:
            loss = net(x)
        loss.backward()
    return [record.rebuilt for record in saved.records if record.node == "leannorm_tests::slow_sine"]


@pytest.mark.parametrize("slow", [0, 1])
def test_what_takes_long_is_kept_and_the_rest_rebuilt(slow):
    found = rebuilt_of(Net(*(4e-3 if i == slow else 0.0 for i in range(2))), budget=0.3)
    here, there = (found[4 * i : 4 * (i + 1)] for i in (slow, 1 - slow))
    assert len(found) == 8
    assert sum(here) < sum(there)
    assert sum(there) >= 3


def test_by_the_table_both_are_equal(monkeypatch):
    monkeypatch.setenv("LEANNORM_RATES", "")
    assert rebuilt_of(Net(4e-3, 0.0), budget=0.3) == rebuilt_of(Net(0.0, 4e-3), budget=0.3)


def test_the_second_pass_corrects_what_only_the_first_call_took():
    """A kernel that is compiled in its first call is the cheaper one from then on."""
    net = Net(40e-3, 10e-3)
    first = rebuilt_of(net, passes=1, budget=0.3)
    net.seconds = 0.0, 10e-3
    later = rebuilt_of(net, passes=3, budget=0.3)
    assert all(first)  # a pass without a plan
    assert sum(later[:4]) > sum(later[4:])
