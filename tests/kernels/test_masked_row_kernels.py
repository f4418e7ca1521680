"""The per-row kernels with a mask: the reference's numbers, padding is never read, all valid is no mask."""

import pytest
import torch
from row_kernel_cases import BF16, F32, operands

from leannorm._types import KeptByRowNorm, Rows
from leannorm.ops.backends import REFERENCE

NAN = float("nan")
# rows that are lines, lie side by side, are several axes, are longer than a tile
SHAPES = [
    ((5, 7, 33), 2, 3),
    ((3, 24, 50), 1, 2),
    ((2, 3, 5, 7), 2, 4),
    ((3, 9000), 1, 2),
    ((2, 3000, 3), 1, 2),
]


def masked(shape, start, stop, dtype, rms, residual, layout="contiguous"):
    """What both verbs take, NaN in the rows that are no data, and which rows are."""
    torch.manual_seed(0)
    valid = torch.rand(*shape[:start], *(1,) * (stop - start), *shape[stop:]) < 0.6
    given = operands(shape, start, stop, dtype, rms, residual, layout)
    x, r, weight, bias, dy, dtotal = given
    x, r, dy, dtotal = (None if t is None else t.masked_fill(~valid, NAN) for t in (x, r, dy, dtotal))
    return (x, r, weight, bias, dy, dtotal), valid


def both_ways(backend, given, start, stop, rms, valid):
    x, residual, weight, bias, dy, dtotal = given
    rows = Rows(start, stop, 1e-5, rms)
    y, total, mean, rstd = backend.row_forward((x, residual, None, None, None, weight, bias), rows, valid)
    grads = backend.row_backward(dy, dtotal, KeptByRowNorm(total, mean, rstd, weight, valid), rows)
    return y, total if residual is not None else None, *grads


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rms", "residual"), [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize(("shape", "start", "stop"), SHAPES, ids=str)
def test_agrees_with_the_reference(kernels, shape, start, stop, dtype, rms, residual):
    given, valid = masked(shape, start, stop, dtype, rms, residual)
    got, want = (both_ways(b, given, start, stop, rms, valid) for b in (kernels, REFERENCE))
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if g is None:
            continue
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        allowed = torch.finfo(g.dtype).eps + 32 * torch.finfo(F32).eps
        assert (g.double() - w.double()).abs().max() <= allowed * max(w.abs().max().item(), 1.0)
        if g.shape == given[0].shape:
            assert (g.masked_fill(valid, 0) == 0).all()


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize(("shape", "start", "stop"), SHAPES[:3], ids=str)
def test_all_valid_is_no_mask_bit_for_bit(kernels, shape, start, stop, layout):
    given = operands(shape, start, stop, F32, False, True, layout)
    whole = torch.ones(*shape[:start], *(1,) * (stop - start), *shape[stop:], dtype=torch.bool)
    plain, with_mask = (both_ways(kernels, given, start, stop, False, valid) for valid in (None, whole))
    assert all(map(torch.equal, plain, with_mask))


def test_no_row_is_data(kernels):
    given, valid = masked((5, 7, 33), 2, 3, F32, False, True)
    x, r, weight, bias, dy, dtotal = (torch.full_like(t, NAN) if i != 2 else t for i, t in enumerate(given))
    found = both_ways(kernels, (x, r, weight, bias, dy, dtotal), 2, 3, False, torch.zeros_like(valid))
    assert all((t == 0).all() for t in found)


@pytest.mark.parametrize(
    "valid", [torch.ones(5, 7), torch.ones(6, 7, dtype=torch.bool), torch.ones(7, 5, dtype=torch.bool).t()]
)
def test_a_kernel_refuses_a_mask_that_it_cannot_read(kernels, valid):
    x = torch.ones(5, 7, 3)
    with pytest.raises(RuntimeError, match="valid must be"):
        kernels.ops.row_forward(x, None, None, None, 2, 3, 1e-5, False, 0.0, False, valid)
