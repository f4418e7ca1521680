"""Instance norm against torch and float64: values, running statistics, ranks, and the layer's life."""

import pytest
import torch
from cases import DTYPES, GAPS, ChannelCase, budget, error, make
from torch import nn as stock

from leannorm import functional, nn
from leannorm._errors import DtypeError, InputError

CASES = [
    ChannelCase((3, 5, 2)),
    ChannelCase((2, 7, 17)),
    ChannelCase((2, 6, 7, 5)),
    ChannelCase((1, 1, 15, 17)),
    ChannelCase((3, 16, 5, 5), "channels_last"),
    ChannelCase((3, 6, 4, 4), "sliced"),
    ChannelCase((3, 6, 4, 4), "transposed"),
    ChannelCase((2, 6, 4, 5), "offset"),
    ChannelCase((3, 6, 4, 4), "expanded"),
    ChannelCase((9, 64, 24, 24)),
    ChannelCase((9, 64, 24, 24), "channels_last"),
    ChannelCase((2, 4, 2, 3, 4)),
    ChannelCase((2, 4, 2, 3, 4), "channels_last"),
]


def exact(x, mean, var, weight, bias, use_input_stats=True):
    x, axes, along = x.double(), tuple(range(2, x.dim())), (-1, *(1,) * (x.dim() - 2))
    if use_input_stats:
        centred = x - x.mean(axes, keepdim=True)
        y = centred / (centred.square().mean(axes, keepdim=True) + 1e-5).sqrt()
    else:
        y = (x - mean.double().reshape(along)) / (var.double().reshape(along) + 1e-5).sqrt()
    return y * weight.double().reshape(along) + bias.double().reshape(along)


def run(function, x, mean, var, weight, bias, dy, use_input_stats):
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(leaves[0], mean, var, *leaves[1:], use_input_stats)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def compare(x, dy, use_input_stats=True):
    channels = x.shape[1]
    weight, bias, mean = (torch.randn(channels).to(x.dtype) for _ in range(3))
    running = (None, None) if use_input_stats else (mean, torch.rand(channels).to(x.dtype) + 0.5)
    got = run(functional.instance_norm, x, *running, weight, bias, dy, use_input_stats)
    # torch's kernels sum channels_last and contiguous input differently; the better of the two is the measure
    torchs = run(stock.functional.instance_norm, x.contiguous(), *running, weight, bias, dy, use_input_stats)
    want = run(exact, x.double(), *running, weight.double(), bias.double(), dy, use_input_stats)
    for g, t, w in zip(got, torchs, want, strict=True):
        assert (g.dtype, g.shape) == (t.dtype, t.shape)
        assert error(g, w) <= budget(t, w)
    return got


@pytest.mark.parametrize("use_input_stats", [True, False], ids=["own", "running"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_within_the_budget(case, dtype, use_input_stats):
    x = make(case, dtype)
    y, dx, *_ = compare(x, torch.randn_like(x), use_input_stats)
    if case.layout in ("contiguous", "channels_last"):
        assert y.stride() == dx.stride() == x.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("mean", "std"), GAPS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_large_means_and_small_spreads(mean, std, dtype, layout):
    x = make(ChannelCase((4, 6, 10, 10), layout), dtype, mean, std)
    compare(x, torch.randn(x.shape).to(dtype))


def test_no_channels_in_gives_none_out():
    shape = (2, 0, 3)
    x, running = torch.randn(shape, requires_grad=True), [torch.zeros(shape[1]), torch.ones(shape[1])]
    y = functional.instance_norm(x, *running)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


@pytest.mark.parametrize("momentum", [0.0, 0.25, 1.0, None])
def test_running_statistics_move_as_torchs(momentum):
    pair = [
        layer(3, momentum=momentum, track_running_stats=True)
        for layer in (nn.InstanceNorm1d, stock.InstanceNorm1d)
    ]
    x = torch.randn(4, 3, 9) * 2 + 5
    for _ in range(2):
        for layer in pair:
            layer(x)
    for got, want in zip(*(layer.buffers() for layer in pair), strict=True):
        torch.testing.assert_close(got, want)


X = torch.randn(2, 4, 6)


@pytest.mark.parametrize(
    ("call", "error_type", "says"),
    [
        (lambda: functional.instance_norm(torch.randn(2, 4, 1)), InputError, "more than 1 spatial"),
        (lambda: functional.instance_norm(torch.randn(2, 4)), InputError, "more than 1 spatial"),
        (lambda: functional.instance_norm(X, use_input_stats=False), InputError, "running_mean"),
        (lambda: functional.instance_norm(X, torch.zeros(4)), InputError, "both"),
        (lambda: functional.instance_norm(X, weight=torch.ones(3)), InputError, "one entry per channel"),
        (lambda: functional.instance_norm(X, momentum=2.0), InputError, "momentum"),
        (lambda: functional.instance_norm(X.long()), DtypeError, "floating"),
        (lambda: nn.InstanceNorm2d(4)(torch.randn(2, 4)), InputError, "3D or 4D"),
        (lambda: nn.InstanceNorm1d(3, affine=True)(X), InputError, "to match num_features"),
        (lambda: nn.InstanceNorm1d(3, affine=True)(X[0]), InputError, "dim=0"),
    ],
)
def test_errors_say_the_rule(call, error_type, says):
    with pytest.raises(error_type, match=says):
        call()


def test_a_mismatch_without_parameters_only_warns():
    layer = nn.InstanceNorm1d(3)
    with pytest.warns(UserWarning, match="does not match num_features"):
        assert layer(X).shape == X.shape
