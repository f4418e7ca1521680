"""The per-row C++ kernels against the reference: odd sizes, layouts, dtypes, threads, instruction sets."""

import os
import subprocess
import sys

import pytest
import torch
from row_cases import DTYPES, RowCase, lay_out, ours

from leannorm import functional
from leannorm.ops import select
from leannorm.ops.backends import BACKENDS, CPU, REFERENCE

pytestmark = pytest.mark.skipif(bool(CPU.why_not()), reason="; ".join(CPU.why_not()))

SIZES = (1, 7, 8, 15, 16, 17, 4095, 4097)
SHAPES = [
    *[((3, n), 1, 2) for n in SIZES],
    *[((n, 3), 1, 2) for n in SIZES],
    *[((2, 5, n), 1, 2) for n in SIZES],
    *[((2, n, 5), 1, 2) for n in SIZES],
    ((2, 3, 5, 7), 1, 3),
    ((2, 3, 5, 7), 0, 4),
    ((2, 96, 14, 14), 1, 2),
    ((300, 24), 1, 2),
]
ALL = (*DTYPES, torch.float64)


def operands(shape, start, stop, dtype, rms, residual, layout="contiguous"):
    x, dy, dtotal, r = (lay_out(torch.randn(shape).to(dtype), layout) for _ in range(4))
    weight, bias = torch.randn(shape[start:stop]), None if rms else torch.randn(shape[start:stop])
    return x + 2, r if residual else None, weight, bias, dy, dtotal if residual else None


def both_ways(backend, given, start, stop, rms):
    x, residual, weight, bias, dy, dtotal = given
    y, total, mean, rstd = backend.row_forward(x, residual, weight, bias, start, stop, 1e-5, rms)
    grads = backend.row_backward(dy, dtotal, total, mean, rstd, weight, start, stop, rms)
    return y, total, mean, rstd, *grads


def assert_agree(got, want, x, kept):
    """Both round the same number; their order of addition differs by a few roundings of the arithmetic."""
    arithmetic = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if g is None:
            continue
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        if g.numel():
            # kept = 1 leaves of a row's gradient only the rounding of rstd (up to 316) times dy
            scale = max(w.abs().max().item(), 316.0 if kept == 1 else 0.0)
            rounding = torch.finfo(g.dtype).eps + 32 * arithmetic
            assert (g.double() - w.double()).abs().max().item() <= rounding * scale


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize(("shape", "start", "stop"), SHAPES, ids=str)
def test_agrees_with_the_reference(shape, start, stop, dtype, rms):
    for residual in (False, True):
        given = operands(shape, start, stop, dtype, rms, residual)
        got, want = (both_ways(b, given, start, stop, rms) for b in (CPU, REFERENCE))
        kept = torch.Size(shape[start:stop]).numel()
        assert_agree(got, want, given[0], kept)


@pytest.mark.parametrize("layout", ["channels_last", "sliced", "offset", "transposed", "expanded"])
@pytest.mark.parametrize("start", [1, 2, 3])
def test_layouts(layout, start):
    given = operands((3, 6, 4, 5), start, start + 1, torch.float32, False, True, layout)
    other = operands((3, 6, 4, 5), start, start + 1, torch.float32, False, True)
    mixed = (*given[:4], *other[4:])  # gradients that lie in another layout than the input
    for operand in (given, mixed):
        got, want = (both_ways(b, operand, start, start + 1, False) for b in (CPU, REFERENCE))
        assert_agree(got, want, operand[0], 2)
        assert got[0].stride() == torch.empty_like(operand[0]).stride()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1000, 33), (7, 4097), (4, 96, 40, 20), (2, 20, 1100)], ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(shape, dtype, layout):
    if len(shape) != 4 and layout == "channels_last":
        pytest.skip("four axes")
    given, before = operands(shape, 1, 2, dtype, False, True, layout), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(both_ways(CPU, given, 1, 2, False))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("inner", [(), (6, 6)], ids=["lines", "panels"])
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("scale", [1e30, 1e-30, 1.0])
def test_hard_rows_stand_beside_easy_ones(scale, rms, inner):
    """Each of: values without a float32 square, a constant, zeros, a far first value, plain noise."""
    rows = torch.randn(5, 40, *inner)
    rows[0] *= scale
    rows[1], rows[2] = 3.0, 0.0
    rows[3, :20] += 1e4
    case = RowCase(tuple(rows.shape), (40,), 1)
    with select.use_backend("reference"):
        want = ours(rows.double(), case, None, None, 1e-12, rms)
    got = ours(rows, case, None, None, 1e-12, rms)
    limit = 8 * torch.finfo(torch.float32).eps * want.abs().amax(1, keepdim=True).clamp_min(1e-3)
    assert ((got.double() - want).abs() <= limit).all()


def test_not_a_number_stays_in_its_row():
    for shape in ((4, 40), (4, 40, 6)):
        x = torch.randn(shape)
        x[1, 3] = float("nan")
        y = functional.layer_norm(x, (40,), dim=1)
        bad = y.isnan().flatten(1).any(1)
        assert bad.tolist() == [False, True, False, False]


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (2, 0, 3), (0, 4, 2)], ids=str)
def test_nothing_in_nothing_out(shape):
    given = operands(shape, 1, 2, torch.float32, False, True)
    for g, w in zip(*(both_ways(b, given, 1, 2, False) for b in (CPU, REFERENCE)), strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("rms", [False, True])
def test_opcheck(rms):
    x, residual, weight, bias, dy, _ = operands((2, 6, 3, 3), 1, 2, torch.float32, rms, True)
    ops = torch.ops.leannorm
    for x_, r in (
        (x, None),
        (x, residual),
        (x.to(memory_format=torch.channels_last), None),
        (x[..., ::2], None),
    ):
        torch.library.opcheck(ops.row_forward, (x_, r, weight, bias, 1, 2, 1e-5, rms))
        _, _, mean, rstd = ops.row_forward(x_, r, weight, bias, 1, 2, 1e-5, rms)
        for wanted in (True, False):
            gradient = dy[..., : x_.shape[3]]
            torch.library.opcheck(
                ops.row_backward, (gradient, None, x_, mean, rstd, weight, 1, 2, rms, wanted)
            )


@pytest.mark.parametrize("isa", ["base", "v3"])
def test_every_instruction_set(isa):
    """The kernels for older machines, in a process of their own: the choice is made once."""
    if os.environ.get("LEANNORM_ISA"):
        pytest.skip("this is that process")
    here = os.path.abspath(__file__)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", here]
    chosen = ["-k", "(agrees and (3-17 or 17 or 14)) or hard or layouts"]
    done = subprocess.run(
        [*command, *chosen], env={**os.environ, "LEANNORM_ISA": isa}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("cache", [0, 1 << 40], ids=["past", "into"])
def test_the_way_to_memory_changes_no_bit(cache):
    """Large outputs past the caches or into them, in processes of their own: the bits of small ones."""
    done = subprocess.run(
        [sys.executable, "-c", LARGE], env={**os.environ, "LEANNORM_CACHE": str(cache)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]


LARGE = """
import torch
from leannorm.ops.backends import CPU

weight, bias = torch.randn(64), torch.randn(64)
for dtype in (torch.float32, torch.float64, torch.bfloat16):
    for shape in ((40000, 64), (10, 64, 4096)):  # lines, panels
        x, dy, more = (torch.randn(shape).to(dtype) for _ in range(3))
        for residual in (None, more):
            args = 1, 2, 1e-5, False
            y, total, mean, rstd = CPU.row_forward(x, residual, weight, bias, *args)
            kept = x if residual is None else total
            dx, *_ = CPU.row_backward(dy, residual, kept, mean, rstd, weight, 1, 2, False)
            for part in torch.arange(len(x)).chunk(10):
                add = None if residual is None else residual[part]
                y_, _, *statistics = CPU.row_forward(x[part], add, weight, bias, *args)
                dx_, *_ = CPU.row_backward(dy[part], add, kept[part], *statistics, weight, 1, 2, False)
                assert torch.equal(y[part], y_) and torch.equal(dx[part], dx_)
"""


def test_auto_takes_the_kernels_and_a_named_backend_is_obeyed():
    x = torch.randn(4, 8)
    assert next(name for name, why in select.backends(x).items() if not why) == "cpu"
    assert set(BACKENDS) >= {"cpu", "reference"}
    with select.use_backend("cpu"):
        kernels = functional.layer_norm(x, (8,))
    with select.use_backend("reference"):
        plain = functional.layer_norm(x, (8,))
    torch.testing.assert_close(kernels, plain)
