"""`nn.BatchNormAct*`: the layer is batch norm, a residual, an activation, one after the other."""

import pytest
import torch
from cases import ACTS, ChannelCase, budget, error, make
from torch import nn as stock

from leannorm import InputError, nn
from leannorm.ops.activation import ACTIVATIONS

LAYERS = {
    "1d": (nn.BatchNormAct1d, stock.BatchNorm1d, (6, 4)),
    "1dl": (nn.BatchNormAct1d, stock.BatchNorm1d, (6, 4, 5)),
    "2d": (nn.BatchNormAct2d, stock.BatchNorm2d, (6, 4, 3, 5)),
    "3d": (nn.BatchNormAct3d, stock.BatchNorm3d, (6, 4, 2, 3, 2)),
}
kinds = pytest.mark.parametrize("kind", list(LAYERS))
residuals = pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])


def pair(kind, act="relu", **options):
    ours, theirs, shape = LAYERS[kind]
    layer, norm = ours(4, act=act, **options), theirs(4, **options)
    with torch.no_grad():
        for p in norm.parameters():
            p.copy_(torch.randn_like(p))
    layer.load_state_dict(norm.state_dict())
    return layer, norm, shape


def in_steps(norm, act, x, residual):
    y = norm(x)
    return ACTIVATIONS[act].forward(y if residual is None else y + residual)


@kinds
@residuals
@pytest.mark.parametrize("act", ACTS)
def test_is_the_three_in_one(kind, act, with_residual):
    layer, norm, shape = pair(kind, act, dtype=torch.float64)
    for training in (True, True, False):
        x = torch.randn(shape, dtype=torch.float64) + 1
        residual = torch.randn(shape, dtype=torch.float64) if with_residual else None
        results = []
        for module, call in ((layer, layer), (norm, lambda x, r: in_steps(norm, act, x, r))):
            module.train(training)
            leaves = [t.clone().requires_grad_() for t in (x, residual) if t is not None]
            y = call(*leaves) if with_residual else call(leaves[0], None)
            gradients = torch.autograd.grad(y.square().sum(), [*leaves, *module.parameters()])
            results.append([y, *gradients, *(b.double() for b in module.buffers())])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@residuals
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("act", ["relu", "silu"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_within_the_budget_of_torchs_steps(act, layout, dtype, with_residual):
    x, residual = (make(ChannelCase((4, 8, 7, 7), layout), dtype) for _ in range(2))
    residual = residual if with_residual else None
    layer, norm, exact = nn.BatchNormAct2d(8, act=act), stock.BatchNorm2d(8), stock.BatchNorm2d(8).double()
    got, torchs = layer(x, residual), in_steps(norm, act, x, residual)
    want = in_steps(exact, act, x.double(), None if residual is None else residual.double())
    assert (got.dtype, got.shape, got.stride()) == (x.dtype, x.shape, x.stride())
    assert error(got, want) <= budget(torchs, want)


def test_traced_it_runs_with_a_residual_and_without():
    layer, x, residual = nn.BatchNormAct2d(4).eval(), torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    traced = torch.fx.symbolic_trace(layer)
    assert torch.equal(traced(x, residual), layer(x, residual))
    assert torch.equal(traced(x), layer(x))


def test_keeps_less_than_the_steps():
    """Without a residual nothing of the activation's size but the input."""

    def kept(call):
        sizes = {}

        def pack(t):
            if t.numel() >= x.numel():
                sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = call(x)
        assert y.shape == x.shape
        return sum(sizes.values()) / x.nbytes

    x = torch.randn(8, 16, 16, 16, requires_grad=True)
    assert kept(nn.BatchNormAct2d(16, act="silu")) == 1
    assert kept(stock.Sequential(stock.BatchNorm2d(16), stock.SiLU())) == 2


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: nn.BatchNormAct2d(4, act="tanh"), "act must be one of"),
        (lambda: nn.BatchNormAct2d(4)(torch.randn(2, 4)), "4D"),
        (lambda: nn.BatchNormAct1d(4)(torch.randn(2, 4), torch.randn(1, 4)), "residual must have"),
        (lambda: nn.BatchNormAct1d(4)(torch.randn(1, 4)), "more than 1 value"),
    ],
)
def test_errors_say_the_rule(call, says):
    with pytest.raises(InputError, match=says):
        call()


@pytest.mark.parametrize("affine", [True, False], ids=["affine", ""])
@pytest.mark.parametrize("act", ACTS)
def test_frozen_on_transposed_signals(act, affine):
    """The layer keeps its output alone, whose channels lie side by side, as its gradient must."""
    layer = nn.BatchNormAct1d(4, act=act, affine=affine).eval().requires_grad_(False)
    x, dy = torch.randn(6, 5, 4), torch.randn(6, 4, 5)
    found = []
    for given in (x.transpose(1, 2), x.transpose(1, 2).contiguous()):
        leaf = given.detach().requires_grad_()
        y = layer(leaf)
        found.append((y, *torch.autograd.grad(y, leaf, dy)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
