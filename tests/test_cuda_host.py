"""What only a GPU can show of `held="host"`: its streams, pinned memory, copies that run next to kernels."""

from __future__ import annotations

import copy

import pytest
import torch
from test_cuda import pytestmark, repeatable, same_twice, step  # noqa: F401
from test_cuda_lean import BLOCKS
from test_lean import assert_same
from torch import nn

from leannorm.saving import host, lean

SETTINGS = [{}, {"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.3}, {"peak": 0.8}]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_passes_have_the_same_bits(name, setting):
    make, shape = BLOCKS[name]
    model = make().cuda()
    for _ in range(4):
        x = torch.randn(shape, device="cuda")
        stock = same_twice(copy.deepcopy(model), x, False)
        ours = step(model, x, lean(**setting, held="host"), False)
        assert_same({key: ours[key] for key in stock}, stock)


def layers(count=8, size=2048):
    made = (layer for _ in range(count) for layer in (nn.Linear(size, size), nn.Tanh()))
    return nn.Sequential(*made).cuda()


def test_large_values_leave_and_come_back_with_their_bits():
    model, x = layers(), torch.randn(4096, 2048, device="cuda")
    pinned = []
    for _ in range(6):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with lean("norm", held="host") as saved:
            loss = model(x).square().mean()
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        assert saved.moved_bytes >= 6 * x.nbytes
        assert kept <= 4 * x.nbytes  # twice the largest may be on its way
        loss.backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().mean().backward()
        assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))
        model.zero_grad()
        del loss, found
        pinned.append(host.link_of(x.device).buffers.all)
    assert pinned[-1] == pinned[0]


def test_copies_run_next_to_kernels():
    """The stream of the copies is busy while the pass computes, and the host waits for neither."""
    model, x = layers(), torch.randn(4096, 2048, device="cuda")
    for _ in range(2):
        with lean("norm", held="host"):
            loss = model(x).square().mean()
        loss.backward()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10**8)
        with lean("norm", held="host"):
            loss = model(x).square().mean()
        assert not torch.cuda.current_stream().query()
        loss.backward()
        assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
