"""`lean()` under a TorchDispatchMode: what a mode gives is made again by the operators that it called."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from leannorm.autograd.nodes import NODES
from leannorm.saving import lean, reasons

SHAPE = (4, 3, 20, 20)
SETTINGS = {
    "plain": {},
    "norm": {"recompute": "norm"},
    "conv": {"recompute": "conv"},
    "budget": {"budget": 0.4},
}
needs_nodes = pytest.mark.skipif(NODES is None, reason="the C++ nodes are not built")


class Logging(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.given(func, func(*args, **(kwargs or {})))

    def given(self, func, out):
        return out


class Louder(Logging):
    """Gives other numbers, by torch's operators."""

    def given(self, func, out):
        return out * 1.5 if func is torch.ops.aten.silu.default else out


class Edited(Logging):
    """Edits what it gives."""

    def given(self, func, out):
        return out.mul_(1.5) if func is torch.ops.aten.silu.default else out


class Outside(Logging):
    """Gives numbers that no operator of torch's made."""

    def given(self, func, out):
        if func is torch.ops.aten.silu.default:
            return torch.from_numpy(out.detach().numpy() * 2)
        return out


def flops():
    return FlopCounterMode(display=False)


MODES = [Logging, Louder, Edited, Outside, flops]


def network():
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3)
    return nn.Sequential(*convolutions, nn.BatchNorm2d(16), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3))


def trained(mode, setting, inside):
    """Gradients of some passes, and the last `lean` object. `inside`: is the mode on in the pass alone?"""
    model, gradients, saved = network(), [], None
    for turn in range(4):
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(turn))
        around = nullcontext() if setting is None else lean(**setting)
        outer, inner = (nullcontext(), mode()) if inside else (mode(), nullcontext())
        with outer:
            with around as saved, inner:
                loss = model(x).square().mean()
            loss.backward()
        gradients.append([p.grad for p in model.parameters()])
        model.zero_grad()
    return gradients, saved


@pytest.mark.parametrize("inside", [False, True], ids=["around", "within"])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_a_mode_leaves_the_gradients(mode, setting, inside):
    stock, _ = trained(mode, None, inside)
    ours, saved = trained(mode, setting, inside)
    for us, them in zip(ours, stock, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(us, them, strict=True))
    assert saved.rebuilt_bytes


@needs_nodes
@pytest.mark.parametrize("inside", [False, True], ids=["around", "within"])
@pytest.mark.parametrize("setting", ["norm", "conv"])
def test_a_mode_that_changes_nothing_costs_no_bytes(setting, inside):
    plain = trained(nullcontext, SETTINGS[setting], inside)[1]
    noted = trained(Logging, SETTINGS[setting], inside)[1]
    assert (noted.kept_bytes, noted.rebuilt_bytes) == (plain.kept_bytes, plain.rebuilt_bytes)
    assert noted.reasons == plain.reasons


@needs_nodes
def test_what_a_mode_made_outside_of_torch_is_kept_and_told():
    _, saved = trained(Outside, SETTINGS["norm"], False)
    assert any(reasons.Why.MODE.sentence in reason for reason in saved.reasons)


@needs_nodes
def test_a_mode_does_not_see_a_rebuild():
    seen = []

    class Noted(Logging):
        def given(self, func, out):
            seen.append(func)
            return out

    def calls(setting):
        seen.clear()
        trained(Noted, setting, False)
        return Counter(f for f in seen if f is not torch.ops.aten.detach.default)  # torch's own, for hooks

    calls({"recompute": "conv"})  # which tries what is not known yet
    assert calls({"recompute": "conv"}) == calls(None)


@needs_nodes
@pytest.mark.parametrize("outside", [False, True], ids=["within", "outside"])
@pytest.mark.parametrize("setting", ["norm", "conv"])
def test_fake_tensors_keep_what_real_ones_do(setting, outside):
    """And parameters that are real stay so. The backward pass runs within the mode, or outside of it."""
    _, real = trained(nullcontext, SETTINGS[setting], False)
    model, mode = network(), FakeTensorMode(allow_non_fake_inputs=True)
    before = [p.detach().clone() for p in model.parameters()]
    with mode:
        with lean(**SETTINGS[setting]) as saved:
            loss = model(torch.empty(SHAPE)).square().mean()
        if not outside:
            loss.backward()
    if outside:
        loss.backward()
    assert isinstance(loss, FakeTensor)
    assert (saved.kept_bytes, saved.rebuilt_bytes) == (real.kept_bytes, real.rebuilt_bytes)
    for p, value in zip(model.parameters(), before, strict=True):
        assert type(p) is nn.Parameter
        assert torch.equal(p, value)


@needs_nodes
def test_fake_tensors_are_rebuilt_by_calls_with_numbers():
    """torch makes tensors of Python numbers, of which the mode makes fake ones only within its own calls."""
    with FakeTensorMode():
        x = torch.empty(64, 64, requires_grad=True)
        with lean("conv") as saved:
            loss = (((x * 2).sin() * 0.5 + 1).exp() / 3).square().sum()
        loss.backward()
    assert isinstance(x.grad, FakeTensor)
    assert saved.rebuilt_bytes > 0
