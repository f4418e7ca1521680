"""What `overhead` chooses of a recorded pass: more time never holds more."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from lean_cases import forget_trials
from torch import nn

from leannorm.planning.goal import Goal
from leannorm.saving import lean, plans, reasons
from leannorm.saving.plan import plan
from leannorm.saving.policy import CONV, LEANEST

SHARES = [i / 400 for i in range(400)]


def kept(passed):
    made = [plan(Goal(overhead=share), passed) for share in SHARES]
    assert all(
        one.overhead <= share + 1e-9 for one, share in zip(made, SHARES, strict=True) if not one.is_dear
    )
    return [one.kept_bytes for one in made]


class Residual(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.shorter = nn.Sequential(nn.Conv2d(a, b, 1, 2, bias=False), nn.BatchNorm2d(b))
        self.longer = nn.Sequential(
            *(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()),
            *(nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)),
        )

    def forward(self, x):
        return torch.relu(self.longer(x) + self.shorter(x))


def stages():
    return nn.Sequential(*(Residual(a, b) for a, b in pairwise((3, 16, 32, 64, 128, 256))))


def recorded(model, x):
    with lean(overhead=0.1) as saved:
        loss = model(x).square().mean()
    loss.backward()
    return saved.plan.made_for


def test_more_time_never_holds_more_of_a_recorded_step():
    passed = recorded(stages(), torch.randn(2, 3, 96, 96))
    assert sum(map(bool, passed.places)) > 10
    held = kept(passed)
    assert held == sorted(held, reverse=True)
    assert held[-1] < held[0]


def bottleneck(width):
    layers = [
        *(nn.Conv2d(4 * width, width, 1), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, 4 * width, 1), nn.BatchNorm2d(4 * width)),
    ]
    return nn.Sequential(*layers)


class Bottlenecks(nn.Module):
    def __init__(self, width=16, blocks=4):
        super().__init__()
        self.stem, self.blocks = (
            nn.Conv2d(3, 4 * width, 1),
            nn.ModuleList(bottleneck(width) for _ in range(blocks)),
        )

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(block(x) + x)
        return x


def all_rebuilt(model, x, policy, goal):
    saved = lean(overhead=goal)  # a goal of its own: plans are kept by goal
    saved._settings = replace(saved._settings, policy=policy)
    with saved:
        loss = model(x).square().mean()
    loss.backward()
    return saved.plan


def test_a_plan_is_never_dearer_than_conv_for_as_many_bytes():
    model, x = Bottlenecks(), torch.randn(2, 3, 48, 48)
    conv, leanest = (all_rebuilt(model, x, policy, goal) for policy, goal in ((CONV, 11.0), (LEANEST, 12.0)))
    assert conv.ratio < 0.6
    least = [one.made_for.lines.by_held[-1].held for one in (leanest, conv)]
    assert least[0] < least[1]
    as_many = conv.ratio + 1 / 128  # the points of a line are so far apart
    chosen = plan(Goal(budget=as_many), leanest.made_for)
    assert chosen.ratio <= as_many
    assert chosen.overhead <= conv.overhead + 1e-3


class Attention(nn.Module):
    """Whose operations save the same tensors with dropout as without, but for the mask."""

    def __init__(self, p):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(24), nn.Linear(24, 72), nn.Linear(24, 24)
        self.bias, self.p = nn.Parameter(torch.zeros(3, 144, 144)), p

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        weights = ((q * 0.35) @ k.transpose(-2, -1) + self.bias).softmax(-1)
        return x + self.out((torch.dropout(weights, self.p, True) @ v).transpose(1, 2).flatten(2))


def kept_under_a_budget(p, budget):
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention(p), Attention(p)), torch.randn(8, 144, 24)
    for _ in range(4):
        with lean(budget=budget) as saved:
            loss = model(x).square().mean()
        loss.backward()
    return saved.kept_bytes / (saved.kept_bytes + saved.rebuilt_bytes)


@pytest.mark.usefixtures("with_and_without_nodes")
@pytest.mark.filterwarnings("ignore:leannorm. budget=")
def test_a_plan_of_a_model_with_dropout_is_none_of_the_one_without():
    assert kept_under_a_budget(0.0, 0.251) < 0.255
    kept_under_a_budget(0.1, 0.25)
    assert kept_under_a_budget(0.0, 0.25) < 0.255


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:leannorm. budget=")
def test_where_a_plan_holds_a_max_pool_its_positions_stay_narrow(dtype, with_and_without_nodes):
    """The pass that the plan was made of held them so, and its promise counts them so."""
    make = lambda: nn.Conv2d(8, 8, 1).to(dtype, memory_format=torch.channels_last)  # noqa: E731
    model = nn.Sequential(make(), nn.SiLU(), nn.MaxPool2d(2), make())
    x = torch.randn(2, 8, 40, 40).to(dtype, memory_format=torch.channels_last)
    for _ in range(4):
        with lean(budget=0.25) as saved:
            loss = model(x).float().square().mean()
        loss.backward()
        if with_and_without_nodes:  # the log in Python keeps nothing in fewer bytes
            assert torch.uint16 in {record.dtype for record in saved.records}
    assert saved.kept_bytes <= 1.05 * saved.plan.kept_bytes


class Norms(nn.Module):
    """Of which the first `depth` blocks run."""

    def __init__(self, blocks=6):
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU())  # noqa: E731
        self.blocks, self.depth = nn.ModuleList(make() for _ in range(blocks)), blocks

    def forward(self, x):
        for block in self.blocks[: self.depth]:
            x = x + block(x)
        return x


def steps_of(model, inputs, **goal):
    """Of each step the share that it kept, of the bytes, and its context."""
    told = []
    for x in inputs:
        saved = lean(**goal)
        with saved:
            loss = model(x).square().mean()
        loss.backward()
        told.append((saved.kept_bytes / (saved.kept_bytes + saved.rebuilt_bytes), saved))
    return told


@pytest.mark.parametrize("goal", [{"budget": 0.4}, {"peak": 0.8}, {"overhead": 0.4}], ids=str)
@pytest.mark.usefixtures("with_and_without_nodes")
@pytest.mark.filterwarnings("ignore:leannorm")
def test_a_batch_of_another_size_has_a_plan_of_its_own(goal):
    """What fits 64 rows is nothing for 2,048, nor the other way round."""
    alone, _ = steps_of(Norms(), [torch.randn(2048, 64) for _ in range(2)], **goal)[-1]
    plans.KNOWN.clear()
    inputs = [torch.randn(rows, 64) for rows in (64, 64, 2048, 2048, 2048)]
    share, saved = steps_of(Norms(), inputs, **goal)[-1]
    assert share <= alone + 0.02
    assert share == pytest.approx(saved.plan.ratio, abs=0.02)
    assert saved.plan.stock_bytes == saved.kept_bytes + saved.rebuilt_bytes


@pytest.mark.usefixtures("with_and_without_nodes")
def test_a_batch_of_about_the_size_follows_the_plan_there_is():
    rows = (1000, 1000, 900, 900, 1100, 1100)
    told = steps_of(Norms(), [torch.randn(n, 64) for n in rows], budget=0.4)
    made = {id(saved.plan.chosen) for _, saved in told}
    assert len(made) == 1
    assert all(share < 0.42 for share, _ in told[1:])


def test_a_peak_in_bytes_has_no_room_for_a_larger_batch():
    model = Norms()
    (_, first), *_ = steps_of(model, [torch.randn(1000, 64)], peak=0.8)
    most = int(0.8 * first.plan.chosen.stock.peak)
    told = steps_of(model, [torch.randn(n, 64) for n in (1000, 1000, 1100, 1100)], peak=most)
    assert told[1][1].plan.chosen is not told[3][1].plan.chosen
    assert told[3][1].plan.chosen.point.peak <= most


@pytest.mark.parametrize("goal", [{"budget": 0.5}, {"peak": 0.8}], ids=str)
@pytest.mark.usefixtures("with_and_without_nodes")
@pytest.mark.filterwarnings("ignore:leannorm")
def test_two_depths_in_turns_settle_each_on_its_plan(goal):
    """The saves of the shorter pass are the beginning of the longer one's."""
    model, told, alone = Norms(), {2: [], 6: []}, {}
    for depth in (2, 6):
        model.depth = depth
        alone[depth], _ = steps_of(model, [torch.randn(256, 64) for _ in range(3)], **goal)[-1]
        plans.KNOWN.clear()
    for depth in (6, 2) * 8:
        model.depth = depth
        told[depth] += steps_of(model, [torch.randn(256, 64)], **goal)
    for depth, steps_there in told.items():
        for share, saved in steps_there[-3:]:
            assert share == pytest.approx(alone[depth], abs=0.02)
            assert saved.plan.stock_bytes == saved.kept_bytes + saved.rebuilt_bytes
    assert sum(len(known.entries) for known in plans.KNOWN.values()) == 2


class Experts(nn.Module):
    """Each is given another number of rows in each pass."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.SiLU()) for _ in range(4))

    def forward(self, x):
        y, shares = self.norm(x), torch.rand(4).tolist()
        return sum(e(y[: int(32 * 16**s)]).square().sum() for e, s in zip(self.experts, shares, strict=True))


@pytest.mark.filterwarnings("ignore:leannorm")
def test_sizes_that_never_repeat_are_planned_ever_more_seldom():
    model = Experts()
    first, later = (steps_of(model, torch.randn(12, 512, 64), budget=0.5) for _ in range(2))
    before, made = ({id(saved.plan.chosen) for _, saved in told if saved.plan} for told in (first, later))
    assert len(made - before) <= 2


@pytest.mark.usefixtures("with_and_without_nodes")
def test_a_nan_tells_nothing_of_the_numbers_that_follow():
    """The fused hardswish gives a NaN of another payload than torch's."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Hardswish(), nn.Conv2d(16, 4, 1))
    xs = torch.randn(5, 4, 3, 32, 32)
    shares = []
    for first in (0.0, torch.nan):
        forget_trials()
        xs[0, 0, 0, 0, 0] = first
        shares.append(steps_of(model, xs, recompute="norm")[-1][0])
    assert shares[0] == shares[1] < 0.6


class Tail(Norms):
    """If only two blocks run, a tail follows of which budgets rebuild enough to keep all of the blocks."""

    def forward(self, x):
        x = super().forward(x)
        if self.depth > 2:
            return x
        wide = x.repeat(1, 4).tanh()
        for _ in range(4):
            wide = wide * wide
        return wide.view(len(x), -1, 64).sum(1)


def test_an_old_plan_does_not_keep_passes_of_another_from_theirs():
    """What begins alike follows no plan once for it, when it is made again, and then its own plan again."""
    model, without_plan, told = Tail(), [], []
    for depth in (6, 6, 2, 2, 2, 2, 2, *[6] * 20, *[2] * 20):
        model.depth = depth
        ((share, saved),) = steps_of(model, [torch.randn(256, 64)], budget=0.65)
        without_plan.append(share < 0.4)  # such a pass rebuilds all that it can
        told.append(reasons.BEGAN_AS_ANOTHER in saved.reasons)
    assert without_plan[0]
    assert sum(without_plan[-20:]) <= 4
    assert not any(without_plan[-4:])
    assert told.index(True) == 7  # the first of those with depth 6 again
    assert sum(told) <= 2


@pytest.mark.usefixtures("with_and_without_nodes")
def test_plans_in_several_sizes_are_one_each_and_keep_no_step(monkeypatch):
    told = steps_of(Norms(), [torch.randn(rows, 64) for rows in (200, 220) * 8], budget=0.6)
    (known,) = plans.KNOWN.values()
    assert len(known.entries) == 2
    assert len({id(entry.made) for entry in known.entries}) == 1
    assert all(entry.plan.made_for.lines is None for entry in known.entries)
    assert len({id(saved.plan) for _, saved in told[4:]}) == 2
