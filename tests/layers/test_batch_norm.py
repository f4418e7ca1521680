"""Batch norm against torch and against float64: values, gradients, statistics, layouts, dtypes."""

import pytest
import torch
from cases import (
    ACTS,
    CASES,
    DTYPES,
    GAPS,
    ChannelCase,
    budget,
    error,
    make,
    run,
    run_exact,
    stock_batch_norm,
)
from torch.autograd import gradcheck, gradgradcheck

from leannorm import functional


def ours(x, weight, bias, residual, act, eps):
    return functional.batch_norm_act(x, None, None, weight, bias, True, eps=eps, act=act, residual=residual)


def compare(x, weight, bias, residual, dy, act="identity"):
    got = run(ours, x, weight, bias, residual, dy, act)
    torchs = run(stock_batch_norm, x, weight, bias, residual, dy, act)
    want = run_exact(x, weight, bias, residual, dy, act)
    for g, t, w in zip(got, torchs, want, strict=True):
        assert (g.dtype, g.shape) == (t.dtype, t.shape)
        assert error(g, w) <= budget(t, w)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_within_the_budget(case, dtype):
    channels = case.shape[1]
    x, dy = make(case, dtype), torch.randn(case.shape).to(dtype)
    compare(x, torch.randn(channels).to(dtype), torch.randn(channels).to(dtype), None, dy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("mean", "std"), GAPS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_large_means_and_small_spreads(mean, std, dtype, layout):
    x = make(ChannelCase((8, 3, 10, 10), layout), dtype, mean, std)
    compare(x, torch.randn(3).to(dtype), torch.randn(3).to(dtype), None, torch.randn(x.shape).to(dtype))


@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_and_residual(act, with_residual, dtype):
    case = ChannelCase((8, 6, 24, 25))  # large enough that the largest error is no accident
    x, dy, residual = (make(case, dtype) for _ in range(3))
    weight, bias = torch.randn(6).to(dtype), torch.randn(6).to(dtype)
    compare(x, weight, bias, residual if with_residual else None, dy, act)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_any_mix_of_dtypes_gives_the_inputs_dtype(dtype, weight_dtype):
    x = make(ChannelCase((4, 3, 5, 5)), dtype).requires_grad_()
    weight, bias = (torch.randn(3).to(weight_dtype).requires_grad_() for _ in range(2))
    y = functional.batch_norm(x, None, None, weight, bias, True)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (dtype, dtype)
    assert weight.grad.dtype == bias.grad.dtype == weight_dtype


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_values_whose_squares_are_no_float32(scale):
    """torch's batch norm gives 0 at 1e30."""
    x = make(ChannelCase((4, 3, 5, 5)), torch.float32, 0.5) * scale
    x64 = x.double()
    centred = x64 - x64.mean((0, 2, 3), keepdim=True)
    want = centred / (centred.square().mean((0, 2, 3), keepdim=True) + 1e-38).sqrt()
    got = functional.batch_norm(x, None, None, training=True, eps=1e-38)
    assert error(got, want) <= 4 * torch.finfo(torch.float32).eps * want.abs().max()


MODES = [
    {"training": True},
    {"training": True, "affine": False},
    {"training": False},
    {"training": False, "affine": False},
]


@pytest.mark.parametrize("act", ["identity", "silu", "elu"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_first_and_second_derivatives(mode, act, with_residual):
    x, weight, bias, residual = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 2, 2, 2), 2, 2, (3, 2, 2, 2))
    )
    mean, var = torch.randn(2, dtype=torch.float64), torch.rand(2, dtype=torch.float64) + 0.5
    affine = mode.get("affine", True)

    def f(x, weight, bias, residual):
        return functional.batch_norm_act(
            x,
            mean.clone(),
            var.clone(),
            weight if affine else None,
            bias if affine else None,
            mode["training"],
            act=act,
            residual=residual if with_residual else None,
        )

    inputs = (x, weight, bias, residual)
    assert gradcheck(f, inputs)
    assert gradgradcheck(f, inputs, fast_mode=True)


def test_running_statistics_are_torchs():
    ours, theirs = [torch.zeros(5), torch.ones(5)], [torch.zeros(5), torch.ones(5)]
    for _ in range(10):
        x = torch.randn(4, 5, 6, 6) * 3 + 2
        functional.batch_norm(x, *ours, training=True, momentum=0.1)
        torch.nn.functional.batch_norm(x, *theirs, training=True, momentum=0.1)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_training_after_an_evaluation_forward_leaves_its_gradient_alone():
    """The running statistics are copied, so a later training forward may change the buffers."""
    mean, var = torch.zeros(3), torch.ones(3)
    x = torch.randn(4, 3, requires_grad=True)
    y = functional.batch_norm(x, mean, var)
    functional.batch_norm(torch.randn(4, 3) + 9, mean, var, training=True)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, torch.full_like(x, (1 + 1e-5) ** -0.5))


def kept(mean=None, var=None, weight=None, **options):
    """Bytes of full-size tensors kept, over the input's."""
    sizes = {}

    def pack(t):
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x = torch.randn(16, 8, 16, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = functional.batch_norm_act(x, mean, var, weight, training=mean is None, **options)
    y.sum().backward()
    return round(sum(sizes.values()) / x.nbytes, 2)


def test_only_the_input_is_kept():
    """The input's own storage without a residual, its output besides with one."""
    assert kept(act="silu") == 1
    residual = torch.randn(16, 8, 16, 16)
    assert kept(act="relu", residual=residual) == 2
    assert kept(act="identity", residual=residual) == 1
    assert kept(act="silu", residual=residual) == 2


def test_frozen_evaluation_keeps_no_input():
    frozen = {"mean": torch.zeros(8), "var": torch.ones(8), "weight": torch.ones(8)}
    residual = torch.randn(16, 8, 16, 16)
    assert kept(**frozen, act="identity") == 0
    assert kept(**frozen, act="identity", residual=residual) == 0
    assert kept(**frozen, act="relu", residual=residual) == 1
    assert kept(**frozen, act="relu") == 1
    assert kept(**frozen | {"weight": torch.ones(8, requires_grad=True)}, act="identity") == 1
