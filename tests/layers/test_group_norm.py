"""Group norm against torch and against float64: values, gradients, layouts, and the layer's life."""

import pytest
import torch
from cases import DTYPES, GAPS, ChannelCase, budget, error, make
from torch import nn as stock

from leannorm import functional
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
