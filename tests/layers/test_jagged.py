"""Jagged tensors of torch.nested: as the same norm of the packed values, jagged again, with gradients."""

import copy

import pytest
import torch

import leannorm
from leannorm import functional as F
from leannorm import nn
from leannorm._torch import RELEASE

F64 = torch.float64
SIZES = (3, 5, 0, 2)


def jagged(sizes=SIZES, channels=4, dtype=F64):
    torch.manual_seed(0)
    samples = [torch.randn(n, channels).to(dtype) * 2 + 1 for n in sizes]
    return torch.nested.nested_tensor(samples, layout=torch.jagged)


def packed(x):
    """Positions first, in whatever axis they lie."""
    return x.values() if x._ragged_idx == 1 else x.values().movedim(x._ragged_idx - 1, 0)


def affine(dtype=F64):
    torch.manual_seed(1)
    return [torch.randn(4).to(dtype).requires_grad_() for _ in range(2)]


ROWS = {
    "layer_norm": lambda x, w, b, **how: F.layer_norm(x, (4,), w, b, **how),
    "rms_norm": lambda x, w, b, **how: F.rms_norm(x, (4,), w, 1e-5, **how),
    "add_layer_norm": lambda x, w, b, **how: F.add_layer_norm(x, x * 2, (4,), w, b, **how)[0],
    "add_rms_norm": lambda x, w, b, **how: F.add_rms_norm(x, x * 2, (4,), w, 1e-5, **how)[1],
}
CHANNELS = {
    "batch_norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    "evaluation": lambda x, w, b: F.batch_norm(x, torch.arange(4.0), torch.arange(1.0, 5), w, b),
    "batch_norm_act": lambda x, w, b: F.batch_norm_act(x, None, None, w, b, True, act="silu", residual=x * 2),
    "sync_batch_norm": lambda x, w, b: F.sync_batch_norm(x, None, None, w, b, True),
}
LAYERS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "BatchNormAct1d": lambda: nn.BatchNormAct1d(4),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(4),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "RMSNorm": lambda: nn.RMSNorm(4),
}


def both(function, x, dtype=F64):
    """The result and all gradients, of a jagged tensor and of its packed values."""
    found = []
    for given in (x.detach().requires_grad_(), packed(x).detach().requires_grad_()):
        w, b = affine(dtype)
        y = function(given, w, b)
        of_values = packed(y) if y.is_nested else y
        torch.manual_seed(2)
        of_values.backward(torch.randn_like(of_values))
        grad = packed(given.grad) if y.is_nested else given.grad
        found.append([of_values.detach(), grad, w.grad, b.grad])
        if y.is_nested:
            assert y.offsets() is x.offsets()
            assert y.shape == x.shape
            assert y._ragged_idx == x._ragged_idx
    return found


def assert_equal(found):
    for got, want in zip(*found, strict=True):
        assert (got is None) == (want is None)
        assert got is None or torch.equal(got, want)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*ROWS, *CHANNELS])
def test_as_the_packed_values(name, dtype):
    assert_equal(both({**ROWS, **CHANNELS}[name], jagged(dtype=dtype), dtype))


@pytest.mark.parametrize("name", CHANNELS)
def test_channels_in_front_of_the_ragged_axis(name):
    got, want = both(CHANNELS[name], jagged().transpose(1, 2))
    for a, b in zip(got, want, strict=True):  # another order of addition
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_in_front_of_the_ragged_axis(name):
    def run(x, w, b):
        return ROWS[name](x, w, b, dim=1 if x.is_nested or x.dim() == 3 else -1)

    got, want = both(run, jagged().transpose(1, 2))
    for a, b in zip(got, want, strict=True):
        assert a is b is None or torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_channels_last_of_more_axes():
    x = torch.nested.nested_tensor([torch.randn(n, 3, 4, dtype=F64) for n in (2, 5)], layout=torch.jagged)
    y = F.batch_norm(x, None, None, training=True)
    assert y.values().mean((0, 2)).abs().max() < 1e-12  # (N, j, C, L): the channel is behind the ragged axis
    z = F.batch_norm(x.transpose(1, 2), None, None, training=True)
    assert torch.equal(z.shape[1] * torch.ones(1), torch.tensor([3.0]))
    torch.testing.assert_close(z.transpose(1, 2).values(), y.values(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_their_statistics(name):
    x, one = jagged(dtype=torch.float32), LAYERS[name]()
    other = copy.deepcopy(one)
    y, z = one(x), other(x.values())
    assert torch.equal(y.values(), z)
    for (key, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert (y + x).shape == x.shape  # the same ragged size


@pytest.mark.sampled(of=3)
@pytest.mark.skipif(RELEASE < (2, 12), reason="before torch 2.12 the compiler does not know locals()")
@pytest.mark.parametrize("name", LAYERS)
def test_compiled_in_one_graph(name):
    one = LAYERS[name]()
    other, x = copy.deepcopy(one), jagged(dtype=torch.float32)
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    # of a per-channel norm a compiler sees the formula, whose order of operations is another one
    within = {"rtol": 0, "atol": 0} if name in ("LayerNorm", "RMSNorm") else {}
    for given in (x, jagged((7, 1, 4), dtype=torch.float32)):
        grads = []
        for layer in (compiled, other):
            leaf = given.detach().requires_grad_()
            layer(leaf).values().square().sum().backward()
            grads.append(leaf.grad.values())
        torch.testing.assert_close(*grads, **within)
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "batch_norm", "batch_norm_act"])
def test_gradients_by_differences(name):
    x, (w, b) = jagged((2, 3)), affine()

    def run(values, w, b):
        given = torch.nested.nested_tensor_from_jagged(values, x.offsets())
        return {**ROWS, **CHANNELS}[name](given, w, b).values()

    given = x.values().clone().requires_grad_(), w, b
    assert torch.autograd.gradcheck(run, given)


@pytest.mark.filterwarnings("ignore:leannorm. tensors of a subclass")
@pytest.mark.parametrize("name", LAYERS)
def test_lean_gives_the_same_gradients(name):
    norm, act = LAYERS[name](), torch.nn.SiLU()
    one = torch.nn.Linear(4, 4)
    grads = []
    for lean in (False, True):
        x = jagged((300, 200), dtype=torch.float32).requires_grad_()
        norm.zero_grad()
        if lean:
            with leannorm.lean("norm") as saved:
                y = one(act(norm(x))).values().square().sum()
            assert saved.kept_bytes > 0
        else:
            y = one(act(norm(x))).values().square().sum()
        y.backward()
        grads.append([x.grad.values(), *(p.grad.clone() for p in norm.parameters())])
    assert all(map(torch.equal, *grads))


def test_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        y = nn.LayerNorm(4)(jagged(dtype=torch.bfloat16))
    assert y.values().isfinite().all()


def test_nothing_but_empty_samples():
    x = torch.nested.nested_tensor([torch.zeros(0, 4)] * 2, layout=torch.jagged)
    assert F.layer_norm(x, (4,)).values().shape == (0, 4)


def narrowed():
    starts, sizes = torch.tensor([0, 1]), torch.tensor([3, 2])
    return torch.nested.narrow(torch.randn(2, 6, 4), 1, starts, sizes, layout=torch.jagged)


X = jagged()
BAD = {
    "of another norm": (lambda: F.group_norm(X, 2), "group_norm takes no jagged tensor.*each sample"),
    "over the ragged axis": (
        lambda: F.layer_norm(X.transpose(1, 2), (4,)),
        "got the axes 2 to 2 of 3 where.*axis 2 is ragged",
    ),
    "over the samples": (lambda: F.layer_norm(X, (4,), dim=0), "axis 0 is the samples'"),
    "mask": (lambda: F.layer_norm(X, (4,), mask=torch.ones(2, 2) > 0), "mask and lengths are for padded"),
    "holes": (
        lambda: F.layer_norm(narrowed(), (4,)),
        "input must be a jagged tensor without holes.*contiguous",
    ),
    "another residual": (lambda: F.add_layer_norm(X, jagged(), (4,)), "the very offsets of the input"),
    "a plain residual": (
        lambda: F.batch_norm_act(X, None, None, training=True, residual=X.values()),
        "the very offsets of the input",
    ),
    "group_size": (lambda: nn.BatchNorm1d(4, group_size=2).double()(X), "group_size counts samples"),
    "rank": (lambda: nn.BatchNorm2d(4).double()(X), "expected 4D input"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, said = BAD[name]
    with pytest.raises(leannorm.InputError, match=said):
        call()
