"""An error of the log is none of the program: what could not be recorded is kept, and `saved` says so."""

from __future__ import annotations

import pytest
import torch
from lean_cases import forget_trials
from torch import nn

from leannorm import lean
from leannorm.saving import flags, reasons
from leannorm.saving.log import hooks, recorder


@pytest.fixture(autouse=True)
def nothing_tried():
    forget_trials()


class Error(Exception):
    pass


class NowAndThen:
    """Raises an error in two of three calls."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls % 3:
            raise Error
        return self.function(*args)


def step(model, x):
    """Every second layer under other flags, with an edit in place of what others read."""
    for i, layer in enumerate(model):
        torch.use_deterministic_algorithms(i % 2 == 1)
        x = layer(x)
        x = x.exp().sin() + x
        x.mul_(0.5)
    torch.use_deterministic_algorithms(False)
    return x.square().mean()


@pytest.fixture
def fails(monkeypatch):
    """Has a function of a module or class fail now and then."""

    def fail(owner, name):
        monkeypatch.setattr(owner, name, NowAndThen(getattr(owner, name)))

    return fail


def check(**goal):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(7)))
    x = torch.randn(64, 64)
    step(model, x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    for _ in range(4):
        model.zero_grad()
        with lean(**goal) as saved:
            loss = step(model, x)
        loss.backward()
        assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
        assert reasons.FAILED in saved.reasons
        assert saved.kept_bytes > 0


@pytest.mark.filterwarnings("ignore:leannorm. (lean.. met an error|budget=)")
@pytest.mark.parametrize("goal", [{"recompute": "norm"}, {"budget": 0.5}], ids=str)
def test_calls_that_cannot_be_recorded(goal, fails, with_and_without_nodes):
    fails(*((flags.Flags, "now") if with_and_without_nodes else (recorder, "current")))
    check(**goal)


@pytest.mark.filterwarnings("ignore:leannorm. lean.. met an error")
def test_tensors_that_cannot_be_decided_on(fails, monkeypatch):
    from lean_cases import without_nodes

    without_nodes(monkeypatch)
    fails(hooks, "decide")
    check(recompute="norm")
