"""The per-row kernels of every backend: torch's numbers within the budget, and the reference's.

Triton's are interpreted where there is no GPU. What is served as a function goes by the backend's name.
"""

from __future__ import annotations

import pytest
import torch
from kernel_cases import alike, tried
from row_cases import CASES, DTYPES, RowCase, assert_within_budget, make, ours, theirs
from row_kernel_cases import ALL, BF16, F32, ROWS, assert_agree, both_ways, operands

from leannorm import functional as F
from leannorm._types import KeptByRowNorm, Rows
from leannorm.ops import select
from leannorm.ops.backends import CPU, REFERENCE

BOTH = ("cpu", "triton", "aten")
KINDS = (False, True)  # layer norm, RMS norm


@pytest.mark.sampled(of=4)
@tried("given", ROWS)
def test_agrees_with_the_reference(kernels, given):
    shape, start, stop, dtype, rms, residual = given
    assert_agree(kernels, operands(shape, start, stop, dtype, rms, residual), start, stop, rms)


FULL = [(case, dtype, rms) for case in CASES for dtype in ALL for rms in KINDS]
SOME = [(c, d, rms) for i, c in enumerate(CASES) for d in (DTYPES[:2] if i % 5 else ALL) for rms in KINDS]


@pytest.mark.sampled(of=2)
@tried("case, dtype, rms", {"reference": FULL, "cpu": FULL, "aten": FULL, "triton": SOME})
def test_values_and_gradients_within_the_budget(kernels, case, dtype, rms):
    weight, bias = (torch.randn(case.normalized_shape).to(dtype) for _ in range(2))
    x, dy = make(case, dtype), torch.randn(case.shape).to(dtype)
    assert_within_budget(case, x, weight, None if rms else bias, dy, 1e-5, rms)


@tried("dtype, rms", {"cpu": [(d, rms) for d in ALL for rms in KINDS], "triton": [(F32, False)]})
def test_columns_of_one_value(kernels, dtype, rms):
    """Padding that a mask has made 0, beside data, where the columns of a panel are summed together."""
    x, *others = operands((2, 96, 64), 1, 2, dtype, rms, False)
    x[0, :, 40:], x[1, :, 3] = 0, 0.5
    assert_agree(kernels, (x, *others), 1, 2, rms)


def test_a_column_of_one_value_changes_no_bit_of_those_beside_it():
    x, *others = operands((1, 96, 64), 1, 2, F32, False, False)
    before = both_ways(CPU, (x, *others), 1, 2, False)
    x = x.clone()
    x[..., 5] = 0
    after = both_ways(CPU, (x, *others), 1, 2, False)
    kept = [i for i in range(64) if i != 5]
    for a, b in zip(before[:4], after[:4], strict=True):
        assert torch.equal(a[..., kept], b[..., kept])


GAPS = [(1.0, 0.0), (1e3, 1.0), (1e4, 1.0), (0.0, 1e-6)]
FAR = [(4, gap, dtype, rms) for gap in GAPS for dtype in DTYPES for rms in KINDS]
FARTHER = [
    (16, gap, d, rms)
    for gap in [(0.0, 1.0), (10.0, 1.0), (100.0, 1.0), *GAPS]
    for d in DTYPES
    for rms in KINDS
]


@tried("rows, gap, dtype, rms", {"reference": FARTHER, "cpu": FARTHER, "aten": FARTHER, "triton": FAR})
def test_large_means_and_small_spreads(kernels, rows, gap, dtype, rms):
    case = RowCase((rows, 300), (300,))
    weight, bias = (torch.randn(300).to(dtype) for _ in range(2))
    x, dy = make(case, dtype, *gap), torch.randn(case.shape).to(dtype)
    assert_within_budget(case, x, weight, None if rms else bias, dy, 1e-5, rms)


@tried(
    "far, dtype, rms", alike(BOTH, [(far, d, rms) for far in (30.0, 1e3) for d in DTYPES for rms in KINDS])
)
def test_rows_whose_first_values_are_far_from_their_mean(kernels, far, dtype, rms):
    """A centre near the mean is taken from a row's first values."""
    case = RowCase((5, 300), (300,))
    weight, bias = (torch.randn(300).to(dtype) for _ in range(2))
    x, dy = make(case, dtype), torch.randn(case.shape).to(dtype)
    x[1:, :70] += far
    x[2:, 0] -= 8 * far
    assert_within_budget(case, x, weight, None if rms else bias, dy, 1e-5, rms)


@tried("dtype, rms", alike(BOTH, [(d, rms) for d in DTYPES for rms in KINDS]))
def test_rows_that_are_pages_of_memory(kernels, dtype, rms):
    """Fewer of them go together; the sums of their parameters' gradients are the same."""
    case = RowCase((7, 2048), (2048,))
    weight, bias = (torch.randn(2048).to(dtype) for _ in range(2))
    x, dy = make(case, dtype), torch.randn(case.shape).to(dtype)
    assert_within_budget(case, x, weight, None if rms else bias, dy, 1e-5, rms)


@tried("rms", alike(BOTH, KINDS))
def test_long_rows_keep_their_digits_at_a_large_mean(kernels, rms):
    case = RowCase((1, 33000), (33000,))
    x, dy = make(case, F32, 1e4, 1.0), torch.randn(case.shape)
    weight, bias = torch.randn(33000), None if rms else torch.randn(33000)
    assert_within_budget(case, x, weight, bias, dy, 1e-5, rms)


def test_many_rows_pass_through_few_programs(kernels):
    """And their shares are added up in the same order every time."""
    given = operands((3000, 8), 1, 2, F32, False, True)
    got, again = (assert_agree(kernels, given, 1, 2, False) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    x, dy = given[0], given[4]
    rows = Rows(1, 2, 1e-5, False)
    _, _, mean, rstd = kernels.row_forward((x, None, None, None, None, None, None), rows)
    dx, dweight, dbias = kernels.row_backward(dy, None, KeptByRowNorm(x, mean, rstd), rows, False)
    assert (dweight, dbias) == (None, None)
    assert dx.isfinite().all()


LAYOUTS = ("channels_last", "sliced", "transposed", "expanded", "offset")
LAID_OUT = {
    "cpu": [(layout, start, rms) for layout in LAYOUTS for start in (1, 2, 3) for rms in KINDS],
    "triton": [(layout, start, rms) for layout in LAYOUTS[:4] for start in (1, 3) for rms in KINDS],
}


@tried("layout, start, rms", LAID_OUT)
def test_layout_in_is_layout_out(kernels, layout, start, rms):
    given = operands((3, 6, 4, 5), start, start + 1, F32, rms, True, layout)
    other = operands((3, 6, 4, 5), start, start + 1, F32, rms, True)
    for operand in (given, (*given[:4], *other[4:])):  # gradients in the input's layout, and in another
        got = assert_agree(kernels, operand, start, start + 1, rms)
        assert got[0].stride() == got[4].stride() == torch.empty_like(operand[0]).stride()


MIXED = [(p, d, rms) for p in (F32, torch.float16) for d in (BF16, torch.float64) for rms in KINDS]


@tried("parameters, dtype, rms", alike(BOTH, MIXED))
def test_parameters_of_another_dtype(kernels, parameters, dtype, rms):
    x, residual, weight, bias, *rest = operands((3, 40), 1, 2, dtype, rms, False)
    bias = bias if bias is None else bias.to(parameters)
    assert_agree(kernels, (x, residual, weight.to(parameters), bias, *rest), 1, 2, rms)


HARD = {
    "cpu": [
        (s, n, inner, r)
        for s in (1e30, 1e-30, 1.0)
        for n, inner in ((40, ()), (40, (6, 6)), (40, (6,)), (33000, ()))
        for r in KINDS
    ],
    "triton": [
        (s, n, inner, r)
        for s in (1e30, 1e-30)
        for n, inner in ((40, ()), (40, (6,)), (33000, ()))
        for r in KINDS
    ],
}


@tried("scale, n, inner, rms", HARD)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, which a device has not
def test_hard_rows_stand_beside_easy_ones(kernels, scale, n, inner, rms):
    """Each of: values without a float32 square, a constant, zeros, a far first value, plain noise."""
    rows = torch.randn(5, n, *inner)
    rows[0] *= scale
    rows[1], rows[2] = 3.0, 0.0
    rows[3, : n // 2] += 1e4
    case = RowCase(tuple(rows.shape), (n,), 1)
    with select.use_backend("reference"):
        want = ours(rows.double(), case, None, None, 1e-12, rms)
    got = ours(rows, case, None, None, 1e-12, rms)
    limit = 8 * torch.finfo(F32).eps * want.abs().amax(1, keepdim=True).clamp_min(1e-3)
    assert ((got.double() - want).abs() <= limit).all()


def test_not_a_number_stays_in_its_row(kernels):
    for shape in ((4, 40), (4, 40, 6)):
        x = torch.randn(shape)
        x[1, 3] = float("nan")
        y = ours(x, RowCase(shape, (40,), 1), None, None, 1e-5, False)
        assert y.isnan().flatten(1).any(1).tolist() == [False, True, False, False]


@tried("shape", alike(BOTH, [(0, 8), (4, 0), (2, 0, 3), (0, 4, 2)]))
def test_nothing_in_nothing_out(kernels, shape):
    given = operands(shape, 1, 2, F32, False, True)
    for g, w in zip(*(both_ways(b, given, 1, 2, False) for b in (kernels, REFERENCE)), strict=True):
        torch.testing.assert_close(g, w)


def test_the_layer_takes_the_kernels_where_they_are_named(kernels):
    x = torch.randn(4, 8)
    case = RowCase((4, 8), (8,))
    assert select.pick(x) is kernels
    torch.testing.assert_close(ours(x, case, None, None, 1e-5, True), theirs(x, case, None, None, 1e-5, True))


# an interpreter takes its time: one row is enough for it
CHECKED = {
    "cpu": [(way, rms) for way in ("plain", "residual", "channels_last", "strided") for rms in KINDS],
    "triton": [("residual", False)],
}


@pytest.mark.sampled(of=3)
@tried("way, rms", CHECKED)
def test_the_dispatcher_finds_nothing_wrong(kernels, operators, way, rms):
    x, residual, weight, bias, dy, _ = operands((2, 6, 3, 3), 1, 2, F32, rms, True)
    x = x.to(memory_format=torch.channels_last) if way == "channels_last" else x
    x, dy = (x[..., ::2], dy[..., :2]) if way == "strided" else (x, dy)
    residual = residual if way == "residual" else None
    forward, backward = operators.row_forward.default, operators.row_backward.default
    torch.library.opcheck(forward, (x, residual, weight, bias, 1, 2, 1e-5, rms))
    _, _, mean, rstd = forward(x, residual, weight, bias, 1, 2, 1e-5, rms)
    for wanted in (True, False):
        torch.library.opcheck(backward, (dy, residual, x, mean, rstd, weight, 1, 2, rms, wanted, not rms))


@pytest.mark.parametrize("tokens", [1, 3, 7, 8, 12, 17, 64])
@pytest.mark.parametrize("heads", [1, 2, 8, 65])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_short_runs_are_those_of_a_contiguous_tensor(tokens, heads, threads):
    """Heads of a projection's slice, also where some are padding; each row's bits are its own."""
    qkv, weight = torch.randn(2, tokens, 3, heads, 16), torch.randn(16)
    x = qkv[:, :, 1]
    valid = torch.rand(2, tokens, heads) < 0.7
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (x, x.transpose(1, 2), x.transpose(0, 1)):
            mask = valid if rows is x else None
            whole = rows.contiguous()
            found, wanted = (F.rms_norm(v, (16,), weight, 1e-6, mask=mask) for v in (rows, whole))
            assert torch.equal(found, wanted)
            found, wanted = (F.layer_norm(v, (16,), weight, weight, 1e-6, mask=mask) for v in (rows, whole))
            assert torch.equal(found, wanted)
    finally:
        torch.set_num_threads(before)
