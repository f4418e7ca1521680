"""Layer and RMS norm against torch and against float64: values, gradients, layouts, dtypes, bad input."""

import pytest
import torch
from row_cases import (
    CASES,
    DTYPES,
    RowCase,
    budget,
    error,
    exact,
    make,
    ours,
    run,
    run_exact,
    theirs,
)

from leannorm import functional, nn
from leannorm._errors import DtypeError, InputError

RMS = pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])


def parameters(case, rms, dtype=torch.float32):
    weight = torch.randn(case.normalized_shape).to(dtype)
    return weight, None if rms else torch.randn(case.normalized_shape).to(dtype)


@RMS
@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_values_whose_squares_are_no_float32(scale, rms):
    """torch's layer norm gives NaN and its RMS norm 0 at 1e30."""
    case = RowCase((4, 100), (100,))
    x = make(case, torch.float32, 0.5, 1.0) * scale
    want = exact(x, case.axes, None, None, 0.0, rms)
    got = ours(x, case, None, None, 0.0, rms)
    assert error(got, want) <= 4 * torch.finfo(torch.float32).eps * want.abs().max()
    x.requires_grad_()
    (grad,) = torch.autograd.grad(ours(x, case, None, None, 0.0, rms).pow(3).sum(), x)
    (wanted,) = torch.autograd.grad(exact(x.double(), case.axes, None, None, 0.0, rms).pow(3).sum(), x)
    largest = (grad.double() * scale).abs().max()
    assert error(grad.double() * scale, wanted.double() * scale) <= 1e-5 * largest


@RMS
@pytest.mark.parametrize("x_dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("w_dtype", [*DTYPES, torch.float64], ids=str)
def test_any_mix_of_dtypes(x_dtype, w_dtype, rms):
    case = RowCase((4, 40), (40,))
    x, (weight, bias) = make(case, x_dtype), parameters(case, rms, w_dtype)
    dy = torch.randn(case.shape).to(x_dtype)
    got = run(ours, case, x, weight, bias, dy, 1e-5, rms)
    want = run_exact(case, x, weight, bias, dy, 1e-5, rms)
    for g, w, like in zip(got, want, (x, x, weight, bias), strict=False):
        assert g.dtype == like.dtype
        torchs = w.to(torch.promote_types(x_dtype, torch.float32)).to(g.dtype)
        # no op of torch takes every mix: 64 roundings of the arithmetic for sums over 40 columns
        arithmetic = torch.finfo(torch.promote_types(x_dtype, torch.float32)).eps
        assert error(g, w) <= budget(torchs, w) + 64 * arithmetic * w.abs().max()


@pytest.mark.parametrize("case", [c for c in CASES if c.layout != "expanded"], ids=str)
def test_layout_in_is_layout_out(case):
    x = make(case, torch.float32).requires_grad_()
    y = functional.layer_norm(x, case.normalized_shape, dim=case.dim)
    assert y.stride() == torch.empty_like(x).stride()


@pytest.mark.sampled(of=2)
@RMS
@pytest.mark.parametrize("case", [CASES[i] for i in (0, 2, 4, 11, 12)], ids=str)
def test_first_and_second_derivatives(case, rms):
    x = make(case, torch.float64).requires_grad_()
    weight, bias = (p if p is None else p.requires_grad_() for p in parameters(case, rms, torch.float64))
    leaves = [p for p in (x, weight, bias) if p is not None]

    def function(x, weight, bias=None):
        return ours(x, case, weight, bias, 1e-5, rms)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@RMS
def test_second_derivative_of_constant_rows(rms):
    """Where the variance is 0 its square root has no derivative, but the norm has."""
    x = torch.full((2, 5), 0.0 if rms else 0.5, dtype=torch.float64)
    case, c = RowCase((2, 5), (5,)), torch.randn(2, 5, dtype=torch.float64)

    def hessian(function):
        def loss(x):
            return (function(x, case, None, None, 0.1, rms) * c).sum() ** 2

        return torch.func.jacrev(torch.func.jacrev(loss))(x)

    torch.testing.assert_close(hessian(ours), hessian(theirs))


@RMS
def test_residual_is_added_and_its_gradient_comes_back(rms):
    x, residual, dy, dr = (torch.randn(3, 4, 8, dtype=torch.float64) for _ in range(4))
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    add = functional.add_rms_norm if rms else functional.add_layer_norm
    norm = functional.rms_norm if rms else functional.layer_norm
    for wanted in ((dy, dr), (dy, None), (None, dr)):
        grads = []
        for fused in (True, False):
            a, b = x.clone().requires_grad_(), residual.clone().requires_grad_()
            y, r = add(a, b, (8,), weight) if fused else (norm(a + b, (8,), weight), a + b)
            loss = sum((o * g).sum() for o, g in zip((y, r), wanted, strict=True) if g is not None)
            grads.append([y, r, *torch.autograd.grad(loss, (a, b, weight), allow_unused=True)])
        for g, w in zip(*grads, strict=True):
            assert (g is None) == (w is None)
            if g is not None:
                torch.testing.assert_close(g, w)

    leaves = (x[0, :2].clone().requires_grad_(), residual[0, :2].clone().requires_grad_(), weight)
    assert torch.autograd.gradgradcheck(lambda a, b, w: add(a, b, (8,), w), leaves)


def test_only_the_input_and_two_statistics_a_row_are_kept():
    kept = []
    x, weight = torch.randn(6, 32, requires_grad=True), torch.nn.Parameter(torch.ones(32))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        functional.layer_norm(x, (32,), weight)
    assert sorted(t.numel() for t in kept) == [6, 6, 32, 6 * 32]
    assert any(t.data_ptr() == x.data_ptr() for t in kept)


def test_a_stock_layer_may_become_ours_by_its_class():
    layer = torch.nn.LayerNorm(6)
    layer.__class__ = nn.LayerNorm
    assert layer(torch.randn(2, 6)).shape == (2, 6)


def test_add_layer_norm_compiles():
    def block(x, residual, weight):
        y, r = functional.add_layer_norm(x, residual, (6,), weight)
        return y + r

    x, residual, weight = (torch.randn(s, requires_grad=True) for s in ((4, 6), (4, 6), (6,)))
    results = []
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        y = function(x, residual, weight)
        results.append([y, *torch.autograd.grad(y.pow(3).sum(), (x, residual, weight))])
    torch.testing.assert_close(results[1], results[0])


BAD = [
    (DtypeError, lambda x: functional.layer_norm(x.long(), (6,))),
    (DtypeError, lambda x: functional.rms_norm(x.to(torch.complex64), (6,))),
    (DtypeError, lambda x: functional.layer_norm(x, (6,), torch.ones(6).int())),
    (InputError, lambda x: functional.layer_norm(x, (5,))),
    (InputError, lambda x: functional.layer_norm(x, ())),
    (InputError, lambda x: functional.layer_norm(x, (1, 4, 6))),
    (InputError, lambda x: functional.layer_norm(x, (4, 6), dim=0)),
    (InputError, lambda x: functional.layer_norm(x, (6,), dim=0)),
    (InputError, lambda x: functional.layer_norm(x, (6,), dim=2)),
    (InputError, lambda x: functional.layer_norm(x, (6,), dim=-3)),
    (InputError, lambda x: functional.layer_norm(x, (6,), torch.ones(5))),
    (InputError, lambda x: functional.layer_norm(x, (6,), None, torch.ones(1, 6))),
    (InputError, lambda x: functional.layer_norm(x, (6,), eps=-1e-5)),
    (InputError, lambda x: functional.rms_norm(x, (6,), eps=float("nan"))),
    (InputError, lambda x: functional.add_layer_norm(x, x[:1], (6,))),
    (InputError, lambda x: nn.LayerNorm(6, eps=-1.0)),
    (InputError, lambda x: nn.LayerNorm((4, 6), dim=1)),
    (InputError, lambda x: nn.RMSNorm(5)(x)),
]


@pytest.mark.parametrize(("error", "call"), BAD, ids=range(len(BAD)))
def test_bad_input_is_named(error, call):
    with pytest.raises(error) as raised:
        call(torch.randn(4, 6))
    assert "got" in str(raised.value)
    assert isinstance(raised.value, (ValueError, RuntimeError))
