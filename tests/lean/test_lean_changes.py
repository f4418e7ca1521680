"""Passes that differ from those before them: what was learned of one holds for another, or is not used.

Each program is run six times as it is, then with a change.
"""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from changes_listings import GUARDED, Program, flags_within, scaled_before_edit
from lean_cases import forget_trials
from torch import nn

from leannorm.saving import lean, recorded_pass


@pytest.fixture(autouse=True)
def all_sizes_are_rebuilt(monkeypatch):
    monkeypatch.setattr(recorded_pass, "SMALLEST", 1)
    forget_trials()


@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("f", GUARDED)
@pytest.mark.sampled(of=2)
def test_what_has_changed_is_seen(f, setting):
    program = Program(f, kernel=3 if f is flags_within else 1)
    for seed in range(6):
        program.gradients(lean(setting), False, seed)
    for seed, other in enumerate([True, False, True, True]):
        stock = program.gradients(contextlib.nullcontext(), other, seed)
        found = program.gradients(lean(setting), other, seed)
        if isinstance(stock, str):
            assert isinstance(found, str)
        elif isinstance(found, str):  # as documented, where every parameter may be read again
            assert (f, setting) == (scaled_before_edit, "conv")
            assert "through .data" in found
        else:
            assert all(torch.equal(a, b) for a, b in zip(stock, found, strict=True))


def test_a_small_weight_that_was_edited_through_data():
    """A convolution is rebuilt by its weight, of which the log has a copy."""
    program = Program(
        lambda m, x, other: m[2](F.silu(m[1](F.silu(m[0](x))))).square().sum(),
        after=lambda m: m[0].weight.data.mul_(2),
    )
    for seed in range(6):
        program.gradients(lean("conv"), False, seed)
    stock = program.gradients(contextlib.nullcontext(), True, 9)
    found = program.gradients(saved := lean("conv"), True, 9)
    assert saved.rebuilt_bytes
    assert all(map(torch.equal, found, stock))


@pytest.mark.parametrize("setting", ["norm", "conv"])
def test_flags_set_between_passes_are_seen(setting):
    program = Program(lambda m, x, other: m[2](F.silu(m[1](F.silu(m[0](x))))).square().sum(), kernel=3)
    for seed in range(6):
        program.gradients(lean(setting), False, seed)
    torch._C._set_mkldnn_enabled(False)
    try:
        stock = program.gradients(contextlib.nullcontext(), False, 7)
        found = program.gradients(lean(setting), False, 7)
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert all(torch.equal(a, b) for a, b in zip(stock, found, strict=True))


def _net():
    torch.manual_seed(0)
    acts = nn.SiLU(), nn.ReLU(), nn.Hardswish(True)
    parts = [(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), act) for act in acts]
    return nn.Sequential(*[layer for part in parts for layer in part], nn.Flatten(), nn.Linear(8 * 36, 10))


def test_an_edit_that_the_backward_pass_never_meets():
    """What a node saved was edited before its output was saved: the output is held."""

    def gradient(context, other):
        torch.manual_seed(1)
        with context:
            y = program.m[0](torch.randn(4, 8, 6, 6))
            a = F.silu(y)
            if other:
                with torch.no_grad():
                    y.mul_(2)
            loss = program.m[1](a).square().sum()
        return torch.autograd.grad(loss, program.m[1].weight)[0]

    program = Program(None)
    for _ in range(6):
        gradient(lean("norm"), False)
    assert torch.equal(gradient(contextlib.nullcontext(), True), gradient(lean("norm"), True))


def test_several_threads_have_the_same_bits():
    errors, inputs = list[Exception](), [torch.randn(4, 8, 6, 6) for _ in range(6)]
    nets = [_net() for _ in range(4)]

    def passes(net):
        for x in inputs:
            net.zero_grad()
            with lean("norm"):
                loss = net(x).square().sum()
            loss.backward()
            yield [p.grad.clone() for p in net.parameters()]

    alone = list(passes(nets[0]))

    def work(net):
        try:
            for a, b in zip(alone, passes(net), strict=True):
                assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(net,)) for net in nets[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_graph_is_read_twice_and_two_are_alive():
    net = _net()
    torch.manual_seed(7)
    xs = [torch.randn(4, 8, 6, 6) for _ in range(2)]
    losses = []
    for x in xs:
        with lean("norm"):
            losses.append(net(x).square().sum())
    first = torch.autograd.grad(losses[0], list(net.parameters()), retain_graph=True)
    torch.autograd.grad(losses[1], list(net.parameters()))
    second = torch.autograd.grad(losses[0], list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nothing_is_left_of_passes_with_and_without_a_backward_pass():
    net, before = _net(), recorded_pass.LOG.alive()
    for i in range(20):
        with lean("norm") as saved:
            loss = net(torch.randn(4, 8, 6, 6)).square().sum()
        if i % 2:
            loss.backward()
        assert saved.records
        del loss
    assert recorded_pass.LOG.alive() == before
