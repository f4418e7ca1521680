"""What `lean()` trusts is told by the pass itself: programs that broke another clock, or a shorter key."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from lean_cases import assert_as_stock, forget_trials
from torch import nn

from leannorm import lean, make_lean
from leannorm._errors import InputError
from leannorm.saving import reasons


@pytest.fixture(autouse=True)
def nothing_tried():
    forget_trials()


def in_a_thread(work):
    errors = []

    def run():
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors, errors


# ---------------------------------------------------------------- whose clock


def nodes_of_this_thread(count):
    y = torch.zeros(1, requires_grad=True)
    for _ in range(count):
        y = y + 1


@pytest.mark.parametrize("nodes", [0, 500], ids=["idle", "busy"])
def test_a_cast_that_another_thread_made_before_an_optimizer_step(nodes, with_and_without_nodes):
    def program(context):
        w = nn.Parameter(torch.randn(64, 64))
        x, kept, found = torch.randn(64, 64).to(torch.bfloat16).requires_grad_(), [], []

        def cast():
            nodes_of_this_thread(nodes)
            kept.append(w.to(torch.bfloat16))

        def passes():
            nodes_of_this_thread(100)
            for made_here in (True, True, False):  # casts of this pass are rebuilt exactly, and so trusted
                with context():
                    narrow = w.to(torch.bfloat16) if made_here else kept[0]
                    loss = (x @ narrow).float().square().sum()
                x.grad = None
                loss.backward()
            found.append(x.grad)

        in_a_thread(cast)
        with torch.no_grad():
            w.mul_(3)
        in_a_thread(passes)
        return found

    assert_as_stock(program, recompute="norm")


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_flags_change_between_two_nodes(with_and_without_nodes):
    def program(context):
        conv, x, seen = nn.Conv2d(8, 32, 3), torch.randn(4, 8, 16, 16, requires_grad=True), []
        for enabled in (True, True, False, True):
            with context():
                with torch.backends.mkldnn.flags(enabled=enabled):
                    y = conv(x * 1.0)
                loss = F.relu(y).square().sum()
            x.grad = None
            loss.backward()
            seen.append(x.grad)
        return seen

    assert_as_stock(program, recompute="conv")


# ---------------------------------------------------------------- a key that says all


def test_a_mean_in_another_dtype():
    """Its node keeps the dims alone; the dtype of what it puts out is in the metadata."""

    def program(context):
        linear, w, seen = nn.Linear(64, 64).to(torch.bfloat16), nn.Parameter(torch.randn(64, 32)), []
        for dtype in (None, None, torch.float64):
            x = torch.randn(2000, 8, 64, dtype=torch.bfloat16)
            with context():
                h = linear(x)
                log = h.sin().sum()
                y = h.mean(1, keepdim=True, dtype=dtype).float()
                loss = (y @ w).square().sum() + log
            w.grad = None
            loss.backward()
            seen.append(w.grad)
        return seen

    assert_as_stock(program, recompute="norm")


@pytest.mark.parametrize("first", [0.0, 1e-42])
def test_a_first_batch_that_is_constant(first):
    """In this layout torch normalizes with other bits than a rebuild by scale and shift would have."""

    def program(context):
        linear, norm, last = nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.Linear(128, 64)
        seen = []
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
        for x in (torch.full((16, 128, 64), first), torch.randn(16, 128, 64), torch.randn(16, 128, 64)):
            linear.zero_grad()
            with context():
                y = norm(linear(x).transpose(1, 2))
                loss = last(F.silu(y)).square().sum()
            loss.backward()
            seen.append(linear.weight.grad.clone())
        return seen

    assert_as_stock(program, recompute="norm")


@pytest.mark.filterwarnings("ignore:leannorm. (budget|more is kept than the plan)")
@pytest.mark.parametrize("dtype", [None, torch.float64], ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["contiguous first", "preserved first"])
def test_copies_of_other_memory_formats_in_the_middle_of_a_rebuild(dtype, first):
    """The node of a copy keeps no memory format, and a sum takes the elements as they lie in memory."""

    def program(context):
        conv, seen = nn.Conv2d(8, 16, 1).to(memory_format=torch.channels_last), []
        for contiguous in (first, first, not first):
            x, factor = torch.randn(4, 8, 32, 33), torch.randn(4, 16, 32, 33)
            with context():
                y = conv(x.to(memory_format=torch.channels_last))
                form = torch.contiguous_format if contiguous else torch.preserve_format
                copied = y.to(dtype, memory_format=form) if dtype else y.clone(memory_format=form)
                mean = copied.mean((1, 2, 3), keepdim=True).float()
                loss = (mean * factor * 100).sin().square().sum() + y.sin().sum()
            conv.weight.grad = None
            loss.backward()
            seen.append(conv.weight.grad)
        return seen

    for setting in ({}, {"budget": 0.05}):
        assert_as_stock(program, **setting)


def test_zeros_of_two_signs_are_two_constants():
    def program(context):
        seen = []
        for number in (0.0, 0.0, -0.0):
            x = torch.randn(64, 64, requires_grad=True)
            with context():
                y = torch.atan2(x * number, x.detach() * 0 - 1)
                loss = (y * x.detach()).sum()
            loss.backward()
            seen += [x.grad, y]
        return seen

    assert_as_stock(program, recompute="norm")


# ---------------------------------------------------------------- edits


@pytest.mark.filterwarnings("ignore:leannorm. (budget|more is kept than the plan)")
def test_the_copy_that_an_edit_in_place_keeps():
    """Of a tensor that a log has saved, and that the edit is about to change."""

    def program(context):
        conv, other, x = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3), torch.randn(4, 8, 16, 16)
        with context():
            y = conv(x)
            energy = y.pow(2).mean()  # of no loss
            loss = other(nn.SiLU(inplace=True)(y)).square().sum()
        loss.backward()
        return conv.weight.grad, other.weight.grad, energy

    for setting in ({}, {"recompute": "conv"}, {"budget": 0.05}):
        assert_as_stock(program, **setting)


@pytest.mark.filterwarnings("ignore:leannorm. (budget|more is kept than the plan)")
@pytest.mark.parametrize("budget", [0.05, 0.5])
def test_a_sum_that_might_have_been_in_place(budget):
    """The version tells of one edit; whether it is the sum's own, the node does not tell."""

    def program(context):
        first, conv, seen = nn.Conv2d(8, 16, 3), nn.Conv2d(8, 8, 3), []
        for hidden in (False, False, True):
            with context():
                y = first(torch.randn(4, 8, 16, 16))
                log = y.sin().sum()
                a, q = (t * 1.0 for t in y.chunk(2, 1))
                z = a + q if hidden else a.add_(q)
                if hidden:
                    with torch.no_grad():
                        z.mul_(-1)
                z.relu_()
                loss = conv(z).square().sum() + log
            for p in (conv.weight, first.weight):
                p.grad = None
            loss.backward()
            seen += [conv.weight.grad, first.weight.grad]
        return seen

    assert_as_stock(program, budget=budget)


@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
@pytest.mark.parametrize("as_weight", [True, False])
def test_a_call_that_moves_its_own_weight_or_bias(norm, as_weight):
    def program(context):
        conv, w, seen = nn.Conv2d(8, 8, 3), torch.rand(8), []
        for shared in (False, False, True):
            x, mean, var = torch.randn(4, 8, 16, 16, requires_grad=True), torch.zeros(8), torch.rand(8) + 0.5
            other = var if shared else var.clone()
            affine = (other, w) if as_weight else (w, other)
            with context():
                loss = conv(norm(x * 1.0, mean, var, *affine, True)).square().sum()
            conv.weight.grad = None
            loss.backward()
            seen += [x.grad, conv.weight.grad]
        return seen

    assert_as_stock(program, recompute="norm")


def test_indices_that_the_user_edits_raise_as_in_stock():
    for context in (contextlib.nullcontext(), lean("norm")):
        x = torch.randn(64, 64, requires_grad=True)
        with context:
            values, indices = (x * 1.0).sort()
            loss = values.square().sum()
        indices.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ---------------------------------------------------------------- where torch admits no hooks

PARTS = {
    "grad": lambda f, w: torch.func.grad(f)(w),
    "vjp": lambda f, w: torch.func.vjp(f, w)[1](torch.tensor(1.0))[0],
    "jacrev": lambda f, w: torch.func.jacrev(f)(w),
    "hessian": lambda f, w: torch.func.hessian(f)(w).sum(0),
    "vmap of grad": lambda f, w: torch.func.vmap(torch.func.grad(f))(torch.stack([w, w * 2])).sum(0),
    "grad within grad": lambda f, w: torch.func.grad(lambda a: torch.func.grad(f)(a).sum())(w),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("nested", [False, True])
def test_a_transform_within_a_pass(part, nested):
    def program(context):
        conv, x, w = nn.Conv2d(8, 8, 3), torch.randn(4, 8, 16, 16), torch.randn(16, requires_grad=True)
        inner = context() if nested else contextlib.nullcontext()
        with context() as saved, inner:
            before = F.silu(conv(x))
            z = PARTS[part](lambda a: (a.sin() * w).square().sum(), w)
            loss = conv(F.silu(before)).square().sum() * z.square().sum()
        if saved is not None:
            assert reasons.TRANSFORMED_WITHIN in saved.reasons
            assert nested or saved.rebuilt_bytes > 0
        loss.backward()
        return conv.weight.grad, w.grad

    with pytest.warns(UserWarning, match="admitted no saved-tensor hooks"):
        assert_as_stock(program, recompute="norm")
    assert torch._C._autograd._saved_tensors_hooks_disable.__module__ != "leannorm.saving.aside"


@pytest.mark.filterwarnings("ignore:leannorm. lean.. saw no tensor")
def test_hooks_of_others_above_or_below_raise_as_in_stock():
    w = torch.randn(16, requires_grad=True)
    disabled = torch.autograd.graph.disable_saved_tensors_hooks
    for around, within in (
        (lean("norm"), torch.autograd.graph.save_on_cpu()),
        (torch.autograd.graph.save_on_cpu(), contextlib.nullcontext()),
    ):
        with around, within, pytest.raises(RuntimeError, match="told"), disabled("told"):
            pass

    def raises_within(saved):
        with saved:
            with contextlib.suppress(ZeroDivisionError), disabled("told"):
                raise ZeroDivisionError
            y = F.silu(w.repeat(256) * 1.0)
            return (y * y.exp()).sum()

    saved = lean("norm")
    with pytest.warns(UserWarning, match="admitted no"):
        loss = raises_within(saved)
    assert saved.rebuilt_bytes > 0  # hooks are back after an error
    loss.backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


# ---------------------------------------------------------------- copies of a lean model


def test_the_forward_of_a_shallow_copy_is_not_taken_for_the_models():
    model, x = make_lean(nn.Sequential(nn.Linear(8, 8)), "norm"), torch.randn(4, 8)
    for _ in range(2):
        assert torch.equal(model.forward(x), model(x))
    twin = copy.copy(model)
    twin._modules = {"0": nn.Linear(8, 8)}
    assert torch.equal(twin(x), twin[0](x))
    assert torch.equal(model(x), model[0](x))
    for one in (twin, model):
        with pytest.raises(InputError, match="2 modules share this lean forward"):
            one.forward(x)
    make_lean(twin, "norm")
    assert torch.equal(twin.forward(x), twin[0](x))
    assert torch.equal(model.forward(x), model[0](x))
    deep = copy.deepcopy(model)
    assert torch.equal(deep.forward(x), model(x))
