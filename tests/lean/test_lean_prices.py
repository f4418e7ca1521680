"""What a plan repeats is priced by what the calls of its own pass took, on CPUs."""

from __future__ import annotations

import time

import pytest
import torch
from lean_cases import forget_trials
from torch import nn

from leannorm import lean
from leannorm.autograd import nodes
from leannorm.saving import plans, rows
from leannorm.saving.log.spent import Spent
from leannorm.saving.remembered import nothing_remembered

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


class Backward(torch.autograd.Function):
    """Takes long in its backward pass alone, of which no price knows."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Slow(Net):
    """A chain of slow calls and nothing else, so that each byte costs much."""

    def branch(self, x, seconds):
        for _ in range(8):
            x = slow_sine(x, seconds)
        return x


def plan_of(net, passes, backward=0.0, between=lambda: None):
    """The plan of plain `lean()` after so many steps."""
    for _ in range(passes):
        x = torch.randn(64, 256, requires_grad=True)
        with lean() as saved:
            loss = Backward.apply(net(x), backward)
        between()
        loss.backward()
    return saved.plan


def test_a_step_that_takes_longer_than_its_prices_is_worth_more_rebuilds():
    """Half of the bytes cost more than a tenth of the expected step, but not of the real one."""
    net = Slow(2e-3)
    before = plan_of(net, 3, backward=0.3)
    after = plan_of(net, 3, backward=0.3)
    assert before.ratio > 0.5
    assert after.ratio <= 0.5
    assert after.overhead < before.overhead or after.ratio < before.ratio


def test_rebuilds_that_take_longer_than_their_calls_did_are_worth_less(monkeypatch):
    net = Slow(2e-3)
    before = plan_of(net, 3)
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda s: sleep(s if torch._C._current_graph_task_id() < 0 else 6 * s))
    with nothing_remembered():
        after = plan_of(net, 6)
    assert before.ratio < 0.8 < after.ratio


def test_one_step_that_waited_for_something_else_does_not_decide(monkeypatch):
    """Of three steps that are measured the middle one counts."""
    net, sleep, steps = Slow(2e-3), time.sleep, 0
    slowly = lambda s: sleep(s if torch._C._current_graph_task_id() < 0 or steps != 3 else 20 * s)  # noqa: E731
    monkeypatch.setattr(time, "sleep", slowly)
    plans = []
    for steps in range(8):  # noqa: B007  (read above)
        plans.append(plan_of(net, 1, backward=0.3))
    assert max(plan.ratio for plan in plans[2:]) > plans[-1].ratio
    assert plans[-1].ratio <= 0.5


@pytest.mark.parametrize("case", ["another step begins", "no backward pass"])
def test_a_step_that_is_not_one_says_nothing(case):
    """Its time is that of two steps, or it has not ended."""
    net = Slow(2e-3)

    def another_step():
        time.sleep(0.3)
        with lean():
            loss = torch.randn(8, 8, 8, requires_grad=True).sin().sum()
        loss.backward()

    plans = []
    for _ in range(6):
        if case == "another step begins":
            plans.append(plan_of(net, 1, between=another_step))
            continue
        with lean() as saved:
            loss = net(torch.randn(64, 256, requires_grad=True))
        del loss
        plans.append(saved.plan)
    assert plans[-1].ratio == plans[2].ratio < 1


def test_what_recording_takes_is_measured(with_and_without_nodes):
    """The log in Python does not measure it."""
    plan_of(Slow(2e-3), 6)
    entries = [entry for known in plans.KNOWN.values() for entry in known.entries]
    found = [share for entry in entries for share in entry.made.recording]
    assert found
    assert all(0 < share < 1 for share in found) if with_and_without_nodes else set(found) == {0}


@pytest.mark.parametrize("share", [0.08, 0.2])
def test_recording_that_takes_more_than_the_tenth_is_reported(share, with_and_without_nodes, monkeypatch):
    measured = nodes.NODES.Spent if with_and_without_nodes else Spent
    monkeypatch.setattr(measured, "shares", lambda _: (0.05, share))
    for _ in range(6):
        x = torch.randn(1 << 18, requires_grad=True)
        with lean() as saved:
            y = x
            for _ in range(8):
                y = (y.sin() + 1).cos()
        y.sum().backward()
    assert saved.plan.made_for.recording == share
    assert saved.plan.overhead >= share
    assert (f"recording alone takes {share:.2f}" in " ".join(saved.reasons)) == (share > 0.1)


def test_two_steps_within_one_pass_say_nothing():
    """The time of the log is that of both."""
    net, plans = Slow(2e-3), []
    for _ in range(4):
        with lean() as saved:
            for _ in range(2):
                x = torch.randn(64, 256, requires_grad=True)
                Backward.apply(net(x), 0.3).backward()
        plans.append(saved.plan)
    assert plans[-1].ratio == plans[1].ratio > 0.5


def test_rows_of_a_log_softmax_are_rebuilds(with_and_without_nodes, monkeypatch):
    if not with_and_without_nodes:
        pytest.skip("the log in Python rebuilds a log-softmax as a whole")
    found, source_of_rows = [], rows.Source.source_of_rows

    def noted(self):
        made = source_of_rows(self)
        found.append((made[2], made[2].rebuilding))
        return made

    monkeypatch.setattr(rows.Source, "source_of_rows", noted)
    head, labels = torch.randn(32, 8192, requires_grad=True), torch.randint(0, 8192, (64,))
    for _ in range(2):  # the second pass follows the plan of the first
        with lean(budget=0.3):
            loss = nn.functional.cross_entropy(torch.randn(64, 32) @ head, labels)
        loss.backward()
        spent, before = found[-1]
        assert spent.rebuilding > before
