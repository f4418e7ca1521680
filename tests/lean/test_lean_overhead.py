"""`overhead=`: steps are timed, and the plan is corrected until they take what was asked for."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from lean_cases import IMAGE, IMAGES, SEQUENCES, TOKENS, in_a_group, without_nodes
from torch import nn

from leannorm import lean
from leannorm.autograd.nodes import NODES
from leannorm.planning.loop import PLAIN, PLAN, Loop
from leannorm.saving import rates, reasons, timing, watched

pytestmark = [pytest.mark.filterwarnings("ignore:leannorm"), pytest.mark.steps_are_measured]


@pytest.fixture(params=["recorded", "wheel"])
def both(request, monkeypatch):
    """With the C++ nodes and without."""
    if request.param != "wheel" and NODES is None:
        pytest.skip("the nodes are C++")
    if request.param == "wheel":
        without_nodes(monkeypatch)


class Clock:
    """Time as a test has it pass."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(timing, "clock", lambda: self.now)


def network(width=48, blocks=6):
    layers = [m for _ in range(blocks) for m in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
    return nn.Sequential(*layers)


class Steps:
    """Passes at one place, whose steps take what their rebuilds cost."""

    def __init__(self, clock, model, x, each, of_hooks=0.0):
        self.clock, self.model, self.x, self.each, self.of_hooks = clock, model, x, each, of_hooks
        self.source = random.Random(0)

    def stock(self):
        self.model.zero_grad()
        self.model(self.x).square().mean().backward()
        return [p.grad.clone() for p in self.model.parameters()]

    def run(self, asked, passes):
        """What each took beyond a plain one, and whether all gradients are plain PyTorch's."""
        stock, taken, self.equal = self.stock(), [], True
        for _ in range(passes):
            self.model.zero_grad()
            with lean(overhead=asked) as saved:
                loss = self.model(self.x).square().mean()
            rebuilt = sum(record.bytes for record in saved.records if record.rebuilt)
            share = 0.0 if rebuilt == 0 else self.of_hooks + self.each * rebuilt / self.bytes(saved)
            noise = abs(self.source.gauss(0, 0.01)) + (self.source.random() < 0.1)
            self.clock.now += (1 + share) * (1 + noise)
            loss.backward()
            self.equal &= all(
                torch.equal(p.grad, s) for p, s in zip(self.model.parameters(), stock, strict=True)
            )
            taken.append(share)
        self.saved = saved
        return taken

    @staticmethod
    def bytes(saved):
        return saved.kept_bytes + saved.rebuilt_bytes


def settled(taken):
    return Counter(taken[-40:]).most_common(1)[0]


class Prompted(nn.Module):
    """What is saved first is a parameter: its size does not say how large a pass is."""

    def __init__(self, width=48):
        super().__init__()
        self.prompt, self.network = nn.Parameter(torch.randn(256, width)), network(width)

    def forward(self, x):
        return self.network(self.prompt.sin() + x)


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("each", [0.08, 0.5, 2.0])
def test_a_step_takes_what_was_asked_for(monkeypatch, each):
    """A rebuild of all bytes takes so much of a step; the price is any other one."""
    make = network if each != 2.0 else Prompted
    steps = Steps(Clock(monkeypatch), make(), torch.randn(256, 48), each)
    taken = steps.run(0.2, 400)
    assert steps.equal
    plan = steps.saved.plan
    last, count = settled(taken)
    assert count >= 38  # it has ended; a pass of which another plan is made rebuilds all
    assert last <= 0.23
    assert last >= 0.12 or each < 0.2  # as few points as this line has, and all that there is
    assert plan.measured == pytest.approx(last, abs=0.03)
    assert "1.20 asked" in repr(steps.saved)
    assert f"{1 + plan.measured:.2f} measured" in repr(plan)


@pytest.mark.usefixtures("both")
def test_a_busy_first_measurement_of_the_hooks_gives_nothing_up(monkeypatch):
    """They are said to take many times what a step does, and take nothing."""
    table = rates.table(torch.device("cpu"))
    monkeypatch.setattr("leannorm.saving.rates.measured", lambda device: (table._replace(hold=1.0), None))
    steps = Steps(Clock(monkeypatch), network(), torch.randn(256, 48), 0.5)
    taken = steps.run(0.2, 400)
    assert steps.equal
    assert 0.1 <= settled(taken)[0] <= 0.23
    assert steps.saved.rebuilt_bytes > 0
    assert not steps.saved.reasons


@pytest.mark.usefixtures("both")
def test_where_the_hooks_take_more_than_was_asked_passes_are_plain_and_say_so(monkeypatch):
    steps = Steps(Clock(monkeypatch), network(), torch.randn(256, 48), 0.5, of_hooks=0.5)
    taken = steps.run(0.1, 200)
    assert steps.equal
    assert taken[-60:] == [0.0] * 60
    assert any(reason.startswith("overhead=0.1 is out of reach") for reason in steps.saved.reasons)
    assert steps.saved.rebuilt_bytes == 0
    steps.of_hooks = 0.0
    (watch,) = watched.WATCHED.values()
    watch.loop._left = 1  # as after AGAIN passes
    taken = steps.run(0.1, 200)
    assert settled(taken)[0] > 0.05
    assert not steps.saved.reasons


@pytest.mark.usefixtures("both")
def test_a_plain_pass_has_the_bytes_of_all(monkeypatch):
    clock, model, x, seen = Clock(monkeypatch), network(), torch.randn(256, 48), set()
    total = 0
    for turn in range(12):
        with lean(overhead=0.2) as saved:
            loss = model(x).sum()
        loss.backward()
        clock.now += 1.0
        compared = reasons.COMPARED in saved.reasons
        seen.add(compared)
        assert (saved.rebuilt_bytes == 0) == compared, turn
        assert len(saved.records) > 0
        if compared:
            assert saved.kept_bytes == total
        total = saved.kept_bytes + saved.rebuilt_bytes
    assert seen == {False, True}


def test_a_plain_pass_is_run_only_where_there_is_memory_for_it(monkeypatch):
    monkeypatch.setattr(watched, "free_bytes", lambda: 1000)
    model, x = network(), torch.randn(256, 48)
    for _ in range(12):
        with lean(overhead=0.3) as saved:
            loss = model(x).sum()
        loss.backward()
        assert saved.rebuilt_bytes > 0
    assert any("planned by prices and not measured" in reason for reason in saved.reasons)


NETWORKS = {
    **{name: (IMAGES[name], IMAGE) for name in ("silu", "residual, in place", "dense block", "group norm")},
    **{name: (SEQUENCES[name], TOKENS) for name in ("attention", "transformer", "three readers", "rms norm")},
}


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_plain_pytorchs_in_each_pass(monkeypatch, name):
    """Whichever it is: one that follows the plan, a plain one, or one of another plan."""
    clock, (make, shape) = Clock(monkeypatch), NETWORKS[name]
    model, kinds = make(), set()
    for turn in range(20):
        x, state, found = torch.randn(shape), torch.get_rng_state(), []
        buffers = [buffer.clone() for buffer in model.buffers()]
        for lean_here in (False, True):
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            torch.set_rng_state(state)
            model.zero_grad()
            if lean_here:
                with lean(overhead=0.3) as saved:
                    loss = model(x).square().mean()
                clock.now += 1.0 + 0.2 * (saved.rebuilt_bytes > 0)
                kinds.add(saved.rebuilt_bytes > 0)
            else:
                loss = model(x).square().mean()
            loss.backward()
            found.append([p.grad.clone() for p in model.parameters()])
        assert all(map(torch.equal, *found)), turn
    assert kinds == {False, True}


class Event:
    """As CUDA's, of a GPU that is some steps behind."""

    done: float = 0.0

    def __init__(self, at):
        self.at = at

    def query(self):
        return self.at <= Event.done

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


@pytest.fixture
def told(monkeypatch):
    """The kind of each pass whose time counts, and the time for each byte of its first tensor."""
    times = []
    monkeypatch.setattr(Loop, "note", lambda loop, kind, seconds, at: times.append((kind, seconds)))
    return times


def test_on_a_gpu_events_are_read_once_it_has_passed_them(monkeypatch, told):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(timing.Timer, "_event", staticmethod(lambda: Event(clock.now)))
    model, x, lasted, size = network(), torch.randn(256, 48), [], 256 * 48 * 4
    for turn in range(40):
        with lean(overhead=0.3):
            loss = model(x).sum()
        clock.now += 1 + turn / 100
        loss.backward()
        lasted.append(round(1 + turn / 100, 6))
        Event.done = clock.now - 2.5
    times = [round(seconds * size, 6) for _, seconds in told]
    assert len(times) > 25
    assert set(times) <= set(lasted)
    assert times == sorted(times)
    assert {kind for kind, _ in told} == {PLAIN, PLAN}


def test_a_time_in_which_another_pass_was_opened_does_not_count(monkeypatch, told):
    clock, model, x = Clock(monkeypatch), network(), torch.randn(256, 48)

    def step(others):
        with lean(overhead=0.3):
            loss = model(x).sum()
        if others:
            with lean("norm"):
                loss = loss + model(x).sum()
        clock.now += 1
        loss.backward()

    for _ in range(20):
        step(others=True)
    assert not told
    for _ in range(20):
        step(others=False)
    assert {kind for kind, _ in told} == {PLAIN, PLAN}


@pytest.mark.usefixtures("both")
def test_sizes_that_take_turns_are_exact_and_have_plans(monkeypatch):
    clock, model, xs = Clock(monkeypatch), network(), (torch.randn(256, 48), torch.randn(1024, 48))
    for turn in range(60):
        x = xs[turn % 3 == 0]
        model.zero_grad()
        model(x).square().mean().backward()
        stock = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        with lean(overhead=0.3) as saved:
            loss = model(x).square().mean()
        clock.now += len(x) * (1 + 0.2 * (saved.rebuilt_bytes > 0))
        loss.backward()
        assert all(torch.equal(p.grad, s) for p, s in zip(model.parameters(), stock, strict=True))


@pytest.mark.usefixtures("both")
def test_passes_without_gradients_are_none_of_those_that_are_measured(monkeypatch):
    clock, model, x, plain = Clock(monkeypatch), network(), torch.randn(256, 48), []
    for turn in range(32):
        with torch.set_grad_enabled(turn % 2 == 0), lean(overhead=0.3) as saved:
            loss = model(x).sum()
        clock.now += 1
        plain.append(reasons.COMPARED in saved.reasons)
        if turn % 2 == 0:
            loss.backward()
        else:
            assert not saved.records
            assert not saved.reasons
    assert any(plain[::2])


def test_backward_twice_or_never_is_no_error(monkeypatch):
    Clock(monkeypatch)
    model, x = network(), torch.randn(256, 48)
    for turn in range(24):
        with lean(overhead=0.3):
            loss = model(x).sum()
        if turn % 3:
            loss.backward(retain_graph=True)
            loss.backward()
        del loss


def test_with_several_ranks_nothing_is_measured():
    assert watched.watch_of("a place") is not None
    with in_a_group():
        assert watched.watch_of("a place") is None


def test_free_memory_is_a_number_of_bytes():
    free = watched.free_bytes()
    assert free is None or 0 < free < 1 << 50
