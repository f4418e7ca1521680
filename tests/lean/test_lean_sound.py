"""`lean()` off the usual path: each of these programs once got other gradients than stock, or raised."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leannorm.saving import lean, reasons

BOTH = [pytest.param({"recompute": r}, id=r) for r in ("norm", "conv")]
IMAGE = torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(1))


def assert_as_stock(program, **settings):
    """`program(context)` returns all that it can see; twice, as caches are warm at the second time."""
    for _ in range(2):
        seen = []
        for context in (contextlib.nullcontext, lambda: lean(**settings)):
            torch.manual_seed(0)
            seen.append([t.detach().clone() for t in program(context)])
        stock, ours = seen
        assert len(stock) == len(ours)
        assert all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))


def image():
    return IMAGE.clone().requires_grad_()


def convolutions():
    return nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)


# ---------------------------------------------------------------- ownership


def test_a_copy_of_the_same_dtype_is_not_written_into():
    def leaf(context):
        w, v = nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64, requires_grad=True)
        with context():
            loss = (torch.relu(w.to(w.dtype, copy=True)) @ v).sum()
        loss.backward()
        return w, w.grad, v.grad

    def intermediate(context):
        w, v = nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64, requires_grad=True)
        with context():
            h = w.sin().square()
            loss = (torch.relu(h.to(h.dtype, copy=True)) @ v).sum() + h.square().sum()
        loss.backward()
        return w, w.grad, v.grad

    assert_as_stock(leaf, recompute="norm")
    assert_as_stock(intermediate, recompute="norm")


# ---------------------------------------------------------------- identity


NORMS_WITHOUT_WEIGHT = {
    "batch norm": (lambda: nn.BatchNorm2d(8), lambda x, b: F.batch_norm(x, None, None, None, b, True)),
    "batch norm, evaluation": (
        lambda: nn.BatchNorm2d(8).eval(),
        lambda x, b: F.batch_norm(x, torch.zeros(8), torch.ones(8), None, b, False),
    ),
    "batch norm, past torch's function": (
        lambda: nn.BatchNorm2d(8),
        lambda x, b: torch.batch_norm(x, None, b, None, None, True, 0.1, 1e-5, False),
    ),
    "group norm": (lambda: nn.GroupNorm(2, 8), lambda x, b: F.group_norm(x, 2, None, b)),
    "group norm, past torch's function": (
        lambda: nn.GroupNorm(2, 8),
        lambda x, b: torch.group_norm(x, 2, None, b),
    ),
    "instance norm": (
        lambda: nn.InstanceNorm2d(8, affine=True),
        lambda x, b: F.instance_norm(x, bias=b),
    ),
}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("name", NORMS_WITHOUT_WEIGHT)
def test_a_norm_with_a_bias_and_no_weight(name, trained):
    trained = trained and "group" not in name  # stock's backward pass fails on that
    usual, without_weight = NORMS_WITHOUT_WEIGHT[name]

    def program(context):
        conv, _ = convolutions()
        x, b = image(), torch.randn(8, requires_grad=trained)
        with context():
            conv(usual()(x * 1.0)).sum()  # of the same kind and layout, with a weight
        with context():
            loss = conv(without_weight(x * 1.0, b)).square().sum()
        loss.backward()
        return conv.weight.grad, x.grad, *([b.grad] if trained else [])

    assert_as_stock(program, recompute="norm")


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_global_flags_of_the_forward_pass_are_set_in_a_rebuild(with_and_without_nodes):
    def program(context):
        wide, back = nn.Conv2d(8, 32, 3), nn.Conv2d(32, 8, 3)
        x, seen = image(), []
        for forward, backward in ((True, True), (False, False), (True, False), (False, True)):
            with context() as saved:
                with torch.backends.mkldnn.flags(enabled=forward):
                    y = wide(x * 1.0)
                loss = back(F.relu(y)).square().sum()
            if saved:
                assert not saved.reasons
                assert saved.rebuilt_bytes > 0
            with torch.backends.mkldnn.flags(enabled=backward):
                loss.backward()
                assert torch.backends.mkldnn.enabled == backward
            seen += [wide.weight.grad.clone(), x.grad.clone()]
        return seen

    assert_as_stock(program, recompute="conv")


# ---------------------------------------------------------------- evidence


@pytest.mark.parametrize("setting", BOTH)
def test_casts_that_autocast_keeps_over_an_optimizer_step(setting):
    def program(context):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        optimizer, seen = torch.optim.SGD(model.parameters(), 1.0), []
        with torch.autocast("cpu", dtype=torch.bfloat16):  # around the loop: the casts of step 1 stay
            for _ in range(3):
                with context():
                    loss = model(torch.randn(32, 64)).float().square().mean()
                optimizer.zero_grad()
                loss.backward()
                seen += [p.grad.clone() for p in model.parameters()]
                optimizer.step()
        return seen

    assert_as_stock(program, **setting)


@pytest.mark.parametrize("edit", [lambda w: w.mul_(3), lambda w: w.data.mul_(3)], ids=["no_grad", "data"])
def test_a_leaf_edited_between_its_cast_and_the_use_of_it(edit):
    def program(context):
        seen = []
        w, v = nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64, requires_grad=True)
        for i in range(4):
            with context():
                h = w.to(torch.bfloat16)
                if i == 3:
                    with torch.no_grad():
                        edit(w)
                loss = (h @ v.to(torch.bfloat16)).sum()
            loss.backward()
            seen += [w.grad.clone(), v.grad.clone()]
        return seen

    assert_as_stock(program, recompute="norm")


def test_an_edit_that_the_version_tells():
    def of_an_output(context):
        conv, _ = convolutions()
        x = image()
        with context():
            y = F.silu(x.clone())
            with torch.no_grad():
                y.clamp_(max=0.1)
            loss = conv(y).square().sum()
        loss.backward()
        return conv.weight.grad, x.grad

    def between_two_readers(context):
        conv, other = convolutions()
        x = image()
        with context():
            y = F.relu(x * 1.0)
            a = conv(y)
            y.data.mul_(2)
            loss = (a + other(y)).square().sum()
        loss.backward()
        return conv.weight.grad, other.weight.grad, x.grad

    def of_what_a_view_shows(context):
        conv, other = convolutions()
        x = image()
        with context():
            y = F.silu(conv(x))
            part = y[:, :4]
            with torch.no_grad():
                part.add_(1)
            loss = other(y).square().sum()
        loss.backward()
        return conv.weight.grad, other.weight.grad, x.grad

    def before_a_relu_in_place(context):
        conv, other = convolutions()
        x, norm = image(), nn.BatchNorm2d(8)
        with context():
            y = norm(conv(x))
            with torch.no_grad():
                y.add_(0.5)
            loss = other(F.relu_(y)).square().sum()
        loss.backward()
        return conv.weight.grad, other.weight.grad, x.grad

    for program in (of_an_output, between_two_readers, of_what_a_view_shows, before_a_relu_in_place):
        assert_as_stock(program, recompute="norm")


def test_an_edit_before_and_one_after_a_read_that_keeps_nothing():
    """The mul reads y before it is edited, and keeps nothing; the square keeps y as edited."""

    def program(context):
        conv, other = convolutions()
        x = image()
        with context():
            y = F.silu(conv(x))
            w = y * 2
            with torch.no_grad():
                y.mul_(3)
            log = y.square().mean()
            loss = other(F.relu(w)).square().sum() + log
        loss.backward()
        return conv.weight.grad, other.weight.grad, x.grad

    assert_as_stock(program, recompute="norm")


def test_edits_that_stock_refuses_are_refused():
    conv, other = convolutions()
    for context in (contextlib.nullcontext(), lean("norm")):
        with context:
            y = F.silu(conv(image()))
            loss = other(y).square().sum()
        with torch.no_grad():
            y.add_(1)  # stock holds it, lean() rebuilds it
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("affine", ["weight and bias", "weight", "neither"])
def test_a_batch_norm_has_the_same_bits(affine, with_and_without_nodes):
    def program(context):
        (conv, other), x = convolutions(), image()
        norm = nn.BatchNorm2d(8, affine=affine != "neither")
        if affine == "weight":
            norm.bias = None
        for parameter in norm.parameters():
            nn.init.uniform_(parameter, 0.5, 2)
        with context() as saved:
            loss = other(F.silu(norm(conv(x)))).square().sum()
        if saved is not None:
            assert any(r.rebuilt and r.node == "aten::native_batch_norm" for r in saved.records)
        loss.backward()
        return conv.weight.grad, x.grad, *(p.grad for p in norm.parameters())

    assert_as_stock(program, recompute="norm")


def test_buffers_that_move_without_a_version_between_a_norm_and_its_reader():
    def program(context):
        conv, _ = convolutions()
        x, norm = image(), nn.BatchNorm2d(8)
        with context():
            y = norm.eval()(x.sin())
            norm.train()(x.cos() + 1)  # moves the running statistics; autograd counts no edit
            loss = conv(y).square().sum()
        loss.backward()
        return conv.weight.grad, x.grad

    assert_as_stock(program, recompute="norm")


@pytest.mark.filterwarnings("ignore:leannorm. tensors of a subclass")
def test_jagged_tensors_are_held():
    def program(context):
        rows = [torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in (20, 30)]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        w = torch.randn(64, requires_grad=True)
        with context() as saved:
            loss = (F.silu(x) * w).values().square().sum()
        assert saved is None or saved.reasons[0] == reasons.SUBCLASSES
        loss.backward()
        return w.grad, x.grad.values()

    assert_as_stock(program, recompute="norm")
