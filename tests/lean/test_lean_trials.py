"""Trials: a call is trusted only if its own bits were compared. Small edits of weights are seen."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lean_cases import forget_trials
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from leannorm import lean
from leannorm.report.memory import measure_step

LIBRARY = torch.library.Library("leannorm_trials", "DEF")
LIBRARY.define("drifting(Tensor x) -> Tensor")
LIBRARY.define("raising(Tensor x) -> Tensor")
LIBRARY.define("writing(Tensor x) -> Tensor")


class Called(torch.autograd.Function):
    """Calls an operator of the program, of which no operator of torch makes the result."""

    operator = None
    calls = 0

    @classmethod
    def forward(cls, ctx, x):
        return cls.operator(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Drifting(Called):
    """Returns other bits each time, as a kernel may that is not deterministic."""

    operator = torch.ops.leannorm_trials.drifting


class Raising(Called):
    """Raises an error whenever it is called again in a pass."""

    operator = torch.ops.leannorm_trials.raising
    may = True


class Writing(Called):
    """Writes into what it reads, which its schema does not say."""

    operator = torch.ops.leannorm_trials.writing


def _writing(x):
    array = x.detach().numpy()
    made = torch.from_numpy(array * np.float32(2))
    array += 1
    return made


def _drifting(x):
    Drifting.calls += 1
    return torch.from_numpy(x.detach().numpy() * np.float32(1 + Drifting.calls * 2.0**-22))


def _raising(x):
    Raising.calls += 1
    if not Raising.may:
        raise RuntimeError("only once")
    Raising.may = False
    return torch.from_numpy(x.detach().numpy() * np.float32(2))


LIBRARY.impl("drifting", _drifting, "CPU")
LIBRARY.impl("raising", _raising, "CPU")
LIBRARY.impl("writing", _writing, "CPU")
HIDING = {
    "a narrower dtype": lambda y, w: y.bfloat16() * w.bfloat16(),
    "a mask": lambda y, w: torch.where(y > 10, w, w * 2),
    "integers": lambda y, w: w[y.argmax(1)],
    "few of many": lambda y, w: y.amax(0) * w[0],
}


@pytest.fixture(autouse=True)
def nothing_is_trusted(monkeypatch, with_and_without_nodes):
    monkeypatch.setenv("LEANNORM_SMALL_BYTES", "-1")
    forget_trials()


@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("hide", HIDING.values(), ids=HIDING)
def test_what_hides_bits_is_no_evidence_for_the_call_before_it(hide, setting):
    for seed in range(4):
        torch.manual_seed(seed)
        x, w = torch.randn(128, 128, requires_grad=True), torch.randn(128, 128, requires_grad=True)
        with lean(setting):
            y = Drifting.apply(x * 1.5)
            loss = hide(y, w).float().sum() + y.sin().sum()
        before = Drifting.calls
        loss.backward()
        assert Drifting.calls == before  # what it has made is kept


def test_a_call_that_gives_the_same_bits_is_trusted_behind_a_cast():
    """Otherwise each pass would try it once more."""
    ran = []
    for seed in range(5):
        torch.manual_seed(seed)
        x, w = torch.randn(128, 128, requires_grad=True), torch.randn(128, 128, requires_grad=True)
        with profile(activities=[ProfilerActivity.CPU]) as seen, lean("norm") as saved:
            y = F.layer_norm(x, (128,))
            loss = HIDING["a narrower dtype"](y, w).float().sum()
        ran.append(sum(event.name == "aten::native_layer_norm" for event in seen.events()))
        assert saved.rebuilt_bytes > 0
        loss.backward()
    assert ran[0] == ran[1] > ran[2] == ran[3] == ran[4]


def test_an_operator_that_raises_when_it_is_called_again_is_tried_once():
    calls = []
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(128, 128, requires_grad=True)
        Raising.may, Raising.calls = True, 0
        with lean("norm"):
            loss = Raising.apply(x * 1.5).sin().sum()
        calls.append(Raising.calls)
        loss.backward()
        assert Raising.calls == calls[-1]  # what it has made is kept
    assert calls == [2, 1, 1]


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_small_edit_of_a_weight_is_an_error_and_no_wrong_gradient(share):
    """An optimizer that writes through .data changes few numbers of a weight in bfloat16."""
    layer, x = nn.Linear(64, 64, bias=False), torch.randn(32, 64, requires_grad=True)
    edited = torch.randperm(layer.weight.numel())[: int(share * layer.weight.numel())]
    with lean("conv") as saved:
        loss = F.silu(layer(x)).square().mean()
    assert saved.rebuilt_bytes > 0
    layer.weight.data.view(-1)[edited] += 0.25
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_norm_that_has_other_bits_is_kept_though_its_cast_has_the_same():
    """Found by a random program: a batch norm of a transposed weight, of which autocast saves a cast."""
    for seed in range(3):
        torch.manual_seed(seed)
        w, v = torch.randn(64, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True)

        def loss(w=w, v=v):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = F.batch_norm(w.mT, None, None, training=True)
                z = F.linear(y, v)  # saves the cast
            return checkpoint(torch.tanh, y, use_reentrant=False).sum(), z

        (plain,) = torch.autograd.grad(loss()[0], [w])
        with lean("norm"):
            made, z = loss()
        assert torch.equal(torch.autograd.grad(made, [w])[0], plain)
        del z


MADE = {
    "dropped": lambda x: (x.sin(), 0),
    "kept": lambda x: (x @ x.detach().T, 0),
    "kept, saved before": lambda x: (y := x @ x.detach().T, y.sin().sum()),
}


@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_trial_writes_into_nothing_that_the_program_has(made, setting):
    found = []
    for context in (nullcontext, lambda: lean(setting)):
        torch.manual_seed(0)
        seen = []
        for x in torch.randn(3, 128, 128):
            x.requires_grad_()
            with context():
                y, more = made(x)
                loss = Writing.apply(y).cos().sum() + y.detach().sum() + more
            seen += [y.detach().clone(), loss.detach()]
            if not torch.is_tensor(more):  # else plain PyTorch's gradient reads what was written unseen
                seen += torch.autograd.grad(loss, x)
        found.append(seen)
    assert all(map(torch.equal, *found))


def test_a_trial_takes_what_the_pass_still_has():
    """A loss has three float32 tensors of its logits in its first passes, not four; later ones have two."""
    target, peaks = torch.arange(512), []
    for seed in range(3):
        torch.manual_seed(seed)
        w = torch.randn(512, 4096, dtype=torch.bfloat16, requires_grad=True)

        def forward(w=w):
            with lean("norm"):
                logits = w * 2
                return F.cross_entropy(logits.float(), target)

        peaks.append(measure_step(forward, backward=torch.is_tensor).peak)
    whole = 4 * w.numel()
    assert max(peaks[:2]) <= peaks[2] + 1.05 * whole <= 3.6 * whole
