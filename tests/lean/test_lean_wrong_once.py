"""What `lean()` once had wrong, written out: no fuzzer between the program and what it checks."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import leannorm.functional as LF
from leannorm import lean

BOTH = [contextlib.nullcontext, lambda: lean("norm")]


def image(seed=0):
    return torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradient(run):
    """Of the weight that `run(context, conv, x)` trains, by stock autograd and under lean()."""
    found = []
    for context in BOTH:
        torch.manual_seed(0)
        conv = nn.Conv2d(8, 8, 3)
        run(context, conv, image())
        found.append(conv.weight.grad)
    return found


def test_the_copy_of_a_weight_is_not_written_into():
    w, v = nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64, requires_grad=True)
    before = w.detach().clone()
    with lean("norm"):
        loss = (torch.relu(w.to(w.dtype, copy=True)) @ v).sum()
    loss.backward()
    assert torch.equal(w, before)


NORMS = {
    "batch": lambda x, b: F.batch_norm(x, None, None, None, b, True),
    "batch, evaluation": lambda x, b: F.batch_norm(x, torch.zeros(8), torch.ones(8), None, b),
    "instance": lambda x, b: F.instance_norm(x, None, None, None, b),
    "group": lambda x, b: F.group_norm(x, 2, None, b),
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_bias_without_a_weight(norm):
    def run(context, conv, x):
        for bias in (None, torch.randn(8)):  # the first is rebuilt exactly, and so trusted
            with context():
                loss = conv(NORMS[norm](x * 1.0, bias)).square().sum()
            loss.backward()

    assert torch.equal(*gradient(run))


def test_casts_that_autocast_keeps_over_an_optimizer_step():
    def run(context):
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())))
        optimizer, x = torch.optim.SGD(model.parameters(), 1.0), torch.randn(32, 64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                with context():
                    loss = model(x).float().square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    stock, ours = map(run, BOTH)
    assert all(map(torch.equal, stock, ours))


def test_an_edit_under_no_grad_of_what_an_activation_made():
    def run(context, conv, x):
        for most in (None, 0.1):
            with context():
                y = F.silu(x.clone())
                if most is not None:
                    with torch.no_grad():
                        y.clamp_(max=most)
                loss = conv(y).square().sum()
            loss.backward()

    assert torch.equal(*gradient(run))


def test_a_logged_tensor_that_is_edited():
    def run(context, conv, x):
        with context():
            y = conv(x)
            log = y.square().mean()  # not part of the loss
            loss = conv(F.relu(y, inplace=True)).square().sum()
        loss.backward()
        assert log.isfinite()

    assert torch.equal(*gradient(run))


class ConvNorm(torch.autograd.Function):
    """A user's own, called as one of leannorm's."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x, x, x, x, x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_a_user_function_that_is_called_as_ours():
    def run(context, conv, x):
        with context("conv") if context is lean else context():
            loss = conv(ConvNorm.apply(x)).square().sum()
        loss.backward()

    assert torch.equal(*gradient(run))


def small_part(x, edit):
    """Too small to be rebuilt itself, and saved all the same."""
    y = F.hardtanh(x[:, :, :5, :5] * 1.0, -0.5, 0.7)
    log = y.square()
    edit(y)
    return torch.cat([x[:, :, :5, :5].sin(), y], 1).square().sum() + log.detach().sum()


def part_copied_for_a_concatenation(x, edit):
    y = x + x.sin()
    before = y.clone()
    edit(y)
    return torch.cat([F.silu(x), y], 1).square().sum() + before.square().sum()


def part_of_a_concatenation_that_is_held(x, edit):
    y = x + x.sin()
    before = y.clone()
    edit(y)
    return torch.cat([*x.split(1, 1), y], 1).square().sum() + before.square().sum()


def tensor_that_waits_for_what_made_it(x, edit):
    made = x.sin()
    y = made.clone()
    log = y.square()
    edit(y)
    return made.square().sum() + y.square().sum() + log.sum()


def log_that_is_thrown_away(x, edit):
    y = F.hardtanh(x * 1.0, -0.5, 0.7)
    y.square().mean().item()
    edit(y)
    return F.silu(y).sum()


def view_of_a_log_that_is_thrown_away(x, edit):
    y = F.hardtanh(x * 1.0, -0.5, 0.7)
    y.square().mean().item()
    edit(y)
    return y.permute(0, 2, 3, 1).sin().sum()


def part_that_a_concatenation_copied_after_the_edit(x, edit):
    y = F.hardtanh(x * 1.0, -0.5, 0.7)
    log = y.square()
    edit(y)
    silu = F.silu(y)
    both = torch.cat([x, y], 1).square()
    return log.sum() + silu.sum() + both.sum() + y.sin().sum()


def view_of_what_is_saved_again(x, edit):
    y = F.hardtanh(x * 1.0, -0.5, 0.7)
    view = y.permute(0, 2, 3, 1).square()
    log = y.square()
    edit(y)
    return view.sum() + log.sum() + F.silu(y).sum()


def whole_that_a_view_was_saved_of(x, edit):
    y = x + x.sin()
    before, part = y.clone(), y[:, :4].square()
    edit(y)
    return before.square().sum() + part.sum()


def without_grad(y):
    with torch.no_grad():
        y.mul_(0.5)


def through_data(y):
    y.data.mul_(0.5)


EDITED = [
    (small_part, without_grad),
    (part_copied_for_a_concatenation, without_grad),
    (part_of_a_concatenation_that_is_held, without_grad),
    (tensor_that_waits_for_what_made_it, through_data),
    (log_that_is_thrown_away, through_data),
    (view_of_a_log_that_is_thrown_away, through_data),
    (part_that_a_concatenation_copied_after_the_edit, through_data),
    (view_of_what_is_saved_again, through_data),
    (whole_that_a_view_was_saved_of, through_data),
]


def gradients(context, program, edit):
    """Of three steps, of which the last edits: those before are rebuilt exactly, and so trusted."""
    found = []
    for seed, step in enumerate((lambda y: None, lambda y: None, edit)):
        x = image(seed)
        with context():
            loss = program(x, step)
        loss.backward()
        found.append(x.grad)
    return found


@pytest.mark.parametrize(("program", "edit"), EDITED, ids=lambda part: part.__name__)
def test_an_edit_of_what_stays_in_the_memory_of_a_node(program, edit):
    stock, ours = (gradients(context, program, edit) for context in BOTH)
    assert all(map(torch.equal, stock, ours))


def small_part_saved_again(x, edit):
    y = F.hardtanh(x[:, :, :5, :5] * 1.0, -0.5, 0.7)
    log = y.square()
    edit(y)
    return torch.cat([F.silu(y), y], 1).square().sum() + log.sum()


def input_that_a_norm_has_read(x, edit):
    y = F.batch_norm(x, None, None, None, None, True)
    edit(x)
    return (x * y).sum()


TOLD = [small_part_saved_again, input_that_a_norm_has_read]


@pytest.mark.parametrize("program", TOLD)
def test_the_log_sees_an_edit_through_data(program):
    stock, ours = (gradients(context, program, through_data) for context in BOTH)
    assert all(map(torch.equal, stock, ours))


def made_by_a_view_whose_node_is_made_anew(x, edit):
    y = F.linear(x, torch.eye(16), torch.ones(16))
    y.detach().mul_(2)  # so autograd makes the node of y anew where it is asked
    z = F.silu(y)
    edit(z)
    return F.silu(z).sum()


def test_an_edit_behind_a_view_is_not_taken_for_work_in_place():
    stock, ours = (gradients(c, made_by_a_view_whose_node_is_made_anew, without_grad) for c in BOTH)
    assert all(map(torch.equal, stock, ours))


READERS = {
    "batch norm": (8, lambda x, w: F.batch_norm(x, None, None, w, None, True)),
    "its bias": (8, lambda x, w: F.batch_norm(x, None, None, None, w, True)),
    "group norm": (8, lambda x, w: F.group_norm(x, 2, w)),
    "layer norm": (16, lambda x, w: F.layer_norm(x, (16,), w)),
    "layer norm's bias": (16, lambda x, w: F.layer_norm(x, (16,), None, w)),
    "rms norm": (16, lambda x, w: F.rms_norm(x, (16,), w)),
    "our batch norm": (8, lambda x, w: LF.batch_norm_act(x, None, None, w, None, True)),
    "our rms norm": (16, lambda x, w: LF.rms_norm(x, (16,), w)),
    "prelu": (8, F.prelu),
    "scale": ((8, 1, 1), torch.mul),
}


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("reader", READERS)
def test_a_weight_that_is_edited_before_what_read_it_is_saved(reader, frozen):
    """Through .data, and as soon as its node has run: told by an error, or the gradient is stock's."""
    shape, read = READERS[reader]

    def run(context):
        torch.manual_seed(0)
        weight, found = nn.Parameter(torch.rand(shape), requires_grad=not frozen), []
        for step in range(3):
            x = image()
            with context():
                y = read(x, weight)
                if step:
                    weight.data.mul_(1.5)
                loss = y.sin().sum()
            try:
                loss.backward()
            except RuntimeError as error:
                if not step or "was edited where autograd does not see it" not in str(error):
                    raise
            found.append(x.grad)
        return found

    stock, ours = map(run, BOTH)
    assert all(b is None or torch.equal(a, b) for a, b in zip(stock, ours, strict=True))
