"""`held="host"` in programs that edit, branch, run several passes at once, or step within one.

Links of tests/lean/links.py stand in for a device's copies, and find what a device would not forgive.
"""

import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lean_cases import of_one_that_overwrites
from links import deep, equal

from leannorm import lean


@pytest.mark.parametrize("how", ["data", "no_grad"])
def test_an_edit_while_a_value_is_copied(link, how):
    """What was copied is what was saved, whole; as with torch's own hooks, an edit through .data does not
    reach it. Autograd sees the other."""
    x = torch.randn(64, 64, requires_grad=True)
    with lean("norm", held="host"):
        y = x @ x
        z = y.square()
        was = y.detach().clone()
        if how == "data":
            y.data.mul_(2)
        else:
            with torch.no_grad():
                y.mul_(2)
    if how == "no_grad":
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            z.sum().backward()
        return
    gradient = torch.autograd.grad(z.sum(), y)[0]
    assert torch.equal(gradient, 2 * was)


@pytest.mark.parametrize("layers", [1, 3])
def test_an_edit_after_the_pass_of_what_has_not_left(link, layers):
    """Its own memory is read, as in plain PyTorch."""
    found = []
    for context in (nullcontext(), lean("norm", held="host")):
        x = torch.linspace(-1, 1, 4096).reshape(64, 64).requires_grad_()
        with context:
            y = x
            for _ in range(layers):
                y = (y @ x).sin()
            last = y @ x
            loss = last.square().sum()
        last.data.mul_(2)
        found.append(torch.autograd.grad(loss, x, retain_graph=True)[0])
        found.append(torch.autograd.grad(loss, x)[0])
        del y, loss
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_an_edit_of_what_others_are_rebuilt_from(link):
    """The log sees the write before it happens."""
    found = []
    for context in (nullcontext, lambda: lean(held="host")):
        torch.manual_seed(0)
        weight, bias = torch.rand(8, requires_grad=True), torch.rand(8, requires_grad=True)
        x = torch.randn(4, 8, 16, 16)
        with context():
            y = F.silu(F.batch_norm(x, None, None, weight, bias, True))
            x.data.mul_(1.5)
            loss = y.square().sum()
        found.append(torch.autograd.grad(loss, bias)[0])
    assert torch.equal(*found)


def test_views_of_one_memory_are_moved_once(late):
    x = torch.randn(64, 64, requires_grad=True)
    found = []
    for context in (nullcontext(), lean("norm", held="host")):
        with context:
            y = x @ x
            loss = sum(one.square().sum() for one in (y, y.t(), y[3:], y.view(-1), y[:, ::2], y.unsqueeze(0)))
        found.append(torch.autograd.grad(loss, x)[0])
    assert torch.equal(*found)
    assert late.out == y.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    "layout", [lambda t: t, lambda t: t.t(), lambda t: t[:, 1:], lambda t: t.flip(0)[::2], lambda t: t[:0]]
)
def test_layouts_and_dtypes(late, dtype, layout):
    x = torch.randn(64, 64).to(dtype).requires_grad_()
    found = []
    for context in (nullcontext(), lean("norm", held="host")):
        with context:
            y = layout(x @ x)
            loss = (y * y * y).abs().sum()
        found.append(torch.autograd.grad(loss, x)[0])
    assert torch.equal(*found)


def test_branches_are_read_in_another_order_than_before(link):
    """What was expected next is on its way, and goes back."""
    torch.manual_seed(0)
    parts = [deep(3) for _ in range(4)]

    def gradients(order, context):
        x = torch.linspace(-1, 1, 4096).reshape(64, 64)
        with context:
            values = [x.clone().requires_grad_() for _ in parts]
            losses = [part(value).square().sum() for part, value in zip(parts, values, strict=True)]
        return [torch.autograd.grad(losses[i], values[i])[0] for i in order]

    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (0, 2, 1, 3), (2, 3, 0, 1)):
        assert equal(gradients(order, lean("norm", held="host")), gradients(order, nullcontext()))


def test_two_passes_at_once(link):
    model = deep()
    xs = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]
    stock = [torch.autograd.grad(model(x).square().sum(), x)[0] for x in xs]
    losses = []
    for x in xs:
        with lean("norm", held="host"):
            losses.append(model(x).square().sum())
    found = [torch.autograd.grad(losses[i], xs[i])[0] for i in (1, 0, 2)]
    assert equal([found[1], found[0], found[2]], stock)
    with lean("norm", held="host"):
        inner = model[:6](xs[0])
        with lean("conv", held="host"):
            inner = model[6:12](inner)
        loss = model[12:](inner).square().sum()
    assert torch.equal(torch.autograd.grad(loss, xs[0])[0], stock[0])
    losses.clear()


def test_two_threads(link):
    def run(model, seed, found):
        x = torch.full((64, 64), seed / 7, requires_grad=True)
        for _ in range(3):
            with lean("norm", held="host"):
                loss = model(x).square().sum()
            found[seed] = torch.autograd.grad(loss, x)[0]

    threads, found = [], {}
    for seed in range(3):
        threads.append(threading.Thread(target=run, args=(deep(), seed, found)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    for seed, gradient in found.items():
        x = torch.full((64, 64), seed / 7, requires_grad=True)
        assert torch.equal(gradient, torch.autograd.grad(deep()(x).square().sum(), x)[0])


def test_buffers_are_used_again_and_do_not_pile_up(late):
    most = 0
    for step in range(12):
        with lean("norm", held="host") as saved:
            loss = deep()(torch.randn(16 + 16 * (step % 4), 64)).square().mean()
        loss.backward()
        most = max(most, saved.moved_bytes)
    del loss
    assert late.buffers.all <= 2 * most
    allocated = len(late.buffers.places)
    for _ in range(3):
        with lean("norm", held="host"):
            loss = deep()(torch.randn(64, 64)).square().mean()
        loss.backward()
    assert len(late.buffers.places) <= allocated


def test_steps_within_one_pass(link):
    found = []
    for context in (nullcontext(), lean("norm", held="host")):
        model = deep()
        with context:
            for step in range(3):
                torch.manual_seed(step)
                model(torch.randn(64, 64)).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert equal(*found)


def test_a_users_backward_may_write_what_comes_back(link):
    assert torch.equal(*map(of_one_that_overwrites, (nullcontext(), lean(held="host"))))
