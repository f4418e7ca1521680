"""`lean(held=…)`: what must be held goes through other hooks, and gradients stay stock's bit for bit."""

from contextlib import nullcontext

import lean_cases
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode

from leannorm import lean, make_lean
from leannorm._errors import InputError


class Counting:
    """Hooks that hold NumPy copies, count what comes and goes, and hand out a tensor that nobody may edit."""

    def __init__(self):
        self.bytes = self.packed = self.unpacked = 0

    def pack(self, tensor):
        self.packed += 1
        self.bytes += tensor.nbytes
        kept = tensor.view(torch.uint8).numpy().copy() if tensor.is_contiguous() else None
        return tensor.dtype, tensor.shape, kept, tensor.clone() if kept is None else None

    def unpack(self, packed):
        self.unpacked += 1
        dtype, shape, array, tensor = packed
        return tensor if array is None else torch.from_numpy(array).view(dtype).reshape(shape)


def step(model, x, context=None):
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    if context is None:
        loss = model(x).float().square().mean()
    else:
        with context:
            loss = model(x).float().square().mean()
    loss.backward()
    return [x.grad, *(p.grad for p in model.parameters())]


NETWORKS = {
    **{name: (make, lean_cases.IMAGE) for name, make in lean_cases.IMAGES.items()},
    **{name: (make, lean_cases.TOKENS) for name, make in lean_cases.SEQUENCES.items()},
}


@pytest.mark.sampled(of=2)
@pytest.mark.filterwarnings("ignore:leannorm. more is kept than the plan says")
@pytest.mark.parametrize(
    "setting", [{}, {"recompute": "norm"}, {"recompute": "conv"}, {"overhead": 0.5}], ids=str
)
@pytest.mark.parametrize(("make", "shape"), NETWORKS.values(), ids=NETWORKS)
def test_gradients_are_those_of_stock(make, shape, setting):
    model, x = make(), torch.randn(shape)
    stock = step(model, x)
    for _ in range(2):
        ours = step(model, x, lean(**setting, held=save_on_cpu()))
        for a, b in zip(ours, stock, strict=True):
            assert torch.equal(a, b)


def test_only_what_is_not_rebuilt_goes_through_the_hooks():
    model, x = lean_cases.IMAGES["dense block"](), torch.randn(lean_cases.IMAGE)
    hooks = Counting()
    step(model, x)
    saved = lean("norm", held=(hooks.pack, hooks.unpack))
    step(model, x, saved)
    plain = lean("norm")
    step(model, x, plain)
    assert hooks.packed
    assert hooks.bytes <= saved.kept_bytes
    assert saved.kept_bytes < 1.05 * plain.kept_bytes
    assert saved.rebuilt_bytes > 0.9 * plain.rebuilt_bytes


def test_what_several_steps_read_is_unpacked_once_for_all():
    hooks = Counting()
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 64))
    with lean(held=(hooks.pack, hooks.unpack)):
        loss = model(torch.randn(64, 64)).square().mean()
    while_forward = hooks.unpacked  # steps are tried once
    loss.backward()
    assert hooks.unpacked - while_forward == hooks.packed


def test_what_a_hook_hands_out_is_never_overwritten():
    """An in-place ReLU is rebuilt in the memory of its input, if that is the rebuild's own."""
    tensors = []

    def pack(tensor):
        tensors.append((tensor.clone(), tensor.clone()))
        return tensors[-1][0]

    model = lean_cases.IMAGES["dense block"]()
    step(model, torch.randn(lean_cases.IMAGE), lean("conv", held=(pack, lambda tensor: tensor)))
    assert tensors
    assert all(torch.equal(now, then) for now, then in tensors)


def test_an_edit_in_place_raises_as_in_stock():
    x = torch.randn(64, 64, requires_grad=True)
    with lean(held=save_on_cpu()):
        y = x.exp()
        z = y.square()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        z.sum().backward()


BY = {
    "alias": (lambda tensor: tensor.detach(), lambda tensor: tensor),
    "to the host, where it is": save_on_cpu(),
    "copy": (lambda tensor: tensor.clone(), lambda tensor: tensor),
    "in fewer bytes": (lambda tensor: tensor.bfloat16(), lambda tensor: tensor.float()),
}


@pytest.mark.parametrize("hooks", BY)
def test_an_edit_through_data_of_what_hooks_have(hooks):
    """The log sees it before it happens; what hooks bring back in fewer bytes is theirs."""

    def gradient(context):
        torch.manual_seed(0)
        weight, bias = torch.rand(8, requires_grad=True), torch.rand(8, requires_grad=True)
        x = torch.randn(4, 8, 16, 16)
        x.add_(x)  # of a tensor that was not written yet hooks get nothing
        with context:
            y = F.silu(F.batch_norm(x, None, None, weight, bias, True))
            x.data.mul_(1.5)
            loss = y.square().sum()
        loss.backward()
        return bias.grad

    found, stock = gradient(lean(held=BY[hooks])), gradient(nullcontext())
    torch.testing.assert_close(found, stock, rtol=0.02 if hooks == "in fewer bytes" else 0, atol=0)


@pytest.mark.filterwarnings("ignore:leannorm. .* is kept, since")
def test_a_sparse_tensor_stays_where_it_is():
    def gradient(context):
        x = torch.eye(64).to_sparse().requires_grad_()
        with context:
            loss = (x * 2.0 * x).coalesce().values().square().sum()
        return torch.autograd.grad(loss, x)[0].to_dense()

    hooks = Counting()
    assert torch.equal(gradient(lean(held=(hooks.pack, hooks.unpack))), gradient(nullcontext()))


def test_a_lean_model_takes_hooks_too():
    hooks = Counting()
    model = make_lean(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), held=(hooks.pack, hooks.unpack))
    model(torch.randn(64, 64)).sum().backward()
    assert hooks.packed == hooks.unpacked > 0


@pytest.mark.parametrize("wrong", ["cpu", (1, 2), torch.clone], ids=["text", "numbers", "function"])
def test_what_is_no_pair_of_hooks_is_refused(wrong):
    with pytest.raises(InputError, match="save_on_cpu"):
        lean(held=wrong)
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match="save_on_cpu"):
        make_lean(model, held=wrong)
    assert "forward" not in vars(model)


class KeepsAll(TorchDispatchMode):
    """Holds what every operation is called with, as a debugger or a logger may."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(args)
        return function(*args, **(kwargs or {}))


def test_noise_that_is_filled_after_it_was_saved_stays_where_it_is():
    """rrelu's: a copy from before would be anything. Somebody else may hold it too."""
    x = torch.randn(4096, requires_grad=True)
    for mode in (nullcontext(), KeepsAll()):
        found = []
        for context in (nullcontext(), lean(held=(torch.clone, torch.clone))):
            torch.manual_seed(0)
            with mode, context:
                y = torch.nn.functional.rrelu(x * 1, training=True).sum()
            found.append(torch.autograd.grad(y, x)[0])
        assert torch.equal(*found)
