"""`lean()` behind in-place activations on views, and by bytes what it holds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lean_cases import assert_as_stock, forget_trials
from torch import nn

from leannorm import lean


@pytest.fixture(autouse=True)
def nothing_tried():
    forget_trials()


NORMS = {
    "instance": nn.InstanceNorm3d,
    "instance, affine": lambda c: nn.InstanceNorm3d(c, affine=True),
    "batch": nn.BatchNorm3d,
    "group": lambda c: nn.GroupNorm(2, c),
}
IN_PLACE = {
    "leaky relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "hardswish": nn.Hardswish,
    "celu": lambda inplace: nn.CELU(0.5, inplace),
}


@pytest.mark.parametrize("activation", IN_PLACE)
@pytest.mark.parametrize("norm", NORMS)
def test_an_activation_in_place_behind_a_norm_of_volumes(norm, activation):
    """nnU-Net's block. Instance norm puts out a view, into which the activation writes."""

    def program(context):
        blocks = [(nn.Conv3d(8, 8, 3), NORMS[norm](8), IN_PLACE[activation](inplace=True)) for _ in range(3)]
        model = nn.Sequential(*(layer for block in blocks for layer in block), nn.Conv3d(8, 2, 1))
        seen = []
        for _ in range(3):
            model.zero_grad()
            with context() as saved:
                loss = model(torch.randn(2, 8, 14, 14, 14)).square().mean()
            loss.backward()
            seen += [p.grad.clone() for p in model.parameters()]
        if saved is not None:
            assert saved.kept_bytes < 0.7 * (saved.kept_bytes + saved.rebuilt_bytes)
        return seen

    assert_as_stock(program, recompute="norm")


def test_what_is_done_in_place_to_a_part_of_a_norms_output_is_held():
    def program(context):
        conv, norm, seen = nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8), []
        for slope in (0.1, 0.1, 0.3):
            x = torch.randn(4, 8, 16, 16, requires_grad=True)
            with context():
                y = norm(x * 1.0)
                F.silu(y[:, :4], inplace=True)
                F.hardtanh(y, -slope, slope, inplace=True)
                loss = conv(y).square().sum()
            loss.backward()
            seen.append(x.grad)
        return seen

    assert_as_stock(program, recompute="norm")


def test_what_is_held_has_a_reason_by_its_bytes():
    block = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    x = torch.randn(4, 8, 32, 32)
    with lean("norm") as saved:
        loss = block(x).square().sum()
    (why,) = (r for r in saved.reasons if "aten::relu" in r)
    assert "made of outputs of aten::convolution, and kept: this setting does not" in why
    loss.backward()
    with lean("norm") as saved:
        loss = block(F.rrelu(x.requires_grad_(), training=True)).square().sum()
    rrelu = "aten::rrelu_with_noise, and kept: lean() does not call it again"
    assert any(rrelu in r for r in saved.reasons)
    loss.backward()
    assert {r.why for r in saved.records if r.rebuilt} <= {""}


def hidden(edit):
    def edited(z):
        with torch.no_grad():
            edit(z)

    return edited


EDITS = {
    "none": lambda z: None,
    "one": hidden(lambda z: z[0].mul_(2)),
    "one that is undone": hidden(lambda z: z.neg_()),
}


@pytest.mark.filterwarnings("ignore:leannorm. budget")
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("in_place", [True, False])
def test_a_sum_in_place_that_a_norm_reads(in_place, edit):
    """SegResNet's `x += identity`. What read it before is not what a norm reads."""

    def program(context):
        first, second, x = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), torch.randn(4, 8, 16, 16)
        seen = []
        for _ in range(3):
            with context() as saved:
                a, b = F.silu(first(x)), F.silu(second(x))
                z = (a * 1).add_(b) if in_place else a + b
                EDITS[edit](z)
                u = z + a
                if edit == "one that is undone":
                    EDITS[edit](z)
                loss = (F.group_norm(z, 2) * F.group_norm(u, 2)).square().sum()
            if saved is not None and in_place and edit == "none":
                assert next(record for record in saved.records if record.node == "aten::add_").rebuilt
            for parameter in (first.weight, second.weight):
                parameter.grad = None
            loss.backward()
            seen += [first.weight.grad, second.weight.grad]
        return seen

    assert_as_stock(program, budget=0.05)


def test_small_views_of_a_large_tensor_are_rebuilt_with_it():
    """A state space model's scan in plain torch: each step reads a view of what all steps share."""

    def program(context):
        layer, found = nn.Linear(64, 64), []
        for _ in range(3):
            x, state = torch.randn(64, 32, 64), torch.zeros(32, 64)
            layer.zero_grad()
            with context() as saved:
                decay, added = F.silu(layer(x)).exp(), F.silu(layer(-x))
                for i in range(64):
                    state = decay[i] * state + added[i]
                loss = state.square().sum()
            loss.backward()
            found += [p.grad.clone() for p in layer.parameters()]
            if saved is not None:
                assert not [r for r in saved.records if r.node == "aten::exp" and not r.rebuilt]
        return found

    assert_as_stock(program, recompute="norm")


def test_a_transpose_in_place_changes_no_contents():
    def program(context):
        found = []
        for _ in range(3):
            x = torch.randn(64, 48, requires_grad=True)
            with context() as saved:
                y = x.exp()
                loss = (F.silu(y.sin().transpose_(0, 1)) * 2).square().sum() + y.square().sum()
            if saved is not None:
                assert saved.rebuilt_bytes > saved.kept_bytes
                assert not saved.reasons
            loss.backward()
            found.append(x.grad)
        return found

    assert_as_stock(program, recompute="norm")
