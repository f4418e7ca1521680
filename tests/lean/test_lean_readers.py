"""A function may write into what `lean()` rebuilds for it; what was edited is told, or as in stock."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Thread

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lean_cases import assert_as_stock
from torch import nn

from leannorm import lean


class InPlace(torch.autograd.Function):
    """x² / 2, whose gradient is computed in the memory that was saved: nobody else has it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 0.5 * x * x

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0].mul_(g)


class Unseen(InPlace):
    """The same by a kernel that autograd does not see."""

    @staticmethod
    def backward(ctx, g):
        memory = ctx.saved_tensors[0].detach().numpy()
        memory *= g.numpy()
        return torch.from_numpy(np.array(memory))


MADE = {
    "clone": lambda x: x.clone(),
    "view of a clone": lambda x: x.clone().view(64, -1),
    "contiguous": lambda x: x.t().contiguous().t(),
    "cast": lambda x: x.to(x.dtype, copy=True),
    "silu": F.silu,
    "of several readers": lambda x: (y := x.clone(), y.exp().sum())[0],
}


@pytest.mark.parametrize("recompute", ["norm", "conv"])
@pytest.mark.parametrize("function", [InPlace, Unseen])
@pytest.mark.parametrize("made", MADE)
def test_a_function_may_write_into_what_it_saved(made, function, recompute, with_and_without_nodes):
    def program(context):
        linear, x = nn.Linear(64, 64), torch.randn(64, 64, requires_grad=True)
        found = []
        for _ in range(3):
            before = x.detach().clone()
            with context():
                h = linear(x)
                loss = h.square().sum() + x.exp().sum()  # both are held for other readers
                loss = loss + sum((function.apply(MADE[made](y)) * 3).sum() for y in (x, h))
            x.grad = linear.weight.grad = None
            loss.backward()
            assert torch.equal(x, before)
            found += [x.grad, linear.weight.grad]
        return found

    assert_as_stock(program, recompute=recompute)


class Special(nn.Parameter):
    pass


PARAMETERS = {
    "plain": nn.Parameter,
    "subclass": Special,
    "with gaps": lambda bias: nn.Parameter(torch.stack([bias, bias], 1)[:, 0]),
}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_an_edit_through_data_of_a_small_parameter_changes_nothing(kind):
    """The log has copied it."""
    found, linear, x = [], nn.Linear(64, 256), torch.randn(512, 64)
    linear.bias = PARAMETERS[kind](torch.randn(256))
    for context in (nullcontext, lambda: lean("conv")):
        with context() as saved:
            loss = F.silu(linear(x)).square().mean()
        before = linear.bias.detach().clone()
        linear.bias.data.mul_(1.01)
        found.append(torch.autograd.grad(loss, [linear.weight, linear.bias]))
        linear.bias.data.copy_(before)
    assert saved.rebuilt_bytes > saved.kept_bytes
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("width", [64, 256])
def test_an_edit_of_a_parameter_through_data_before_the_backward_pass(width):
    """Small ones are copied; of others the error comes before any gradient."""
    model, x = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))), torch.randn(32, width)
    found = []
    for context in (nullcontext(), lean("norm")):
        before = [p.detach().clone() for p in model.parameters()]
        with context, torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.silu(model(x)).float().square().mean()
        for p in model.parameters():
            p.data.mul_(2)
        if width > 64 and found:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            assert all(p.grad is None for p in model.parameters())
            return
        loss.backward()
        found.append([p.grad for p in model.parameters()])
        model.zero_grad()
        for p, was in zip(model.parameters(), before, strict=True):
            p.data.copy_(was)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("edit", [None, "operator", "NumPy"])
def test_an_edit_of_a_norms_statistics_is_told(edit, with_and_without_nodes):
    """Or the gradient is that of plain PyTorch, which the edit does not reach."""
    bias = torch.randn(32, requires_grad=True)
    for _ in range(3):
        x, w = (torch.randn(16, 32, 16, 16, requires_grad=True) for _ in range(2))
        with lean("norm") as saved:
            y, _, rstd = torch.native_batch_norm(x, None, bias, None, None, True, 0.1, 1e-5)
            loss = (w * y).sum()
        assert saved.rebuilt_bytes >= y.nbytes - bias.nbytes  # of which the log holds a copy
        kept = y.detach().clone()
        if edit == "operator":
            with torch.no_grad():
                rstd.mul_(1.004)
        elif edit == "NumPy":
            rstd.detach().numpy()[...] *= 1.004
        # C++ sees an operator before it runs, and copies what it is about to edit; Python does not.
        if edit == "NumPy" or (edit == "operator" and not with_and_without_nodes):
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                torch.autograd.grad(loss, w)
        else:
            assert torch.equal(torch.autograd.grad(loss, w)[0], kept)


def test_what_a_freed_node_put_out_may_be_edited(with_and_without_nodes):
    def program(context):
        x, w = (torch.randn(1 << 16, requires_grad=True) for _ in range(2))
        for edits in (0, 0, 0, 1, 1):
            x = torch.randn_like(x).requires_grad_()
            with context():
                y = torch.relu(x)
                y.sum().backward()  # frees what the relu has saved
                with torch.no_grad():
                    y[500:501].add_(1000.0 * edits)
                loss = (w * y).sum()
            yield torch.autograd.grad(loss, w)[0]

    assert_as_stock(program, recompute="norm")


class Strict(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"Strict has no {function}")


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with torch._C.DisableTorchFunctionSubclass():
            return x.as_subclass(torch.Tensor) * 2

    @staticmethod
    def backward(ctx, g):
        ctx.saved_tensors  # noqa: B018  (reads them)
        return 2 * g


@pytest.mark.filterwarnings("ignore:leannorm")
@pytest.mark.parametrize("most", [-1, 1 << 30])
def test_a_subclass_that_refuses_everything_is_held(most, monkeypatch, with_and_without_nodes):
    monkeypatch.setenv("LEANNORM_SMALL_BYTES", str(most))
    x = torch.randn(64, 64)
    for _ in range(3):
        with torch._C.DisableTorchFunctionSubclass():
            strict = x.clone().requires_grad_().as_subclass(Strict)
        for context in (nullcontext(), lean("norm")):
            with context:
                loss = Double.apply(strict).sum()
            loss.backward()


def test_a_forward_pass_whose_thread_has_ended():
    model, x, made = (
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)),
        torch.randn(256, 64),
        [],
    )

    def forward():
        with lean("conv") as saved:
            made.extend([model(x).square().mean(), saved])

    for _ in range(3):
        made.clear()
        thread = Thread(target=forward)
        thread.start(), thread.join()
        loss, saved = made
        ours = torch.autograd.grad(loss, list(model.parameters()))
        stock = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        assert all(map(torch.equal, ours, stock))
        assert any(record.rebuilt for record in saved.records)
