"""A graph that is never run backward is freed where it is dropped, as without `lean()`.

Autograd's nodes hold values through C++, where Python's collector sees nothing: a value that held the node
that saved it would never go.
"""

from __future__ import annotations

import copy

import lean_cases
import pytest
import torch
import torch.nn.functional as F
from contract import FIRST
from torch import nn

import leannorm
import leannorm.functional as LF
from leannorm import lean
from leannorm.report import recipes
from leannorm.saving import small

SETTINGS = {
    "norm": {},
    "conv": {"recompute": "conv"},
    "budget": {"budget": 0.05},
    "verify": {"verify": True},
    "held": {"held": (lambda t: t.clone(), lambda t: t)},
}
PROGRAMS = recipes._PROGRAMS
NETWORKS = {
    **{name: (make, lean_cases.IMAGE) for name, make in lean_cases.IMAGES.items()},
    **{name: (make, lean_cases.TOKENS) for name, make in lean_cases.SEQUENCES.items()},
}


@pytest.fixture(autouse=True)
def no_small_passes(monkeypatch):
    monkeypatch.setattr(small, "SMALL", -1)


def dropped(forward, **settings):
    """The values that are left of a pass whose result is dropped, without a look by the collector."""
    left = []
    for _ in range(2):  # the second pass follows a plan
        saved = lean(**settings)
        with saved:
            result = forward()
        references = list(saved._ledger.references)
        assert references or not torch.is_tensor(result) or not result.requires_grad
        del result
        left += [value.name for value in (reference() for reference in references) if value is not None]
    return left


@pytest.mark.filterwarnings("ignore:leannorm")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_of_every_recipe(kind, setting):
    program = PROGRAMS[kind]

    def forward():
        leaf = torch.randn(program.shape, requires_grad=True)
        y = program.run(F.silu(leaf), leaf)
        return y.square().sum() + y.abs().sqrt().sum()

    assert not dropped(forward, **SETTINGS[setting])


@pytest.mark.filterwarnings("ignore:leannorm")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_of_every_layer(case, setting):
    layer, wide = case.make(), nn.Linear(1, 1)

    def forward():
        inputs = [t.detach().requires_grad_() for t in case.inputs(torch.float32)]
        y = layer(inputs[0] * wide.weight[0, 0], *inputs[1:])
        return y.square().sum() + F.silu(y).sum()

    assert not dropped(forward, **SETTINGS[setting])


SUMS = {
    "sum and norm": lambda linear, x, w: LF.add_rms_norm(linear(x), x, (512,), w),
    "rsqrt": lambda linear, x, w: [(h := linear(x)) * h.abs().rsqrt()],
    "norm with a residual": lambda linear, x, w: [
        LF.batch_norm_act(linear(x), None, None, w, w, True, residual=x)
    ],
    "residual": lambda linear, x, w: [F.relu(linear(x) + x, inplace=True)],
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("program", SUMS)
@pytest.mark.filterwarnings("ignore:leannorm")
def test_after_an_error_and_after_a_kept_graph(program, setting):
    linear, w = nn.Linear(512, 512), torch.ones(512, requires_grad=True)
    x = torch.randn(16, 512, requires_grad=True)

    def raises():
        found = SUMS[program](linear, x, w)
        if found:
            raise ZeroDivisionError

    def kept():
        loss = sum(y.square().sum() for y in SUMS[program](linear, x, w))
        return loss

    saved = lean(**SETTINGS[setting])
    with pytest.raises(ZeroDivisionError), saved:
        raises()
    assert not [r() for r in saved._ledger.references if r() is not None]
    for context in (saved, copy.copy(saved)):
        with context:
            loss = kept()
        loss.backward(retain_graph=True)
        references = list(context._ledger.references)
        assert any(r() is not None for r in references)
        del loss
        assert not [r() for r in references if r() is not None]


def test_memory_stays_flat_where_passes_are_dropped_within_one_context():
    """Evaluation of many batches within one `lean()`: nothing waits for its end."""
    leannorm.keep_freed_memory()
    linear, w = nn.Linear(512, 512), torch.ones(512, requires_grad=True)
    alive = []
    with lean("conv") as saved:
        for _ in range(6):
            y, r = LF.add_rms_norm(linear(torch.randn(64, 512)), torch.randn(64, 512), (512,), w)
            del y, r
            alive.append(sum(reference() is not None for reference in saved._ledger.references))
    assert len(set(alive[1:])) == 1


def _and_what_they_are_made_of(values):
    found, left = {}, list(values)
    while left:
        value = left.pop()
        if id(value) not in found:
            found[id(value)] = value
            left += value.step.inputs if value.step is not None else ()
    return found.values()


@pytest.mark.filterwarnings("ignore:.* is out of reach")
@pytest.mark.parametrize("setting", [{}, {"recompute": "conv"}, {"budget": 0.1}], ids=str)
@pytest.mark.parametrize(("make", "shape"), NETWORKS.values(), ids=NETWORKS)
def test_what_was_rebuilt_is_freed_after_its_last_reader(make, shape, setting):
    """A step that was looked at and not taken is no reader: it never comes, and its inputs would be kept."""
    model, x = make(), torch.randn(shape, requires_grad=True)
    for _ in range(3):
        with lean(**setting) as saved:
            loss = model(x).float().square().mean()
        values = list(saved._ledger.values())
        loss.backward(retain_graph=True)
        kept = [v for v in _and_what_they_are_made_of(values) if v._rebuilt is not None and not v.from_narrow]
        assert not kept
