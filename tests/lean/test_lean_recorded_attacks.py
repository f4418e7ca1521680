"""Programs by which a reader of the log's code (csrc/nodes/record/) tried to break it; each once did."""

from __future__ import annotations

import contextlib
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lean_cases import Overwrites, forget_trials, without_nodes
from torch.utils.checkpoint import checkpoint

from leannorm import lean
from leannorm.autograd.nodes import NODES

pytestmark = pytest.mark.skipif(NODES is None, reason="the log is C++")


@pytest.fixture(autouse=True)
def recording(monkeypatch):
    monkeypatch.setenv("LEANNORM_SMALL_BYTES", "-1")
    forget_trials()


def held_and_overwritten(x):
    a = x[:2, :8].exp() + x[:2, :8].cos()  # too small to be rebuilt
    y = a.sum() + x
    a.data[1] = 50.0
    return y.sin()


def written_in_a_pass_within(x):
    h = x.exp() + x
    with lean("norm"):
        h.data[3] = 50.0
    return h.sin()


def written_through_a_conjugate(x):
    h = torch.view_as_complex((x * 1.5).reshape(32, 64, 2).contiguous())
    y = h.abs()
    h.data.conj()[3:4].fill_(2)
    return y.sin() + h.abs().cos()


def an_edit_that_fails(x):
    h = x * 2
    with contextlib.suppress(RuntimeError):
        h.add_(torch.ones(7))
    return h.sin()


def a_part_of_a_buffer(x):
    b = torch.zeros(64, 64)
    b[:, ::3].copy_(x.detach()[:, ::3])
    return torch.sigmoid(b * x) * x


def first_seen_in_part(x):
    def make(part):
        with torch.enable_grad():
            made.append(part.cos())

    made = []
    thread = threading.Thread(target=make, args=(x[:32],))
    thread.start()
    thread.join()
    made[0][1:].mul_(2)
    return torch.stack([made[0].cos(), made[0].clone().sin()])


def saved_in_part_and_written(x):
    h = x.exp()
    y = h[1:].sin()
    z = (h + 1).cos()
    h.data[2:].mul_(2)
    return z[1:] + y


def edited_in_inference_mode(x):
    h = x * 2
    h.add_(1)
    y = h.exp()
    with torch.inference_mode():
        h.data[3].fill_(5)
    return y.sin() + h.cos()


@pytest.mark.filterwarnings("ignore:leannorm. lean.. saw no tensor")  # of the pass within
@pytest.mark.parametrize(
    "program",
    [
        held_and_overwritten,
        written_in_a_pass_within,
        written_through_a_conjugate,
        an_edit_that_fails,
        a_part_of_a_buffer,
        first_seen_in_part,
        saved_in_part_and_written,
        edited_in_inference_mode,
    ],
)
def test_what_a_reader_of_the_code_thought_of(program):
    for step in range(5):  # the first passes try each kind of call
        torch.manual_seed(step)
        leaf = torch.randn(64, 64, requires_grad=True)
        found = []
        for context in (nullcontext, lambda: lean("norm")):
            with context():
                loss = program(leaf * 1).square().sum()
            found.append(torch.autograd.grad(loss, leaf)[0])
        assert torch.equal(*found)


def test_memory_that_was_freed_is_an_error():
    x = torch.randn(128, 128, requires_grad=True)
    for step in range(4):
        x0 = x * (step + 1)
        w = torch.randn(128, 128, requires_grad=True)
        with lean("norm"):
            loss = (torch.sigmoid(x0) * w).sum()
        if step == 3:
            x0.untyped_storage().resize_(0)
            with pytest.raises(RuntimeError, match="freed or resized"):
                loss.backward()
        else:
            loss.backward()


def test_what_is_rebuilt_is_made_once_for_all_of_its_readers():
    calls = []

    @torch.library.custom_op("leannorm_test::noted", mutates_args=())
    def noted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin()

    noted.register_autograd(
        lambda ctx, g: g * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    for _ in range(4):
        y = torch.randn(64, 64, requires_grad=True)
        with lean("norm"):
            loss = y * 1
            for _ in range(8):
                loss = noted(loss)
            loss = loss.sum()
        calls.clear()
        loss.backward()
    assert 0 < len(calls) <= 8


def test_who_saves_a_view_of_a_weight_reads_the_weight():
    """It is copied for what is made of it; a node that saves a view of it sees an edit through .data."""
    found = []
    for context in (nullcontext, lambda: lean("norm")):
        weight = torch.linspace(-1, 2, 48 * 48).reshape(48, 48).requires_grad_()
        for _ in range(4):
            weight.grad = None
            with context():
                root = torch.sigmoid(weight).sigmoid()
                loss = weight[...].square().mean() + (root * root).mean()
            weight.data.mul_(0.75)
            loss.backward()
        found.append(weight.grad)
    assert torch.equal(*found)


def edited_copy(x):
    a = x * 0.5
    b = a.clone()
    return b.add_(1).sin() * a.exp()


def edited_original(x):
    a = x * 0.5
    b = a.clone()
    return b.sin() * a.add_(1).exp()


def copy_of_a_copy(x):
    a = x * 0.5
    b = a.clone()
    c = b.clone()
    return b.mul_(2).sin() * c.exp() * a.cos()


def copy_in_another_layout(x):
    a = (x * 0.5).t()
    return a.clone(memory_format=torch.contiguous_format).sin() * a.exp()


def copy_of_a_part(x):
    a = x * 0.5
    return a[:32].clone().sin().sum() * a.exp()


def copy_for_one_who_overwrites(x):
    a = x * 0.5
    return Overwrites.apply(a.clone()) * a.exp()


COPIES = {  # and how many copies the backward pass makes
    edited_copy: 0,
    edited_original: 0,
    copy_of_a_copy: 0,
    copy_in_another_layout: 1,
    copy_of_a_part: 1,
    copy_for_one_who_overwrites: 1,  # for the user's code
}


@pytest.mark.parametrize("in_python", [False, True], ids=["C++", "Python"])
@pytest.mark.parametrize("program", COPIES, ids=lambda program: program.__name__)
def test_a_copy_of_a_rebuilt_value_shares_its_memory(program, in_python, monkeypatch):
    if in_python:
        without_nodes(monkeypatch)
        forget_trials()
    x = torch.randn(128, 128)
    for _ in range(4):
        found, made = [], []
        for context in (nullcontext, lambda: lean("norm")):
            leaf = x.clone().requires_grad_()
            with context() as saved:
                loss = program(leaf * 1.5).sum()
            with torch.profiler.profile() as profile:
                loss.backward()
            found.append(leaf.grad)
            made.append(sum(event.name == "aten::clone" for event in profile.events()))
        assert torch.equal(*found)
        assert saved.rebuilt_bytes > x.nbytes
    assert made == [0, COPIES[program]]


def operators_seen(context, forward):
    with torch.profiler.profile() as profile, context:
        forward()
    return [event.name for event in profile.events() if event.name.startswith("aten::")]


def test_a_profiler_sees_the_operators_within_recorded_ones():
    """The log itself does without them."""
    x, weight = torch.randn(4, 8, 16, 16), torch.randn(8, 8, 3, 3, requires_grad=True)

    def forward():
        return F.batch_norm(F.conv2d(x, weight), None, None, training=True).mean()

    for _ in range(3):
        with lean("norm"):
            loss = forward()
        loss.backward()
    plain = operators_seen(nullcontext(), forward)
    assert operators_seen(lean("norm"), forward) == plain
    assert plain.count("aten::empty") > 1


def test_an_operator_that_raises_leaves_the_next_ones_seen():
    x, weight = torch.randn(4, 8, 16, 16), torch.randn(8, 8, 3, 3, requires_grad=True)
    for _ in range(3):
        with lean("norm") as saved:
            with pytest.raises(RuntimeError, match="channels"):
                F.conv2d(x[:, :5], weight)
            loss = F.silu(F.conv2d(x, weight).mul(2)).square().sum()
        loss.backward()
        assert saved.rebuilt_bytes > 0
    assert "aten::exp" in operators_seen(nullcontext(), lambda: x.exp())


@pytest.mark.parametrize("in_python", [False, True], ids=["C++", "Python"])
def test_a_copy_for_user_code_has_the_strides_of_a_part(in_python, monkeypatch):
    """A reentrant checkpoint computes again from it: kernels may compute other bits from another layout."""
    if in_python:
        without_nodes(monkeypatch)
        forget_trials()
    x, seen = torch.randn(5, 64, 48, requires_grad=True), []

    def function(a):
        seen.append(a.stride())
        return F.mish(a)

    for _ in range(3):
        with lean("norm") as saved:
            y = F.silu(x)[:, 1:-1]
            loss = checkpoint(function, y, use_reentrant=True).sum()
        assert saved.rebuilt_bytes > 0
        loss.backward()
    assert set(seen) == {y.stride()}


KERNEL, WEIGHT = torch.randn(8, 8, 3, 3), torch.randn(64, 64, requires_grad=True)


def block(x):
    return F.silu(F.conv2d(F.silu(x * 1.5), KERNEL, padding=1)).square()


def products(x):
    return torch.addmm(WEIGHT[0], F.silu(x.reshape(-1, 64)), WEIGHT).sin()


def products_under_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return products(x * 1.5).float()


def under_a_transform(x):
    return torch.func.vmap(lambda z: block(x) * z)(torch.ones(2))


def under_hooks_that_write(x):
    """They are user code within an operator, and plain PyTorch reads what they wrote."""
    y = x * 1.5
    z = y.sin()

    def pack(t):
        y.data.mul_(3)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        a = F.conv2d(x, KERNEL, padding=1)
    return z + a + F.silu(x * 2)


def copied_by_autograd(x):
    """It works in place, so autograd copies its argument for the gradient."""
    return (x * 1.5).renorm_(2, 0, 1.0).exp()


PROGRAMS = (
    block,
    products,
    products_under_autocast,
    under_a_transform,
    under_hooks_that_write,
    copied_by_autograd,
)


@pytest.mark.filterwarnings("ignore:leannorm. (torch admitted|other saved-tensor hooks)")
@pytest.mark.parametrize(
    "program",
    PROGRAMS,
    ids=lambda program: program.__name__,
)
def test_what_a_call_hides_changes_nothing(program):
    """A profiler shows all operators to the log, too."""
    x = torch.randn(4, 8, 16, 16)
    for _ in range(3):  # so that operators are known to use others
        with lean("norm"):
            leaf = x.clone().requires_grad_()
            loss = sum(known(leaf).sum() for known in (block, products, copied_by_autograd))
        loss.backward()
    found = []
    for context in (nullcontext(), torch.profiler.profile()):
        forget_trials()
        leaf = x.clone().requires_grad_()
        with context, lean("norm") as saved:
            loss = program(leaf).sum()
        loss.backward()
        found.append((saved.kept_bytes, saved.rebuilt_bytes, leaf.grad))
    plain = x.clone().requires_grad_()
    program(plain).sum().backward()
    assert found[0][:2] == found[1][:2]
    assert found[0][1] > 0
    assert all(torch.equal(plain.grad, grad) for *_, grad in found)
