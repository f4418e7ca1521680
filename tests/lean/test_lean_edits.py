"""Edits that autograd does not count, of tensors that no node saves: the backward pass tells them."""

import subprocess
import sys
from contextlib import nullcontext
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from lean_cases import assert_as_stock
from torch import nn

from leannorm.autograd.nodes import NODES
from leannorm.saving import evidence, lean
from leannorm.saving.evidence import RebuildError, near, sample_of
from leannorm.saving.provenance import Edits


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
    except RebuildError as error:
        told = str(error)
    equal = [torch.equal(a, b) for a, b in zip(ours, gradients(x, True), strict=False)]
    assert "edited where autograd does not see it" in told or (equal and all(equal))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_rounding_is_no_edit(dtype):
    x = torch.randn(64, 64).to(dtype)
    sample = sample_of(x)
    for rounded in (x * (1 + 2**-8), x if dtype.is_complex else torch.nextafter(x, x + 1)):
        told = nullcontext() if rounded is x else pytest.warns(UserWarning, match="differs .* as by rounding")
        with told:
            assert near(sample, rounded)
    assert not near(sample, x * 1.1)
    assert not near(sample, torch.zeros_like(x))
    assert not near(sample, x[:32])
    assert near(None, x)


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_sample_looks_beside_a_value_that_repeats(monkeypatch, dtype, value):
    """After a division by zero all channels but one may be NaN, which twice NaN is too."""
    for turn in range(2):
        x = torch.full((4, 8, 12, 36), value, dtype=dtype)
        x[:, 1] = torch.randn(4, 12, 36)
        sample = sample_of(x)
        assert sample == x.numel().to_bytes(8, sys.byteorder) + evidence._content(x)
        assert sample == sample_of(x)
        x[:, 1] *= 2
        assert sample != sample_of(x)
        if not turn:
            monkeypatch.setattr(evidence, "NODES", None)


def test_other_integers_are_another_tensor():
    x = torch.arange(4096)
    assert near(sample_of(x), x.clone())
    assert not near(sample_of(x), x + 1)


MOVED_STATISTICS = """
import sys
import torch
import torch.nn.functional as F
from leannorm import lean
from leannorm.saving import small

small.SMALL = -1
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


NODES_ALONE = pytest.mark.skipif(NODES is None, reason="the C++ nodes see which operators work in place")


@NODES_ALONE
@pytest.mark.usefixtures("searched")
def test_operators_tell_whether_they_work_in_place(monkeypatch):
    monkeypatch.setattr(Edits, "wanted", True)
    p, buffer = torch.randn(8, requires_grad=True), torch.zeros(8)
    before = p.sin() + p
    with lean("norm"):
        new = p.sin() + p
        same = p.sin()
        same += p
        buffer.mul_(2)  # makes no node: the next one has the number that this call saw
        behind = p.cos() + p
        buffer.mul_(2)
        same_again = p.cos().add_(p)
        told = [NODES.worked_in_place(y.grad_fn) for y in (before, new, same, behind, same_again)]
        with lean("norm"):
            inner = p.cos().add_(p)
        told.append(NODES.worked_in_place(inner.grad_fn))
        elsewhere = []
        thread = Thread(target=lambda: elsewhere.append(p.cos().add_(p)))
        thread.start()
        thread.join()
        told.append(NODES.worked_in_place(elsewhere[0].grad_fn))
    assert told == [None, False, True, False, True, True, None]
    assert NODES.worked_in_place(same.grad_fn) is None


@NODES_ALONE
@pytest.mark.usefixtures("searched")
@pytest.mark.filterwarnings("ignore:leannorm. budget=")
def test_a_pass_watches_once_it_had_to_ask(monkeypatch):
    monkeypatch.setattr(Edits, "wanted", False)
    net, p, told = (
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)),
        torch.ones(8, requires_grad=True),
        [],
    )

    def step(edit):
        x, shortcut = torch.randn(2, 3, 20, 20), torch.randn(2, 16, 18, 18, requires_grad=True)
        for _ in range(2):
            with lean(budget=0.2):
                y = net(x)
                y = y.add_(shortcut) if edit else y + shortcut
                loss = y.relu_().square().mean()
                told.append(NODES.worked_in_place(p.sin().add_(p).grad_fn))
            loss.backward()

    step(edit=False)
    step(edit=True)
    assert told == [None, None, True, True]


@NODES_ALONE
@pytest.mark.usefixtures("searched")
def test_nothing_watches_behind_an_error(monkeypatch):
    monkeypatch.setattr(Edits, "wanted", True)
    p = torch.randn(8, requires_grad=True)
    made = []

    def fails():
        with lean("norm"):
            made.append(p.sin().add_(p))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert NODES.worked_in_place(made[0].grad_fn) is None


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


@NODES_ALONE
@pytest.mark.usefixtures("searched")
def test_where_operators_are_not_shown_nothing_is_known(monkeypatch):
    monkeypatch.setattr(Edits, "wanted", True)
    p = torch.randn(8, requires_grad=True)
    with lean("norm"):
        torch.ones(1).add_(1)
        try:
            torch._C._autograd._enable_record_function(False)
            told = NODES.worked_in_place((p.sin() + p).grad_fn)
        finally:
            torch._C._autograd._enable_record_function(True)
    assert told is None


@NODES_ALONE
def test_what_is_remembered_of_a_pass_that_never_ends_is_bounded():
    p = torch.zeros(1, requires_grad=True)
    NODES.watch_edits()
    try:
        first = p.sin().add_(p)
        assert NODES.worked_in_place(first.grad_fn) is True
        for _ in range(2**16):
            last = p.mul(2).add_(p)
        assert NODES.worked_in_place(first.grad_fn) is None
        assert NODES.worked_in_place(last.grad_fn) is True
    finally:
        NODES.stop_watching()
