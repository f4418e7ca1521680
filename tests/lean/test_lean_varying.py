"""Programs that leave out other layers in each pass."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
import torch
from torch import nn

from leannorm.saving import lean, plans, reasons
from leannorm.saving.alike import Alike

pytestmark = pytest.mark.usefixtures("with_and_without_nodes")


MOST, MORE = plans._PROMISED  # a pass that keeps more has missed what was asked


def share(saved):
    return saved.kept_bytes / (saved.kept_bytes + saved.rebuilt_bytes)


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Conv2d(i, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())
            for i in (inputs, outputs)
        )

    def forward(self, x):
        y = self.first(x)
        return y + self.second(y)


class Stages(nn.Module):
    """Three stages of three blocks, of which `runs` says which run; the first of each stage always does."""

    def __init__(self):
        super().__init__()
        widths = 3, 8, 8, 8, 16, 16, 16, 32, 32, 32
        self.blocks = nn.ModuleList(Block(a, b) for a, b in pairwise(widths))
        self.runs = [True] * 9

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if self.runs[i] or i % 3 == 0:
                x = block(x)
        return x.square().mean()


def steps(goal, passes, leaves_out, then=0):
    """Each pass's `lean` object, and its share of kept bytes; gradients are compared with plain PyTorch's.
    `then`: so many more passes that leave out the same blocks."""
    torch.manual_seed(0)
    model, random, told = Stages(), Random(0), []
    for turn in range(passes + then):
        if turn <= passes:
            model.runs = [random.random() > leaves_out for _ in model.blocks]
        x, found = torch.randn(2, 3, 24, 24), []
        for context in (torch.enable_grad(), lean(**goal)):
            model.zero_grad()
            with context as saved:
                loss = model(x)
            loss.backward()
            found.append([p.grad for p in model.parameters() if p.grad is not None])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        told.append(saved)
    return told, [share(saved) for saved in told]


def test_passes_that_all_differ_keep_to_half_without_rebuilding_all_that_they_can():
    told, shares = steps({"budget": 0.5}, 40, 0.3)
    missed = [saved for saved, one in zip(told, shares, strict=True) if one > MOST * 0.5 + MORE]
    assert len(missed) <= 4
    assert max(shares) < 0.6
    least = [one for one in shares if one < 0.3]  # such a pass rebuilds all that it can
    (known,) = plans.KNOWN.values()
    assert known.wholes == len(least) - 1 < 8  # there was no plan before the first
    assert sum(saved.plan is None for saved in told) > 10  # that was not for lack of passes that differ
    assert all(saved.reasons == [reasons.BEGAN_AS_ANOTHER] * (saved in missed) for saved in told)


def test_passes_that_no_longer_differ_soon_have_a_plan():
    told, _ = steps({"budget": 0.5}, 30, 0.5, then=plans._MOST_EQUAL + 8)
    assert told[30].plan is None  # no pass before it was like it
    assert told[-1].kept_bytes == told[-1].plan.kept_bytes


def test_a_pass_that_keeps_too_much_says_why_and_the_next_ones_get_a_plan():
    told, shares = steps({"budget": 0.3}, 40, 0.5)
    missed = [saved for saved, one in zip(told, shares, strict=True) if one > MOST * 0.3 + MORE]
    assert all(saved.reasons == [reasons.BEGAN_AS_ANOTHER] for saved in missed)
    assert len(missed) < 10


def test_a_peak_is_never_left_to_what_other_passes_did():
    told, _ = steps({"peak": 0.8}, 20, 0.3)
    strays = [i for i, saved in enumerate(told) if reasons.STRAYED in saved.reasons]
    assert strays
    assert all(told[i].plan is None for i in strays)


def test_time_is_not_spent_on_passes_that_differ():
    told, shares = steps({"overhead": 1e-9}, 20, 0.3)
    strays = [one for saved, one in zip(told, shares, strict=True) if reasons.STRAYED in saved.reasons]
    assert len(strays) > 3
    assert min(strays) > 0.9  # nothing is worth its time there


def made_plan():
    """The plan of a pass in which some of several equal tensors are kept."""
    told, _ = steps({"budget": 0.6}, 6, 0.0)
    assert told[-1].plan is not None
    return told[-1].plan


def test_like_tensors_are_treated_alike_in_their_order():
    plan = made_plan()
    calls, rebuilt = plan.made_for.calls, list(plan.rebuild)
    assert {True, False} == set(rebuilt)
    alike = Alike(plan, calls, budget=1.0)
    assert [alike.rebuilds(call) for call in calls] == rebuilt  # each block once more


def test_a_plan_for_other_sizes_decides_by_structure():
    plan = made_plan()
    calls = [(kind, (*shape[:-1], shape[-1] * 3), *rest) for kind, shape, *rest in plan.made_for.calls]
    alike = Alike(plan, [], budget=1.0)
    assert [alike.rebuilds(call) for call in calls] == list(plan.rebuild)


def test_what_no_plan_knows_is_rebuilt_and_a_budget_is_kept():
    plan = made_plan()
    calls = plan.made_for.calls
    kind, shape, *rest = next(call for call, one in zip(calls, plan.rebuild, strict=True) if not one)
    assert Alike(plan, [], budget=1.0).rebuilds((kind, (*shape, 1), *rest))
    tight = Alike(plan, [], budget=0.3)
    rebuilt = [tight.rebuilds(call) for call in calls]
    assert all(now for now, then in zip(rebuilt, plan.rebuild, strict=True) if then)
    assert sum(rebuilt) > sum(plan.rebuild)


class Recurrence(nn.Module):
    """A gated recurrence, written in Python."""

    def __init__(self):
        super().__init__()
        self.gates, self.new, self.norm = nn.Linear(32, 64), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x):
        h, loss = torch.zeros_like(x[0]), 0
        for row in x:
            z, r = self.gates(row + h).sigmoid().chunk(2, -1)
            h = self.norm((1 - z) * torch.tanh(self.new(row) + r * h) + z * h)
            loss = loss + h.square().mean()
        return loss


def test_a_recurrence_over_other_lengths_keeps_to_its_budget_and_makes_few_plans():
    torch.manual_seed(0)
    model, random, shares, reached = Recurrence(), Random(1), [], []
    for _ in range(40):
        x, found = torch.randn(random.randint(6, 20), 64, 32), []
        for context in (torch.enable_grad(), lean(budget=0.5)):
            model.zero_grad()
            with context as saved:
                loss = model(x)
            loss.backward()
            found.append([p.grad for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        shares.append(share(saved))
        reached.append(saved.reasons == [])
    (known,) = plans.KNOWN.values()
    assert known.dear > 1  # than a step
    assert known.wholes * known.dear <= 40 / 32 + 3 + known.dear
    assert all(
        one <= MOST * 0.5 + MORE for one, is_reached in zip(shares, reached, strict=True) if is_reached
    )
    assert sum(reached[10:]) >= 25
    assert sum(one > 0.3 for one in shares) >= 25  # instead of all that can be rebuilt
