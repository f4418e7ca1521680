"""`held="host"`: what is kept waits on the host. Links of tests/lean/links.py stand in for a device's copies.

What it trusts, and a program for each that breaks it: copies are over before they are read, memory that is
copied is neither freed nor written, values are read in the order of the last pass, buffers come back.
"""

import copy
import gc
import pickle
from contextlib import nullcontext

import lean_cases
import pytest
import torch
from links import deep, equal, nothing_is_left
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from leannorm import lean, make_lean, unmake_lean
from leannorm._errors import InputError
from leannorm._report import bytes_in_words
from leannorm.saving import host, reasons


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.GroupNorm(4, 16)),
        *(nn.ReLU(True), nn.Dropout(0.3), nn.Flatten(2), nn.Linear(100, 64), nn.LayerNorm(64), nn.GELU()),
        nn.Linear(64, 32),
    )


def trained(context, make=network, steps=3, sizes=(14,)):
    """Gradients and buffers of a few steps, and the last context."""
    model, found = make(), []
    for step in range(steps):
        model.zero_grad()
        torch.manual_seed(step)
        size = sizes[step % len(sizes)]
        x = torch.randn(4, 3, size, 14, requires_grad=True)
        with (opened := context()):
            loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    return [*found, *model.buffers()], opened


SETTINGS = [{}, {"recompute": "norm"}, {"recompute": "conv"}]
SETTINGS += [{"budget": 0.6}, {"peak": 0.8}, {"overhead": 50.0}, {"verify": True}]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_gradients_are_those_of_plain_torch(link, setting):
    ours, saved = trained(lambda: lean(**setting, held="host"), steps=4)
    assert equal(ours, trained(nullcontext, steps=4)[0])
    assert link.out
    assert saved.moved_bytes <= saved.kept_bytes


@pytest.mark.sampled(of=4)
@pytest.mark.parametrize("name", [*lean_cases.IMAGES, *lean_cases.SEQUENCES])
def test_networks_have_their_bits(late, name):
    make = {**lean_cases.IMAGES, **lean_cases.SEQUENCES}[name]
    shape = lean_cases.IMAGE if name in lean_cases.IMAGES else lean_cases.TOKENS
    model, x = make(), torch.randn(shape)

    def step(context):
        model.zero_grad()
        own = x.clone().requires_grad_()
        torch.manual_seed(1)
        with context:
            loss = model(own).float().square().mean()
        loss.backward()
        return [own.grad, *(p.grad for p in model.parameters())]

    stock = step(nullcontext())
    for setting in ({"recompute": "norm"}, {"budget": 0.5}, {"budget": 0.5}):
        assert equal(step(lean(**setting, held="host")), stock)


def test_what_is_moved_is_reported_and_its_memory_free(late):
    x = torch.randn(64, 64)
    for _ in range(2):
        with lean("norm", held="host") as saved:
            loss = deep()(x).square().mean()
        moved = saved.moved_bytes
        loss.backward()
    assert 0 < moved <= saved.kept_bytes
    assert f"({bytes_in_words(moved)} on the host)" in repr(saved)
    assert moved >= 7 * x.nbytes
    assert late.out == 2 * moved
    with lean("norm", held="host"):
        w = torch.randn(64, 64, requires_grad=True)
        y = x @ w
        memory = StorageWeakRef(y.untyped_storage())
        for _ in range(6):
            y = y.sin() @ w
    assert memory.expired()


def test_values_are_on_their_way_back_before_they_are_read(late, monkeypatch):
    """In the first backward pass too. The last values that were saved have not left yet."""
    events, fetch, take = [], host.Moved.fetch, host.Moved.take
    monkeypatch.setattr(
        host.Moved, "fetch", lambda self: (events.append(("fetch", self.number)), fetch(self))
    )
    monkeypatch.setattr(
        host.Moved, "take", lambda self: (events.append(("take", self.number)), take(self))[1]
    )
    model, x = deep(), torch.randn(64, 64)
    for _ in range(2):
        events.clear()
        with lean("norm", held="host"):
            loss = model(x).square().mean()
        loss.backward()
        taken = [number for what, number in events if what == "take"]
        assert len(taken) >= 5
        assert [n for n in taken if events[events.index(("take", n)) - 1] == ("fetch", n)] == []


@pytest.mark.parametrize("one_pass", [True, False], ids=["steps of one pass", "passes"])
def test_values_come_back_in_the_order_of_the_last_backward_pass(late, one_pass, monkeypatch):
    """Rebuilds read what they are made of early, so that is not the order in which values have left."""
    fetched, fetch = [], host.Moved.fetch
    monkeypatch.setattr(host.Moved, "fetch", lambda self: (fetched.append(self.number), fetch(self)))
    moves, order = host.Moves({}), (1, 3, 0, 2, 4)
    for turn in range(3):
        moves = moves if one_pass else host.Moves({})
        held = [moves.hold(torch.full((64,), number)) for number in range(7)]  # the last two have not left
        assert [one.number for one in held] == list(range(7))
        monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda turn=turn: turn)
        fetched.clear()
        for number in (5, 6, *order):
            assert torch.equal(held[number](), torch.full((64,), number))
        assert (tuple(fetched) == order) is (turn > 0)
        assert sorted(fetched) == list(range(5))
        held.clear()


def test_each_value_comes_back_once(late):
    for _ in range(3):
        before = late.out, late.back
        with lean("norm", held="host"):
            loss = deep()(torch.randn(64, 64)).square().mean()
        out = late.out - before[0]
        loss.backward()
        assert late.back - before[1] <= out


@pytest.mark.parametrize("reads", [True, False], ids=["and again", "once"])
def test_a_graph_may_be_read_again_and_differentiated_twice(link, reads):
    found = []
    for context in (nullcontext, lambda: lean("norm", held="host")):
        x = torch.linspace(-1, 1, 4096).reshape(64, 64).requires_grad_()
        with context():
            y = x
            for _ in range(5):
                y = torch.tanh(y @ y) * 1.1
            loss = y.square().sum()
        first = torch.autograd.grad(loss, x, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), x, retain_graph=reads)[0]
        found += [[first.detach(), second]]
        if reads:
            found[-1].append(torch.autograd.grad(loss, x)[0])
        del first, y, loss
    assert equal(*found)


def test_a_graph_that_dies_leaves_nothing(link):
    for _ in range(3):
        with lean("norm", held="host") as saved:
            loss = deep()(torch.randn(64, 64)).square().mean()
        assert link.buffers.all
        del loss
        gc.collect()
        assert nothing_is_left(link)
    del saved


def test_a_graph_that_dies_in_the_middle_of_its_backward_pass_leaves_nothing(link):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ValueError("in the middle")

    for _ in range(2):
        model, x = deep(), torch.randn(64, 64)
        with lean("norm", held="host"):
            loss = model[8:](Fails.apply(model[:8](x))).square().mean()
        with pytest.raises(ValueError, match="in the middle"):
            loss.backward()
        del loss
        gc.collect()
        assert nothing_is_left(link)
    ours, stock = (trained(c, steps=2)[0] for c in (lambda: lean("norm", held="host"), nullcontext))
    assert equal(ours, stock)


def test_an_error_in_the_forward_pass_leaves_nothing(link):
    model, x = deep(), torch.randn(64, 64)

    def fails():
        with lean("norm", held="host"):
            model(x).square()
            raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        fails()
    gc.collect()
    assert nothing_is_left(link)


def test_a_copy_that_fails_leaves_the_tensor_where_it_is(late, monkeypatch):
    def full(nbytes):
        raise RuntimeError("no pinned memory is left")

    monkeypatch.setattr(late.buffers, "allocate", full)
    reasons.WARNED.clear()
    with pytest.warns(UserWarning, match="a tensor could not be moved to the host"):
        ours, saved = trained(lambda: lean("conv", held="host"), steps=1)
    assert equal(ours, trained(nullcontext, steps=1)[0])
    assert any("no pinned memory" in reason for reason in saved.reasons)
    assert not saved.moved_bytes


def test_without_memory_for_the_next_values_each_comes_when_it_is_read(late, monkeypatch):
    model, x = deep(), torch.randn(64, 64)
    stock = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    fetch, reads = host.Moved.fetch, []

    def full(self):
        reads.append(self)
        if len(reads) % 2 == 0:
            raise torch.OutOfMemoryError("none")
        fetch(self)

    with lean("norm", held="host"):
        loss = model(x).square().mean()
    monkeypatch.setattr(host.Moved, "fetch", full)
    assert equal(torch.autograd.grad(loss, list(model.parameters())), stock)
    assert len(reads) > 4
    reads.clear()


def test_a_lean_model_and_copies_of_the_setting(late):
    model = make_lean(deep(), "norm", held="host")
    model(torch.randn(64, 64)).sum().backward()
    assert late.out
    unmake_lean(model)
    for other in (copy.copy(lean(held="host")), pickle.loads(pickle.dumps(lean(held="host")))):
        assert other._settings == lean(held="host")._settings


def test_on_a_cpu_nothing_is_moved_and_it_is_said(log):
    reasons.WARNED.clear()
    with pytest.warns(UserWarning, match="nothing is moved to the host that is on a CPU"):
        ours, saved = trained(lambda: lean("norm", held="host"))
    assert equal(ours, trained(nullcontext)[0])
    assert saved.moved_bytes == 0
    assert saved.reasons[0].startswith("nothing is moved")


def test_another_word_is_refused():
    with pytest.raises(InputError, match=r'held is "host", a context .* got .cpu.'):
        lean(held="cpu")
