"""Group norm against torch and against float64: values, gradients, layouts, and the layer's life."""

import copy
import inspect
import pickle

import pytest
import torch
from cases import DTYPES, GAPS, ChannelCase, budget, error, make
from torch import nn as stock
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, jvp, vmap

from leannorm import functional, nn
from leannorm._errors import DtypeError, InputError

# shape and layout, groups
CASES = [
    (ChannelCase((4, 6)), 2),
    (ChannelCase((3, 8, 1)), 4),
    (ChannelCase((2, 12, 17)), 3),
    (ChannelCase((2, 6, 7, 5)), 1),
    (ChannelCase((2, 6, 7, 5)), 6),
    (ChannelCase((3, 16, 5, 5), "channels_last"), 4),
    (ChannelCase((3, 6, 4, 4), "sliced"), 3),
    (ChannelCase((3, 6, 4, 4), "transposed"), 2),
    (ChannelCase((2, 6, 4, 5), "offset"), 2),
    (ChannelCase((3, 6, 4, 4), "expanded"), 2),
    (ChannelCase((9, 64, 24, 24)), 32),
    (ChannelCase((9, 64, 24, 24), "channels_last"), 32),
    (ChannelCase((2, 4, 2, 3, 4)), 2),
    (ChannelCase((2, 4, 2, 3, 4), "channels_last"), 2),
]
ids = [f"{case}-{groups}" for case, groups in CASES]
compiles = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def exact(x, groups, weight, bias, eps=1e-5):
    folded = x.double().reshape(x.shape[0], groups, -1)
    centred = folded - folded.mean(2, keepdim=True)
    y = (centred / (centred.square().mean(2, keepdim=True) + eps).sqrt()).reshape(x.shape)
    along = (-1, *(1,) * (x.dim() - 2))
    return y * weight.double().reshape(along) + bias.double().reshape(along)


def run(function, x, groups, weight, bias, dy):
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(leaves[0], groups, *leaves[1:])
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def compare(x, groups, dy):
    weight, bias = (torch.randn(x.shape[1]).to(x.dtype) for _ in range(2))
    got = run(functional.group_norm, x, groups, weight, bias, dy)
    # torch is measured on contiguous input: on channels_last its error has no bound
    torchs = run(stock.functional.group_norm, x.contiguous(), groups, weight, bias, dy)
    want = run(exact, x.double(), groups, weight.double(), bias.double(), dy)
    for g, t, w in zip(got, torchs, want, strict=True):
        assert (g.dtype, g.shape) == (t.dtype, t.shape)
        assert error(g, w) <= budget(t, w)
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("case", "groups"), CASES, ids=ids)
def test_values_and_gradients_within_the_budget(case, groups, dtype):
    x = make(case, dtype)
    y, dx, *_ = compare(x, groups, torch.randn_like(x))
    if case.layout in ("contiguous", "channels_last"):
        assert y.stride() == dx.stride() == x.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("mean", "std"), GAPS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_large_means_and_small_spreads(mean, std, dtype, layout):
    x = make(ChannelCase((4, 6, 10, 10), layout), dtype, mean, std)
    compare(x, 3, torch.randn(x.shape).to(dtype))


def test_right_on_channels_last_where_torch_is_wrong():
    x = make(ChannelCase((4, 32, 16, 16), "channels_last"), torch.float32, 1e3)
    want = exact(x, 8, torch.ones(32), torch.zeros(32))
    assert error(functional.group_norm(x, 8), want) < 1e-3
    assert error(stock.functional.group_norm(x, 8), want) > 1


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_mix_of_dtypes_gives_the_inputs_dtype(dtype, weight_dtype):
    x = make(ChannelCase((2, 4, 5)), dtype).requires_grad_()
    weight, bias = (torch.randn(4).to(weight_dtype).requires_grad_() for _ in range(2))
    y = functional.group_norm(x, 2, weight, bias)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    assert weight.grad.dtype == bias.grad.dtype == weight_dtype


def test_first_and_second_derivatives():
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def function(x, weight, bias):
        return functional.group_norm(x, 2, weight, bias)

    assert gradcheck(function, (x, weight, bias))
    assert gradgradcheck(function, (x, weight, bias))


@pytest.mark.parametrize("shape", [(0, 4), (0, 4, 3, 3), (2, 4, 0)])
def test_nothing_in_gives_nothing_out(shape):
    x, weight = torch.randn(shape, requires_grad=True), torch.ones(4, requires_grad=True)
    y = functional.group_norm(x, 2, weight)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros(4))


@pytest.mark.parametrize(
    ("arguments", "error_type", "says"),
    [
        ((torch.randn(2, 4, 3), 3), InputError, "divisible by num_groups"),
        ((torch.randn(2, 4, 3), 0), InputError, "divisible by num_groups"),
        ((torch.randn(4), 2), InputError, "at least 2D"),
        ((torch.randn(1, 4), 4), InputError, "more than 1 value"),
        ((torch.randn(2, 4, 3), 2, torch.ones(3)), InputError, "one entry per channel"),
        ((torch.randn(2, 4, 3), 2, None, torch.ones(3)), InputError, "one entry per channel"),
        ((torch.randn(2, 4, 3), 2, None, None, -1.0), InputError, "eps"),
        ((torch.ones(2, 4, 3, dtype=torch.int64), 2), DtypeError, "floating"),
    ],
)
def test_errors_say_the_rule(arguments, error_type, says):
    with pytest.raises(error_type, match=says):
        functional.group_norm(*arguments)


# torch 2.10's layer has no `bias`, and ours has what torch's has
BIAS = [{"bias": False}] if "bias" in inspect.signature(stock.GroupNorm).parameters else []


@pytest.mark.parametrize(
    "arguments", [{}, {"affine": False}, {"eps": 1e-3, "dtype": torch.float64}, *BIAS], ids=str
)
def test_the_layer_stands_in_for_torchs(arguments):
    ours, theirs = nn.GroupNorm(2, 6, **arguments), stock.GroupNorm(2, 6, **arguments)
    for p in ours.parameters():
        torch.nn.init.normal_(p)
    assert isinstance(ours, stock.GroupNorm)
    assert repr(ours) == repr(theirs)
    theirs.load_state_dict(ours.state_dict())
    back = nn.GroupNorm(2, 6, **arguments)
    back.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 6, 4, dtype=arguments.get("dtype"))
    torch.testing.assert_close(back(x), theirs(x))
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(copied(x), ours(x))
    assert ours.to("meta")(x.to("meta")).shape == x.shape


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # torch's own, in jvp
def test_lives_under_torchs_transforms():
    layer, x = nn.GroupNorm(2, 4).double(), torch.randn(5, 3, 4, 6, dtype=torch.float64)
    parameters = dict(layer.named_parameters())
    want = torch.stack([layer(part) for part in x])
    torch.testing.assert_close(vmap(layer)(x), want)
    gradient = grad(lambda p: functional_call(layer, p, (x[0],)).pow(3).sum())(parameters)
    layer(x[0]).pow(3).sum().backward()
    torch.testing.assert_close(gradient["weight"], layer.weight.grad)
    value, tangent = jvp(layer, (x[0],), (torch.ones_like(x[0]),))
    torch.testing.assert_close(value, want[0])
    assert tangent.abs().max() < 1e-9
    traced = torch.fx.symbolic_trace(stock.Sequential(layer))
    assert torch.equal(traced(x[0]), layer(x[0]))


@compiles
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_compiles_without_a_graph_break(layout):
    layer, x = nn.GroupNorm(2, 6), make(ChannelCase((2, 6, 4, 4), layout), torch.float32)
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        results.append([y, *torch.autograd.grad(y.pow(3).sum(), [leaf, *layer.parameters()])])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
        assert compiled.stride() == eager.stride()
