"""The per-row Triton kernels against the reference, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from row_cases import CASES, DTYPES, RowCase, assert_within_budget, make, ours, theirs
from test_row_kernels import SIZES, assert_agree, both_ways, operands

from leannorm.ops import select
from leannorm.ops.backends import REFERENCE, TRITON

WHY_NOT = TRITON.why_not(named=True)
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason="; ".join(WHY_NOT))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RMS = pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
ALL = (*DTYPES, torch.float64)


@pytest.fixture
def kernels():
    with select.use_backend("triton"):
        yield


def here(given):
    return tuple(t if t is None else t.to(DEVICE) for t in given)


def agree(given, start, stop, rms):
    """Both verbs of the kernels against the reference's."""
    given = here(given)
    got = both_ways(TRITON, given, start, stop, rms)
    want = both_ways(REFERENCE, given, start, stop, rms)
    assert_agree(got, want, given[0], torch.Size(given[0].shape[start:stop]).numel())
    return got


@RMS
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for i, case in enumerate(CASES) for dtype in (DTYPES[:2] if i % 5 else ALL)],
    ids=str,
)
def test_values_and_gradients_within_the_budget(case, dtype, rms, kernels):
    weight, bias = (torch.randn(case.normalized_shape).to(dtype) for _ in range(2))
    x, dy = make(case, dtype), torch.randn(case.shape).to(dtype)
    assert_within_budget(case, *here((x, weight, None if rms else bias, dy)), 1e-5, rms)


@RMS
@pytest.mark.parametrize(("mean", "std"), [(1.0, 0.0), (1e3, 1.0), (1e4, 1.0), (0.0, 1e-6)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_means_and_small_spreads(mean, std, dtype, rms, kernels):
    case = RowCase((4, 300), (300,))
    weight, bias = torch.randn(300).to(dtype), None if rms else torch.randn(300).to(dtype)
    x, dy = make(case, dtype, mean, std), torch.randn(case.shape).to(dtype)
    assert_within_budget(case, *here((x, weight, bias, dy)), 1e-5, rms)


@RMS
@pytest.mark.parametrize("n", SIZES)
def test_odd_lengths(n, rms):
    """As lines, and side by side; three rows, so that tiles have rows that do not exist."""
    for shape in ((3, n), (2, n, 3))[: 1 if n > 4096 else 2]:
        agree(operands(shape, 1, 2, torch.bfloat16, rms, True), 1, 2, rms)


# rows that two programs share, rows longer than a tile, rows of neither
LONG = [(2, 9000), (3, 33000), (2, 3000, 3), (1, 300, 40)]


@RMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", LONG, ids=str)
def test_long_rows(shape, dtype, rms):
    agree(operands(shape, 1, 2, dtype, rms, False), 1, 2, rms)


@RMS
def test_long_rows_keep_their_digits_at_a_large_mean(rms, kernels):
    case = RowCase((1, 33000), (33000,))
    x, dy = make(case, torch.float32, 1e4, 1.0), torch.randn(case.shape)
    weight, bias = torch.randn(33000), None if rms else torch.randn(33000)
    assert_within_budget(case, *here((x, weight, bias, dy)), 1e-5, rms)


def test_many_rows_pass_through_few_programs():
    """And their shares are added up in the same order every time."""
    given = operands((3000, 8), 1, 2, torch.float32, False, True)
    got, again = (agree(given, 1, 2, False) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    x, dy = given[0].to(DEVICE), given[4].to(DEVICE)
    _, _, mean, rstd = TRITON.row_forward(x, None, None, None, 1, 2, 1e-5)
    dx, dweight, dbias = TRITON.row_backward(dy, None, x, mean, rstd, None, 1, 2, False, False)
    assert (dweight, dbias) == (None, None)
    assert dx.isfinite().all()


@RMS
@pytest.mark.parametrize("layout", ["channels_last", "sliced", "transposed", "expanded"])
@pytest.mark.parametrize("start", [1, 3])
def test_layout_in_is_layout_out(layout, start, rms):
    given = operands((3, 6, 4, 5), start, start + 1, torch.float32, rms, True, layout)
    other = operands((3, 6, 4, 5), start, start + 1, torch.float32, rms, True)
    for operand in (given, (*given[:4], *other[4:])):  # gradients in the input's layout, and in another
        got = agree(operand, start, start + 1, rms)
        assert got[0].stride() == got[4].stride() == torch.empty_like(operand[0]).stride()


@RMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("parameters", [torch.float32, torch.float16], ids=str)
def test_parameters_of_another_dtype(parameters, dtype, rms):
    x, residual, weight, bias, *rest = operands((3, 40), 1, 2, dtype, rms, False)
    bias = bias if bias is None else bias.to(parameters)
    agree((x, residual, weight.to(parameters), bias, *rest), 1, 2, rms)


@RMS
@pytest.mark.parametrize("inner", [(), (6,)], ids=["lines", "panels"])
@pytest.mark.parametrize("n", [40, 33000])
@pytest.mark.parametrize("scale", [1e30, 1e-30])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, which a device has not
def test_hard_rows_stand_beside_easy_ones(scale, n, inner, rms, kernels):
    """Each of: values without a float32 square, a constant, zeros, a far first value, plain noise."""
    if n > 40 and inner:
        pytest.skip("the same walk along the rows")
    rows = torch.randn(5, n, *inner)
    rows[0] *= scale
    rows[1], rows[2] = 3.0, 0.0
    rows[3, : n // 2] += 1e4
    case = RowCase(tuple(rows.shape), (n,), 1)
    with select.use_backend("reference"):
        want = ours(rows.double(), case, None, None, 1e-12, rms)
    got = ours(rows.to(DEVICE), case, None, None, 1e-12, rms).cpu()
    limit = 8 * torch.finfo(torch.float32).eps * want.abs().amax(1, keepdim=True).clamp_min(1e-3)
    assert ((got.double() - want).abs() <= limit).all()


def test_not_a_number_stays_in_its_row(kernels):
    for shape in ((4, 40), (4, 40, 6)):
        x = torch.randn(shape)
        x[1, 3] = float("nan")
        y = ours(x.to(DEVICE), RowCase(shape, (40,), 1), None, None, 1e-5, False)
        assert y.isnan().flatten(1).any(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (2, 0, 3), (0, 4, 2)], ids=str)
def test_nothing_in_nothing_out(shape):
    given = here(operands(shape, 1, 2, torch.float32, False, True))
    for g, w in zip(*(both_ways(b, given, 1, 2, False) for b in (TRITON, REFERENCE)), strict=True):
        torch.testing.assert_close(g, w)


def test_the_layer_takes_the_kernels_where_they_are_named(kernels):
    x = torch.randn(4, 8, device=DEVICE)
    case = RowCase((4, 8), (8,))
    assert select.pick(x) is TRITON
    torch.testing.assert_close(ours(x, case, None, None, 1e-5, True), theirs(x, case, None, None, 1e-5, True))
