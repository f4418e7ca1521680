"""What only a GPU can show of captured graphs under `lean()`, and of launches by CUDA's driver."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext

import lean_cases
import pytest
import torch
from test_cuda import pytestmark, repeatable  # noqa: F401
from torch import nn

import leannorm
from leannorm import convert
from leannorm.saving import lean, small

SETTINGS = {"norm": {"recompute": "norm"}, "conv": {"recompute": "conv"}, "budget": {"budget": 0.4}}


def opened(setting):
    around = lean(**setting)
    around.place = small.NEVER_SMALL
    return around


def network(converted):
    model = lean_cases.around(nn.ReLU(), nn.MaxPool2d(2), nn.SiLU())
    return (convert(model) if converted else model).cuda()


def on_the_side(run, times):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            run()
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("which", SETTINGS)
@pytest.mark.parametrize("converted", [False, True])
def test_a_whole_step_with_its_optimizer(which, converted):
    torch.manual_seed(0)
    ours = network(converted)
    plain = copy.deepcopy(ours)
    x = torch.randn(lean_cases.IMAGE, device="cuda")
    inputs = [torch.randn_like(x) for _ in range(3)]

    def step(model, optimizer, setting):
        with nullcontext() if setting is None else opened(setting) as saved:
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return saved

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, plain)]

    def warm(model, optimizer, setting):
        def run():
            optimizer.zero_grad()
            step(model, optimizer, setting)

        on_the_side(run, 5)
        optimizer.zero_grad()

    warm(ours, optimizers[0], SETTINGS[which])
    warm(plain, optimizers[1], None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        saved = step(ours, optimizers[0], SETTINGS[which])
    assert saved.rebuilt_bytes > 0
    for values in inputs:
        x.copy_(values)
        graph.replay()
        optimizers[1].zero_grad()
        step(plain, optimizers[1], None)
    for a, b in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("which", ["norm", "conv"])
def test_make_graphed_callables(which):
    torch.manual_seed(0)
    model, x = network(False), torch.randn(lean_cases.IMAGE, device="cuda")
    plain, told, forward = copy.deepcopy(model), [], model.forward
    state = copy.deepcopy(model.state_dict())

    def run(v):
        with opened(SETTINGS[which]) as saved:
            y = forward(v)
        told.append(saved)
        return y

    model.forward = run
    graphed = torch.cuda.make_graphed_callables(model, (x.clone(),))
    model.load_state_dict(state)
    assert told[-1].rebuilt_bytes > 0
    for _ in range(3):
        x.normal_()
        for m in (graphed, plain):
            m.zero_grad()
            m(x).square().mean().backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("make", [nn.BatchNorm2d, nn.GroupNorm])
def test_converted_norms_are_rebuilt_like_torchs(make):
    """A pass hears the calls of Triton's kernels, the repeated ones too."""
    norm = make(16) if make is nn.BatchNorm2d else make(4, 16)
    first, last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1)
    plain = nn.Sequential(first, norm, nn.SiLU(), last).cuda()
    found = []
    for model in (plain, convert(copy.deepcopy(plain))):
        for _ in range(4):
            with opened(SETTINGS["norm"]) as saved:
                loss = model(torch.randn(lean_cases.IMAGE, device="cuda")).square().mean()
            loss.backward()
        found.append(saved.rebuilt_bytes)
    assert found[1] >= 0.9 * found[0] > 0


def test_a_thread_without_a_context():
    """Its first call is a repeated one: what the driver refuses there, Triton launches."""
    layer, x = leannorm.nn.LayerNorm(64).cuda(), torch.randn(32, 64, device="cuda")
    found = [layer(x).detach() for _ in range(2)]
    thread = threading.Thread(target=lambda: found.append(layer(x).detach()))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert len(found) == 3
    assert all(torch.equal(y, found[0]) for y in found)
