"""Triton's kernels with a scale and a shift, a gated residual, a gate, and of strided heads: interpreted."""

from contextlib import nullcontext

import pytest
import torch
from stand_ins import on_device
from test_modulated_kernels import ada, close, gated
from test_strided_rows import VIEWS, D, both_ways, made

from leannorm import functional, use_backend
from leannorm._types import KeptByGatedNorm, KeptByRowNorm, Rows
from leannorm.ops.backends import REFERENCE, TRITON, triton
from leannorm.ops.schema import OPERATORS

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
ROWS = Rows(2, 3, 1e-5, False, 1.0)
RMS = pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
interpreted = pytest.mark.skipif(
    triton._UNAVAILABLE is not None or not triton.INTERPRETED, reason="runs on the interpreter"
)
pytestmark = interpreted
# shape; the leading axes that scale and gate have: rows of a group no multiple of a tile, one group, a line a
# row, a row that two programs share, rows longer than a tile
CASES = [
    ((3, 40, 64), (1, 2)),
    ((2, 33, 65), (2, 1)),
    ((1, 90, 16), (0, 0)),
    ((40, 1, 48), (1, 1)),
    ((2, 1, 9000), (1, 1)),
    ((2, 3, 9000), (1, 2)),
    ((2, 2, 17000), (1, 2)),
    ((1, 2, 17000), (2, 1)),
]


@pytest.mark.sampled(of=3)
@RMS
@pytest.mark.parametrize(("shape", "places"), CASES, ids=str)
def test_a_scale_and_a_shift(shape, places, rms):
    dtypes = (F32, BF16) if shape[-1] < 1000 else (BF16 if rms else F32,)
    for dtype in dtypes:
        for summed, affine in ((False, False), (True, True)):
            if affine and shape[-1] > 1000 and rms:
                continue
            results = [ada(b, shape, dtype, rms, summed, affine, places) for b in (TRITON, REFERENCE)]
            for got, want in zip(*results, strict=True):
                close(got, want, dtype)


@pytest.mark.parametrize("dtype", [F64, F16])
def test_other_dtypes(dtype):
    for places in ((1, 2), (2, 1)):
        results = [ada(b, (2, 5, 24), dtype, False, True, False, places) for b in (TRITON, REFERENCE)]
        for got, want in zip(*results, strict=True):
            close(got, want, dtype)
    results = [gated(b, (2, 5, 24), dtype, "gelu", True, False) for b in (TRITON, REFERENCE)]
    for got, want in zip(*results, strict=True):
        close(got, want, dtype)


def test_a_scale_for_other_axes_than_the_first():
    """(1, L, C): of every token, but of all samples."""
    x, dy, scale, shift = (torch.randn(2, 5, 8) for _ in range(4))
    scale, shift = scale[:1], shift[:1]
    found = []
    for backend in (TRITON, REFERENCE):
        y, _, mean, rstd = backend.row_forward((x, None, None, None, None, scale, shift), ROWS)
        found.append((y, *backend.row_backward(dy, None, KeptByRowNorm(x, mean, rstd, scale), ROWS)))
    for got, want in zip(*found, strict=True):
        close(got, want, F32)


def test_lines_are_read_where_they_are():
    """Pieces of one projection, as AdaLN makes them; steps that loads cannot take are copied."""
    for width in (48, 49):  # 16 divides the step; nothing does
        x, dy, projected = torch.randn(4, 9, 16), torch.randn(4, 9, 16), torch.randn(4, width + 1)
        pieces = projected[:, :16], projected[:, 16:32], projected[:, 32:48]
        results = []
        for backend in (TRITON, REFERENCE):
            gate, scale, shift = pieces
            y, total, mean, rstd = backend.row_forward((x, dy, gate, None, None, scale, shift), ROWS)
            kept = KeptByRowNorm(total, mean, rstd, scale, None, gate, x)
            results.append((y, total, *backend.row_backward(dy, dy, kept, ROWS)))
        for got, want in zip(*results, strict=True):
            close(got, want, F32)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_narrow_lines_get_sums_of_all_digits(dtype):
    """A scale in bfloat16: its gradient is a float32 sum, rounded once."""
    x, dy = torch.randn(2, 700, 32).to(dtype), torch.rand(2, 700, 32).to(dtype)
    scale = torch.randn(2, 32).to(dtype)
    _, _, mean, rstd = REFERENCE.row_forward((x, None, None, None, None, scale, scale), ROWS)
    given = dy, None, KeptByRowNorm(x, mean, rstd, scale), ROWS
    _, dscale, dshift = TRITON.row_backward(*given)
    assert dshift.dtype == dtype
    torch.testing.assert_close(dshift, dy.float().sum(1).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-4)
    again = TRITON.row_backward(*given)
    assert torch.equal(again[1], dscale)
    assert torch.equal(again[2], dshift)


GATED = [
    ((2, 33, 65), BF16),
    ((3, 40, 64), F32),
    ((1, 5, 3000), BF16),
    ((1, 2, 17000), BF16),
    ((1, 2, 9000), F32),
]


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("shape", "dtype"), GATED, ids=str)
def test_a_gate(shape, dtype, before):
    for act in ("silu",) if shape[-1] > 1000 else ("silu", "mish", "identity"):
        for cast in (False, True):
            results = [gated(b, shape, dtype, act, before, cast) for b in (TRITON, REFERENCE)]
            for i, (got, want) in enumerate(zip(*results, strict=True)):
                # where the normalized value falls between two, it is rounded either way
                close(got, want, dtype, 2 if cast and not i else 1)


@pytest.mark.conformance
def test_many_rows_pass_through_few_programs():
    for before in (True, False):
        results = [gated(b, (1, 3000, 8), F32, "silu", before, False) for b in (TRITON, TRITON, REFERENCE)]
        for got, again, want in zip(*results, strict=True):
            close(got, want, F32)
            assert torch.equal(got, again)
    results = [ada(b, (2, 1500, 8), F32, False, True, False) for b in (TRITON, TRITON, REFERENCE)]
    for got, again, want in zip(*results, strict=True):
        close(got, want, F32)
        assert (got is None) == (again is None)
        assert got is None or torch.equal(got, again)


def test_slices_of_a_projection_are_not_copied():
    x, gate = torch.randn(30, 96)[:, :64], torch.randn(30, 208)[:, 64:128]
    gating = Rows(1, 2, 1e-5, True, act="silu")
    with torch.profiler.profile() as profile:
        y, rstd = TRITON.row_gated_forward(x, gate, torch.ones(64), gating)
        found = TRITON.row_gated_backward(x, KeptByGatedNorm(x, gate, rstd, torch.ones(64)), gating)
    assert not {"aten::clone", "aten::contiguous"} & {event.key for event in profile.key_averages()}
    odd = torch.randn(30, 99)[:, 3:67]  # a step that loads cannot take
    for given in ((x, gate), (odd, gate)):
        y, rstd = TRITON.row_gated_forward(*given, None, gating)
        found = TRITON.row_gated_backward(odd, KeptByGatedNorm(*given, rstd), gating)
        want_y, want_rstd = REFERENCE.row_gated_forward(*given, None, gating)
        want = REFERENCE.row_gated_backward(odd, KeptByGatedNorm(*given, want_rstd), gating)
        for a, b in zip((y, *found), (want_y, *want), strict=True):
            close(a, b, F32)


@RMS
@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_values_whose_squares_are_no_float32(size, rms):
    for n in (100, 20000):
        x, zero = torch.randn(2, n) * size, torch.zeros(1, n)
        rows = Rows(1, 2, 0.0, rms, 1.0)
        for line in (zero, zero.expand(2, n)):
            y, *_ = TRITON.row_forward((x, None, None, None, None, line, line), rows)
            wide, *_ = REFERENCE.row_forward((x.double(), None, None, None, None, line, line), rows)
            torch.testing.assert_close(y.double(), wide, rtol=1e-5, atol=1e-5)
        gate = torch.ones(2, n)
        for before in (True, False):
            gating = Rows(1, 2, 0.0, True, act="identity", norm_before_gate=before)
            y, _ = TRITON.row_gated_forward(x, gate, None, gating)
            want, _ = REFERENCE.row_gated_forward(x.double(), gate.double(), None, gating)
            torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(of=5)
@RMS
@pytest.mark.parametrize("view", VIEWS)
def test_heads_of_a_view(view, rms):
    weight, bias = torch.randn(D), None if rms else torch.randn(D)
    for of_dy in (view, "heads before tokens", "a slice of the projection"):
        torch.manual_seed(0)
        x, dy = made(view), made(of_dy)
        dy = dy if dy.shape == x.shape else torch.randn_like(x)
        ways = zip(*(both_ways(b, x, dy, None, weight, bias, rms) for b in (TRITON, REFERENCE)), strict=True)
        for i, (g, w) in enumerate(ways):
            if w is not None:
                torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
                assert i not in (0, 3) or g.stride() == torch.empty_like(x).stride()


IN_PLACE = ["a slice of the projection", "heads before tokens", "both", "tokens first", "every other token"]


@pytest.mark.parametrize("view", IN_PLACE)
def test_heads_of_a_view_are_not_copied(view):
    """Nor launched by anything but the tape, with an offset of the weight."""
    from leannorm.ops.backends.triton import rows, tape

    x, dy, weight = made(view, BF16), made(view, BF16), torch.randn(D)

    def called(*given):
        tape.forget()
        with torch.profiler.profile() as profile:
            both_ways(TRITON, *given, None, weight, None, True)
        return {event.key: event.count for event in profile.key_averages()}

    of_rows, of_view = called(x.contiguous(), dy.contiguous()), called(x, dy)
    assert not of_view.keys() & {"aten::clone", "aten::contiguous"}
    assert of_view.get("aten::copy_") == of_rows.get("aten::copy_")  # the interpreter makes some
    assert all(
        made is not None
        for tapes in (rows.row_forward.tapes, rows.row_backward.tapes)
        for made in tapes.values()
    )


def test_a_view_that_two_integers_do_not_divide_alike_is_copied():
    x = torch.randn(3, 5, 4, 2 * D + 1)[..., 1 : D + 1]
    assert x.stride(2) % 8
    weight = torch.randn(D)
    for g, w in zip(
        *(both_ways(b, x, x, None, weight, None, True) for b in (TRITON, REFERENCE)), strict=True
    ):
        assert (g is None) == (w is None)
        assert g is None or torch.allclose(g, w, rtol=1e-4, atol=1e-4)


def test_the_functions_reach_the_kernels(monkeypatch):
    """And not the reference's formulas."""
    from leannorm.ops.backends.triton.launch import launch

    launched = []

    def noted(kernel, *arguments, **constants):
        launched.append(kernel.__name__)
        launch(kernel, *arguments, **constants)

    on_device(monkeypatch, launch=noted)
    triton_only = use_backend("triton") if triton.INTERPRETED else nullcontext()
    x, branch = (torch.randn(2, 6, 16, requires_grad=True) for _ in range(2))
    scale, shift, gate = (torch.randn(2, 16, requires_grad=True) for _ in range(3))
    with triton_only:
        y, total = functional.add_ada_layer_norm(x, branch, gate, (16,), scale, shift)
        (y.sum() + total.sum()).backward()
        functional.gated_rms_norm(x, branch, (16,)).sum().backward()
    assert {"forward_run", "backward_tile", "gate_backward", "gated_forward", "gated_backward_tile"} <= set(
        launched
    )


def test_every_operator_is_registered():
    names = set(OPERATORS)
    assert names <= set(triton._OPERATORS)
    assert all(callable(getattr(triton._kernels, name)) for name in names)


def test_what_kernels_would_read_wrongly_is_refused():
    from leannorm.ops.backends.triton import gated, rows

    x, line = torch.randn(6, 8), torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="lines are"):
        rows.row_forward(x, None, line, line, 1, 2, 1e-5, False)
    for given, lines, valid in ((x.t(), line[:, :6], None), (x, line[:2], torch.ones(6) > 0)):
        with pytest.raises(RuntimeError, match="contiguous rows"):
            rows.row_forward(given, None, lines, None, 1, 2, 1e-5, False, 0.0, False, valid)
    with pytest.raises(RuntimeError, match="unknown activation"):
        gated.row_gated_forward(x, x, line[0], 1e-5, "mash", True, False)
    with pytest.raises(RuntimeError, match="lines of memory"):
        gated.row_gated_forward(x.t(), x.t(), line[0, :6], 1e-5, "silu", True, False)


@pytest.mark.parametrize("with_sum", [False, True])
def test_the_dispatcher_finds_nothing_wrong(interpreted_operators, with_sum):
    ops = interpreted_operators
    x, other, line = torch.randn(6, 8), torch.randn(6, 8), torch.randn(2, 8)
    mean, rstd, weight = torch.randn(6), torch.rand(6), torch.randn(8)
    branch, gate = (other, line) if with_sum else (None, None)
    check = torch.library.opcheck
    for lines in (line, torch.randn(6, 8), torch.randn(8)):
        check(ops.row_forward.default, (x, branch, lines, lines, 1, 2, 1e-5, False, 1.0, False, None, gate))
        given = x, branch, other, mean, rstd, lines, 1, 2, True, True, with_sum, 1.0, None, gate, branch
        check(ops.row_backward.default, given)
    check(ops.row_gated_forward.default, (x, other, weight, 1e-5, "silu", with_sum, False))
    check(ops.row_gated_backward.default, (x, x, other, rstd, weight, "gelu", with_sum, with_sum))
