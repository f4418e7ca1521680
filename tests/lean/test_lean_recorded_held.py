"""`held=` and `verify=True` where the log of operators (csrc/nodes/record/) rebuilds."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lean_cases import of_one_that_overwrites
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef

from leannorm import lean
from leannorm.autograd.nodes import NODES
from leannorm.saving import recorded_pass
from leannorm.saving.evidence import RebuildError

pytestmark = pytest.mark.skipif(NODES is None, reason="the log is C++")


@pytest.fixture(autouse=True)
def recording():
    recorded_pass.LOG.forget_trials()


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.GroupNorm(4, 16)),
        *(nn.ReLU(True), nn.Dropout(0.3), nn.Flatten(2), nn.Linear(100, 64), nn.LayerNorm(64), nn.GELU()),
        nn.Linear(64, 32),
    )


def trained(context, make=network, steps=3):
    """Gradients and buffers of a few steps, and the last context."""
    model, found = make(), []
    for step in range(steps):
        model.zero_grad()
        torch.manual_seed(step)
        x = torch.randn(4, 3, 14, 14, requires_grad=True)
        with (opened := context()):
            loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    return [*found, *model.buffers()], opened


def equal(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


class Hooks:
    """Hold copies, note what they got, and count how often each was asked for."""

    def __init__(self):
        self.got, self.asked = [], []

    def pack(self, tensor):
        self.got.append((tensor.shape, tensor.nbytes))
        return len(self.got) - 1, tensor.clone()

    def unpack(self, packed):
        self.asked.append(packed[0])
        return packed[1]


HELD = {
    "copies": lambda: (torch.clone, lambda t: t),
    "the same memory": save_on_cpu,
    "alias": lambda: (torch.detach, lambda t: t),
    "contiguous copies": lambda: (lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t),
    "arrays": lambda: (lambda t: (t.numpy().copy(), t.dtype), lambda p: torch.from_numpy(p[0])),
}


@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("held", HELD)
def test_gradients_are_those_of_plain_torch(held, setting):
    ours, saved = trained(lambda: lean(setting, held=HELD[held]()))
    assert equal(ours, trained(nullcontext)[0])
    assert saved.rebuilt_bytes > 0


def test_hooks_get_what_is_kept_and_nothing_of_parameters():
    hooks = Hooks()
    saved = trained(lambda: lean("conv", held=(hooks.pack, hooks.unpack)), steps=1)[1]
    plain = trained(lambda: lean("conv"), steps=1)[1]
    # hooks get each tensor as it is; without them the mask of dropout is kept as bits
    assert saved.kept_bytes > plain.kept_bytes
    assert saved.kept_bytes + saved.rebuilt_bytes == plain.kept_bytes + plain.rebuilt_bytes
    large = [r.bytes for r in saved.records if not r.rebuilt and r.shape.numel() >= 1024 and r.node]
    assert large
    assert sum(nbytes for _, nbytes in hooks.got) >= sum(large)
    weights = {p.shape for p in network().parameters()}
    assert not weights & {shape for shape, _ in hooks.got}


def test_each_kept_tensor_is_brought_back_once_in_a_backward_pass():
    hooks = Hooks()
    trained(lambda: lean("conv", held=(hooks.pack, hooks.unpack)), steps=3)  # kinds of calls are tried
    hooks.got.clear()
    hooks.asked.clear()
    model = network()
    for step in range(2):
        torch.manual_seed(step)
        with lean("conv", held=(hooks.pack, hooks.unpack)):
            loss = model(torch.randn(4, 3, 14, 14)).square().mean()
        hooks.asked.clear()  # by calls of which a kind is still tried
        loss.backward()
        assert sorted(hooks.asked) == sorted(set(hooks.asked))
        assert len(hooks.asked) == len(hooks.got) > 0
        hooks.got.clear()
        hooks.asked.clear()


def test_the_memory_goes_when_the_hooks_have_it():
    x, w = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    with lean(held=(lambda t: t.to(torch.float64), lambda t: t.to(torch.float32))):
        y = x @ w
        memory = StorageWeakRef(y.untyped_storage())
        loss = y.sin().sum()
        del y
        assert memory.expired()
    expected = torch.autograd.grad((x @ w).sin().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_an_edit_reaches_what_is_made_of_memory_that_hooks_leave_where_it_is():
    """The log sees the write before it happens: others are made of what was there."""
    for held in HELD:
        found = []
        for context in (nullcontext, lambda held=held: lean(held=HELD[held]())):
            torch.manual_seed(0)
            weight, bias = torch.rand(8, requires_grad=True), torch.rand(8, requires_grad=True)
            x = torch.randn(4, 8, 16, 16)
            with context():
                y = F.silu(F.batch_norm(x, None, None, weight, bias, True))
                x.data.mul_(1.5)
                loss = y.square().sum()
            found.append(torch.autograd.grad(loss, bias)[0])
        assert torch.equal(*found), held


def test_a_hook_that_fails_leaves_the_tensor_where_it_is():
    def full(tensor):
        raise OSError("no space left on device")

    with pytest.warns(UserWarning, match="no space left"):
        ours, saved = trained(lambda: lean("conv", held=(full, torch.clone)), steps=1)
    assert equal(ours, trained(nullcontext, steps=1)[0])
    assert any("no space left" in reason for reason in saved.reasons)


def test_hooks_that_bring_another_shape_or_dtype_are_told():
    x = torch.randn(64, 64, requires_grad=True)
    with lean("norm", held=(lambda t: t.half(), lambda t: t)):
        loss = (x * 2).exp().tanh().sum()
        loss = (x @ x).sin().sum() + loss
    with pytest.raises(
        RuntimeError, match=r"second hook returns the tensor.*got shape \[64, 64\] and dtype Half"
    ):
        loss.backward()


def test_an_edit_in_place_raises_as_in_plain_torch():
    x = torch.randn(64, 64, requires_grad=True)
    with lean(held=(torch.clone, torch.clone)):
        y = x @ x
        z = y.square()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        z.sum().backward()


def test_a_users_backward_may_write_what_hooks_bring():
    moved = lean(held=(torch.clone, lambda t: t))
    assert torch.equal(*map(of_one_that_overwrites, (nullcontext(), moved)))


def test_noise_that_is_filled_after_it_was_saved():
    found = []
    x = torch.randn(4096, requires_grad=True)
    for context in (nullcontext, lambda: lean(held=(torch.clone, torch.clone))):
        torch.manual_seed(0)
        with context():
            y = F.rrelu(x * 1, training=True).sum()
        found.append(torch.autograd.grad(y, x)[0])
    assert torch.equal(*found)


def test_a_pass_within_has_hooks_of_its_own():
    outer, inner = Hooks(), Hooks()
    x = torch.randn(64, 64, requires_grad=True)
    with lean("norm", held=(outer.pack, outer.unpack)):
        y = (x @ x).sin()
        before = len(outer.got)
        with lean("norm", held=(inner.pack, inner.unpack)):
            y = (y @ x).cos()
        assert len(outer.got) == before
        assert inner.got
        y = (y @ x).sin()
    assert len(outer.got) > before
    expected = torch.autograd.grad((((x @ x).sin() @ x).cos() @ x).sin().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


# ---------------------------------------------------------------- verify


@pytest.mark.parametrize(
    "setting",
    [{}, {"recompute": "norm"}, {"recompute": "conv"}, {"held": (torch.clone, torch.clone)}],
    ids=["plain", "norm", "conv", "held"],
)
def test_verify_finds_nothing_in_a_sound_network(setting):
    ours, saved = trained(lambda: lean(verify=True, **setting))
    assert equal(ours, trained(nullcontext)[0])
    assert saved.rebuilt_bytes > 0


class Noisy(nn.Module):
    """Writes a few values where no operator is called, through NumPy."""

    noise = 0.0

    def forward(self, x):
        if self.noise:
            x.detach().numpy()[0, 0, 1, 3] += self.noise
        return F.relu(x)


def test_verify_names_operator_shape_layer_and_values():
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), Noisy(), nn.Conv2d(8, 8, 3))
    x = torch.randn(4, 8, 16, 16)
    for _ in range(3):
        with lean("norm"):
            model(x).sum()
    model[2].noise = 3.0
    with lean("norm", verify=True):
        loss = model(x).sum()
    with pytest.raises(
        RebuildError,
        match=r"aten::relu of shape \[4, 8, 14, 14\], saved in Conv2d.*"
        r"at \[0, 0, 1, 3\] it is .* where the forward pass had",
    ):
        loss.backward()


def test_verify_names_the_kernel_that_is_not_the_same_twice():
    calls = []

    @torch.library.custom_op("leannorm_test::drifts", mutates_args=())
    def drifts(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * (1.0 if len(calls) <= 8 else 2.0)

    drifts.register_autograd(lambda ctx, g: g)
    x = torch.randn(96, 96, requires_grad=True)
    for _ in range(3):
        with lean("norm"):
            drifts(x * 1).exp().sin().sum()
    calls.extend([1] * 8)
    with lean(verify=True):
        calls.clear()
        loss = drifts(x * 1).sin().sum()
        calls.extend([1] * 8)
    with pytest.raises(RebuildError, match="leannorm_test::drifts of shape"):
        loss.backward()


@pytest.mark.parametrize("verify", [False, True])
def test_verify_keeps_everything(verify):
    x = torch.randn(128, 128, requires_grad=True)
    with lean(verify=verify) as saved:
        y = (x * 2).exp()
        memory = StorageWeakRef(y.untyped_storage())
        loss = y.cos().sum()
        del y
    assert saved.rebuilt_bytes > 0
    assert memory.expired() is not verify
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.autograd.grad((x * 2).exp().cos().sum(), x)[0])


@pytest.mark.parametrize(
    "settings",
    [{}, {"recompute": "norm"}, {"held": (torch.clone, torch.clone)}, {"verify": True}],
    ids=["plain", "norm", "held", "verify"],
)
def test_no_pass_is_left(settings):
    """Each has a log of its own, which nothing that the pass hands to C++ may keep alive."""

    def passes():
        return sum(type(one) is recorded_pass.RecordedPass for one in gc.get_objects())

    gc.collect()
    before, x = passes(), torch.randn(64, 64, requires_grad=True)
    for _ in range(3):
        with lean(**settings) as saved:
            loss = (x * 2).exp().sin().sum()
            assert passes() > before
        loss.backward()
    del saved, loss
    gc.collect()
    assert passes() == before


def test_what_an_operator_within_a_transform_fills_is_handed_over_filled():
    """`rrelu` saves its noise before it draws it, and a transform's tensors do not say what is written."""
    x = torch.linspace(-2, 2, 1536).reshape(32, 48).requires_grad_()
    found = []
    for context in (nullcontext(), lean(held=(torch.clone, lambda t: t))):
        torch.manual_seed(0)
        junk = [torch.full((1536,), torch.nan) for _ in range(256)]
        del junk  # memory that is not filled shows
        with context:
            y = torch.func.jvp(lambda a: torch.rrelu(a, training=True), (x,), (x,))[1]
            loss = y.mean()
        found.append(torch.autograd.grad(loss, x)[0])
    assert torch.equal(*found)
