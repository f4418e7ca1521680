"""Detectors and a segmenter of torchvision: pyramids, regions, frozen norms; whole steps on made boxes.

One on every run, all with `-m conformance`.
"""

from __future__ import annotations

import gc
import random
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from benchmarks.detectors import NETWORKS, images, loss_of, network
from leannorm import lean
from leannorm.planning.lines import Lines
from leannorm.saving import plans, recorded_pass

MOST_HELD = {  # under lean("norm"), lean("conv") and lean(budget=0.25)
    "fasterrcnn": (1.0, 0.76, 0.3),
    "maskrcnn": (1.0, 0.73, 0.26),
    "retinanet": (1.0, 0.83, 0.29),
    "fcos": (0.85, 0.69, 0.26),
    "ssdlite": (0.52, 0.29, 0.26),
    "deeplabv3": (0.82, 0.6, 0.26),
}
SETTINGS = {"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.25}


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        whole = metafunc.config.getoption("markexpr") == "conformance"
        marks = [pytest.mark.conformance] if whole else []
        metafunc.parametrize(
            "name", [pytest.param(n, marks=marks) for n in (NETWORKS if whole else ["fcos"])]
        )


def step(model, state, saving, boxes=2):
    model.load_state_dict(state)
    model.zero_grad()
    with saving:
        loss = loss_of(model, boxes)
    loss.backward()
    return [p.grad for p in model.parameters()]


def equal(a, b):
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_of_torchvision(name):
    model = network(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    stock = step(model, state, nullcontext())
    assert any(g is not None and g.isfinite().all() and g.abs().max() > 0 for g in stock)
    for setting, most in zip(SETTINGS, MOST_HELD[name], strict=True):
        saving = lean(**setting)
        for _ in range(2):
            assert equal(step(model, state, saving), stock), setting
        assert saving.kept_bytes / (saving.kept_bytes + saving.rebuilt_bytes) <= most, setting
    if hasattr(model, "transform"):  # a batch without boxes
        stock, saving = step(model, state, nullcontext(), 0), lean("conv")
        assert equal(step(model, state, saving, 0), stock)
        assert saving.rebuilt_bytes > 0


@pytest.mark.filterwarnings("ignore")
def test_plans_for_all_bytes_whatever_the_prices(name, monkeypatch):
    """A step is highest in the middle of its backward pass. A few bytes that are made again there must not
    rule out plans."""
    seen, real = [], plans.plan

    def plan(goal, passed):
        seen.append(passed.lines.step)
        return real(goal, passed)

    monkeypatch.setattr(plans, "plan", plan)
    model = network(name)
    step(model, {key: value.clone() for key, value in model.state_dict().items()}, lean())
    rng = random.Random(0)
    for _ in range(4):
        values = [
            v if v.seconds is None else v._replace(seconds=v.seconds * rng.uniform(0.7, 1.4))
            for v in seen[0].values
        ]
        lines = Lines(replace(seen[0], values=values))
        shares = [point.held / lines.stock.held for point in lines.by_held]
        assert all(a - b < 0.2 for a, b in pairwise(shares) if a > 0.3), [round(share, 2) for share in shares]


WRONG = {  # what torchvision finds before the network runs, and after it
    "a box without area": {"boxes": torch.tensor([[10.0, 10.0, 5.0, 5.0]]), "labels": torch.tensor([1])},
    "a box without label": {"boxes": torch.tensor([[5.0, 5.0, 60.0, 50.0]])},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_of_boxes(wrong):
    """As stock, with stock's error, and nothing left behind."""
    model = network("fcos")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    stock, saving, found = step(model, state, nullcontext()), lean("conv"), []
    before = recorded_pass.LOG.alive()
    for context in (nullcontext(), saving):
        with pytest.raises(Exception) as raised, context:  # noqa: PT011
            model(list(images()), [dict(WRONG[wrong]), dict(WRONG[wrong])])
        found.append((raised.type, str(raised.value)))
        del raised  # its frames hold the pass
    assert found[0] == found[1]
    gc.collect()
    assert recorded_pass.LOG.alive() == before
    assert equal(step(model, state, saving), stock)
    assert saving.rebuilt_bytes > 0
