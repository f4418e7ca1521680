"""What `lean()` trusts is told by the pass itself: programs that broke another clock, a shorter key, or a
setting. Each failed before; `stock` is the same program without `lean()`."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn

from leannorm import lean
from leannorm.saving import trial

SETTINGS = [{}, {"recompute": "conv"}, {"budget": 0.05}, {"verify": True}]
IMAGE = torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(trial, "_SEEN", {})


def seen(program, *arguments):
    """What the program returns, by stock autograd and under lean()."""
    found = []
    for context in (contextlib.nullcontext, lean):
        torch.manual_seed(0)
        found.append([t.detach().clone() for t in program(context, *arguments)])
    return found


def assert_as_stock(program, *arguments):
    stock, ours = seen(program, *arguments)
    assert len(stock) == len(ours)
    assert all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))


# ---------------------------------------------------------------- a clock of the pass


def test_a_cast_that_another_thread_made_before_the_optimizer_step():
    """A busy thread makes the cast, an idle one uses it: their nodes are numbered by two counters."""

    def program(context):
        w = nn.Parameter(torch.randn(64, 64))
        x, found, kept = ROWS[:, :64].clone().requires_grad_(), [], []

        def busy():
            y = torch.zeros(1, requires_grad=True)
            for _ in range(500):
                y = y + 1
            kept.append(w.to(torch.bfloat16))

        def idle():
            for _ in range(2):  # at the second pass the leaf is known
                with context():
                    loss = (x.to(torch.bfloat16) @ kept[0]).float().square().sum()
                loss.backward()
            found.append(x.grad)

        for work in (busy, None, idle):
            if work is None:
                with torch.no_grad():
                    w.mul_(3)
                continue
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return found

    assert_as_stock(program)
