"""A step in the with statement, or several: planned and counted as if `lean()` had closed in time."""

from __future__ import annotations

import pytest
import torch
from lean_cases import forget_trials
from torch import nn

from leannorm import lean
from leannorm.saving import reasons

GOALS = [{"recompute": "norm"}, {}, {"budget": 0.3}, {"peak": 0.8}]
pytestmark = [
    pytest.mark.usefixtures("with_and_without_nodes"),
    pytest.mark.filterwarnings("ignore:leannorm. plain lean.. spends"),  # these networks are small
]


@pytest.fixture(autouse=True)
def nothing_tried():
    forget_trials()


class Net(nn.Module):
    def __init__(self, width=16, depth=5):
        super().__init__()
        layers = [
            (nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU()) for _ in range(depth)
        ]
        self.stem, self.body = (
            nn.Conv2d(3, width, 3, padding=1),
            nn.Sequential(*(m for one in layers for m in one)),
        )

    def forward(self, x):
        return self.body(self.stem(x)).square().mean()


def gradients(model):
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def batch(seed=0):
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def outside(model, **goal):
    """Kept and rebuilt bytes of passes that close before their backward pass, from the second on."""
    for _ in range(3):
        with lean(**goal) as saved:
            loss = model(batch())
        loss.backward()
    return saved.kept_bytes, saved.rebuilt_bytes, gradients_of_last(model)


def gradients_of_last(model):
    model.zero_grad()
    model(batch()).backward()
    return gradients(model)


@pytest.mark.parametrize("goal", GOALS, ids=str)
@pytest.mark.parametrize("steps", [1, 3])
def test_steps_in_the_with_statement_are_planned_and_counted_as_outside_of_it(goal, steps):
    torch.manual_seed(0)
    model = Net()
    kept, rebuilt, expected = outside(model, **goal)
    for turn in range(3):
        with lean(**goal) as saved:
            for _step in range(steps):
                model.zero_grad()
                model(batch()).backward()
        assert all(map(torch.equal, gradients(model), expected)), turn
        assert (saved.kept_bytes, saved.rebuilt_bytes) == (kept, rebuilt)
        assert (saved.plan is not None) == ("recompute" not in goal)
        assert not {reasons.FREED_WITHIN, reasons.FREED_BEFORE_PLAN} & {*saved.reasons}


def test_the_second_step_of_the_first_pass_follows_the_plan_of_the_first():
    model = Net()
    with lean(budget=0.5) as saved:
        model(batch()).backward()
        model(batch(1)).backward()
    assert 0.3 < saved.kept_bytes / (saved.kept_bytes + saved.rebuilt_bytes) <= 0.5


def test_steps_of_several_models_have_a_plan_each():
    models = Net(), Net(depth=8), Net(width=24)
    for turn in range(3):
        with lean(budget=0.4) as saved:
            for model in models:
                model.zero_grad()
                model(batch()).backward()
        for model in models:
            assert all(map(torch.equal, gradients(model), gradients_of_last(model)))
        if turn:
            assert saved.kept_bytes / (saved.kept_bytes + saved.rebuilt_bytes) <= 0.4


def penalty(model, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
    return slope.square().sum()


def force(model, x):
    """The gradient is a number here: its graph is gone when the rest begins."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x), x)
    return model(x.detach() - slope)


def twice(model, x):
    part = model.stem(x).square().mean()
    part.backward(retain_graph=True)
    return part + model(x)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("goal", GOALS, ids=str)
@pytest.mark.parametrize("loss", [penalty, force, twice])
def test_a_backward_pass_amid_the_forward_pass(loss, goal, within):
    torch.manual_seed(0)
    model = Net()
    loss(model, batch()).backward()
    expected = gradients(model)
    for _ in range(4):
        with lean(**goal) as saved:
            result = loss(model, batch())
            if within:
                result.backward()
        if not within:
            result.backward()
        assert all(map(torch.equal, gradients(model), expected))
        assert saved.rebuilt_bytes > 0


def test_a_pass_within_another_has_its_own_end():
    model = Net()
    for _ in range(3):
        with lean("norm") as around:
            kept = model(batch())
            with lean(budget=0.4) as saved:
                model(batch()).backward()
        assert saved.rebuilt_bytes > 0
        kept.backward()
        assert around.rebuilt_bytes > 0
