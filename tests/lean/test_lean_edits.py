"""Edits that autograd does not count, of tensors that no node saves: the backward pass tells them."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from lean_cases import assert_as_stock
from torch import nn

from leannorm.saving import lean


def _edited(x, edit):
    if edit:
        with torch.no_grad():
            x.mul_(-1.5)
    return x


def _clamped(x, edit):
    if edit:
        with torch.no_grad():
            x.clamp_(-0.1, 0.1)
    return x


PROGRAMS = {
    "multiple": lambda h, edit: (_edited(h, edit) * 2.0).sin(),
    "sum": lambda h, edit: ((_edited(h, edit) + 1) * 3).sin(),
    "cast": lambda h, edit: _edited(h, edit).bfloat16().sin(),
    "activation": lambda h, edit: F.relu(_clamped(h, edit)).exp(),
    "concatenation": lambda h, edit: torch.cat([_edited(h, edit), h.detach() * 0.5], 1).sin(),
}


@pytest.mark.parametrize(
    "setting", [{}, {"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.1}], ids=str
)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.filterwarnings("ignore:leannorm. budget=", "ignore:leannorm. more is kept than the plan")
def test_an_edit_without_gradients_is_stocks_or_told(program, setting):
    conv, norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
    weights = [*conv.parameters(), *norm.parameters()]

    def gradients(x, edit, **around):
        loss = lambda: PROGRAMS[program](norm(conv(x)), edit).float().square().mean()  # noqa: E731
        if not around:
            return torch.autograd.grad(loss(), weights)
        around.pop("on")
        with lean(**around):
            made = loss()
        return torch.autograd.grad(made, weights)

    for seed in range(4):  # kinds are settled, so that nothing is tried any more
        x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        ours, stock = gradients(x, False, on=True, **setting), gradients(x, False)
        assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))
    told, ours = "", ()
    try:
        ours = gradients(x, True, on=True, **setting)
    except RuntimeError as error:
        told = str(error)
    equal = [torch.equal(a, b) for a, b in zip(ours, gradients(x, True), strict=False)]
    assert "edited where autograd does not see it" in told or (equal and all(equal))


MOVED_STATISTICS = """
import sys
import torch
import torch.nn.functional as F
from leannorm import lean

dtype = getattr(torch, sys.argv[1])
leaf = torch.randn(3, 8, 9, 9)
weight = torch.rand(8) + 0.5


def gradient(around):
    x, mean, var = leaf.clone().requires_grad_(), torch.zeros(8), torch.ones(8)
    with around:
        y = F.batch_norm(x.to(dtype) * 1, mean, var, weight, None, False)
        F.instance_norm(x.detach(), mean, var, use_input_stats=True)
        loss = y.transpose(1, -1).float().sin().sum()
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return None
    return x.grad


stock = gradient(torch.enable_grad())
for setting in ({}, {"recompute": "conv"}, {"budget": 0.1}):
    for _ in range(3):
        ours = gradient(lean(**setting))
        assert (ours is stock is None) or torch.equal(ours, stock)
print("the same")
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.sampled(of=2)
def test_statistics_that_moved_after_an_evaluation_are_not_absent(dtype):
    """An eval-mode norm was rebuilt without them, which ended the process in torch's kernel."""
    command = [sys.executable, "-c", MOVED_STATISTICS, dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr


@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_a_norms_weight_of_two_dims_edited_through_data(norm, setting):
    """Between the norm and the tensor's save: stock knows what the norm gave, and so does the rebuild."""
    torch.manual_seed(0)
    w, m = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(8, 8))

    def gradients(around, x, edits):
        with around:
            y = norm(x.sin(), (4, 8), w)
            if edits:
                w.data.add_(1)
            loss = F.gelu(y @ m).pow(2).mean() + (y * y).mean()
        return torch.autograd.grad(loss, [m, x])

    for i in range(8):
        x, before = torch.randn(6, 4, 8, requires_grad=True), w.detach().clone()
        stock = gradients(torch.enable_grad(), x, i > 5)
        w.data.copy_(before)
        found = gradients(lean(setting), x, i > 5)
        w.data.copy_(before)
        assert all(map(torch.equal, stock, found))


@pytest.mark.parametrize("recompute", ["norm", "conv"])
@pytest.mark.parametrize("part", [slice(None), slice(0, 1)], ids=["all", "one"])
def test_an_edit_that_stands_in_for_a_sum_in_place(recompute, part, with_and_without_nodes):
    """Its version is that of a sum in place, and what was saved is not what the sum has made."""

    def program(context):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16))
        after = nn.Conv2d(16, 4, 1)
        for _ in range(3):
            x, shortcut = torch.randn(4, 3, 20, 20), torch.randn(4, 16, 18, 18)
            with context():
                z = net(x) + shortcut
                with torch.no_grad():
                    z[part].mul_(-1)
                loss = after(z.relu_()).square().mean()
            loss.backward()
        return [p.grad.clone() for p in (*net.parameters(), *after.parameters())]

    assert_as_stock(program, recompute=recompute)
