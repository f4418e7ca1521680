"""What plans say of values on the host, against a link with a clock (tests/lean/links.py)."""

import copy
import random
from contextlib import nullcontext

import pytest
import torch
from links import Late, Timed, equal
from torch import nn

from leannorm import lean
from leannorm.planning.moves import Away, Moving
from leannorm.saving import host, planned_pass, plans, reasons
from leannorm.saving.rates import table


@pytest.mark.parametrize("seed", range(40))
def test_the_computation_waits_as_long_as_planned(seed, monkeypatch):
    """The same steps, moment by moment: values of random sizes leave, and are read backwards."""
    rng = random.Random(seed)
    count = rng.randint(1, 12)
    taken = [rng.uniform(0.1, 2) for _ in range(2 * count)]
    sizes = [rng.choice([64, 512, 4096]) for _ in range(count)]
    link = Timed(rng.choice([30, 300, 1000, 1e5]))
    monkeypatch.setattr(host, "link_of", lambda device: link)
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 1)
    host._ORDERS.clear()
    moves, held = host.Moves({}), []
    for i in range(count):
        link.clock += taken[i]
        held.append(moves.hold(torch.full((sizes[i],), i, dtype=torch.uint8)))
    moves._let_go()  # `end` does so with a plan, which has chosen only what has left by then
    for moment in range(count, 2 * count):
        i = 2 * count - 1 - moment
        assert torch.equal(held[i](), torch.full((sizes[i],), i, dtype=torch.uint8))
        link.clock += taken[moment]
    values = [Away(size, i, 2 * count - 1 - i) for i, size in enumerate(sizes)]
    assert link.waited == pytest.approx(Moving(taken, count, link.bandwidth, values).waited)
    assert link.faults == []


def network():
    torch.manual_seed(0)
    layers = (nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.Tanh())
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(6) for layer in layers))


def noisy():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.RReLU())))


def passes(context, make=network, steps=3):
    """Gradients of the last of some steps, and its `lean` object, with the bytes that had been moved."""
    model = make()
    for step in range(steps):
        model.zero_grad()
        torch.manual_seed(step)
        with context() as saved:
            loss = model(torch.randn(64, 64)).square().mean()
        moved = 0 if saved is None else saved.moved_bytes
        loss.backward()
    return [p.grad for p in model.parameters()], saved, moved


@pytest.fixture
def bandwidth(log, monkeypatch):
    """Sets the speed of the link to the host, at the prices of the table."""
    monkeypatch.setenv("LEANNORM_RATES", "")
    link = Late()
    monkeypatch.setattr(host, "link_of", lambda device: link)

    def is_set(to):
        rates = table(torch.device("cpu"))._replace(link=to)
        monkeypatch.setattr(planned_pass, "rates_for", lambda goal, device: (rates, None))
        plans.KNOWN.clear()

    yield is_set
    assert link.faults == []


FAST, SLOW = 1e15, 1e4


def test_a_plan_moves_over_a_fast_link_and_rebuilds_over_a_slow_one(bandwidth):
    stock = passes(nullcontext)[0]
    bandwidth(FAST)
    gradients, saved, moved = passes(lambda: lean(budget=0.3, held="host"))
    assert equal(gradients, stock)
    whole = saved.kept_bytes + saved.rebuilt_bytes
    assert saved.rebuilt_bytes == 0
    assert 0 < saved.kept_bytes - moved <= 0.32 * whole
    assert saved.plan.chosen.overhead == pytest.approx(0, abs=1e-6)
    assert "of the bytes on the host" in repr(saved)
    bandwidth(SLOW)
    gradients, saved, moved = passes(lambda: lean(budget=0.3, held="host"))
    assert equal(gradients, stock)
    assert moved == 0
    alone = passes(lambda: lean(budget=0.3))[1]
    assert saved.plan.rebuild == alone.plan.rebuild


def test_between_the_two_a_plan_does_both_and_takes_less_time_than_either(bandwidth):
    bandwidth(SLOW)
    alone = passes(lambda: lean(budget=0.2, held="host"))[1].plan
    mixed = []
    for speed in (1e8, 3e8, 1e9, 2e9):
        bandwidth(speed)
        _, saved, moved = passes(lambda: lean(budget=0.2, held="host"))
        assert saved.plan.chosen.reached
        assert saved.plan.overhead <= alone.overhead + 1e-9
        mixed.append(moved > 0 and saved.rebuilt_bytes > 0)
    assert any(mixed)


def test_what_rebuilding_cannot_reach_is_reached_with_the_host(bandwidth):
    bandwidth(FAST)
    """What draws random numbers is not called again."""
    reasons.WARNED.clear()
    with pytest.warns(UserWarning, match="out of reach"):
        assert not passes(lambda: lean(budget=0.5), noisy)[1].plan.chosen.reached
    gradients, saved, moved = passes(lambda: lean(budget=0.5, held="host"), noisy)
    assert saved.plan.chosen.reached
    assert moved
    assert equal(gradients, passes(nullcontext, noisy)[0])


@pytest.mark.parametrize("setting", [{}, {"overhead": 50.0}, {"peak": 0.8}], ids=str)
def test_every_goal_may_move(bandwidth, setting):
    """More is freed, or a peak is reached in less time, and the bits are the same."""
    stock = passes(nullcontext)[0]
    bandwidth(FAST)
    gradients, saved, moved = passes(lambda: lean(**setting, held="host"))
    assert equal(gradients, stock)
    assert moved
    alone = passes(lambda: lean(**setting))[1].plan
    assert saved.plan.ratio <= alone.ratio
    assert saved.plan.chosen.overhead <= alone.chosen.overhead + 1e-9


def test_a_pass_on_a_cpu_has_the_plan_that_it_has_without_a_host(log, monkeypatch):
    monkeypatch.setenv("LEANNORM_RATES", "")
    reasons.WARNED.add(reasons.NOT_MOVED.split(":")[0])
    found = [passes(lambda held=held: lean(budget=0.4, held=held))[1] for held in ("host", None)]
    assert found[0].plan.rebuild == found[1].plan.rebuild
    assert found[0].moved_bytes == 0
