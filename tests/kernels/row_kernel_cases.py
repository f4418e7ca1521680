"""One table for every backend's row kernels, and how both verbs are compared with the reference."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from cases import lay_out
from kernel_cases import SIZES
from row_cases import DTYPES

from leannorm._types import KeptByRowNorm, Rows
from leannorm.ops.backends import REFERENCE

F32, BF16 = torch.float32, torch.bfloat16
ALL = (*DTYPES, torch.float64)


class Given(NamedTuple):
    """What both verbs are called with: the axes from `start` to `stop` are normalized."""

    shape: tuple[int, ...]
    start: int
    stop: int
    dtype: torch.dtype
    rms: bool
    residual: bool

    def __str__(self) -> str:
        words = ["x".join(map(str, self.shape)), f"{self.start}:{self.stop}", str(self.dtype).split(".")[1]]
        return "-".join([*words, "rms" if self.rms else "layer"] + ["residual"] * self.residual)


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
WAYS = [(rms, residual) for rms in (False, True) for residual in (False, True)]
# rows that two programs share, rows longer than a tile, rows of neither
LONG = [
    Given(shape, 1, 2, dtype, rms, False)
    for shape in ((2, 9000), (3, 33000), (2, 3000, 3), (1, 300, 40))
    for dtype in (F32, BF16)
    for rms in (False, True)
]
# three rows, so that tiles have rows that do not exist; as lines, and side by side
_ODD = [
    Given(shape, 1, 2, BF16, rms, True)
    for n in SIZES
    for shape in ((3, n), (2, n, 3))[: 1 if n > 4096 else 2]
    for rms in (False, True)
]
ROWS = {
    "cpu": [Given(*shape, dtype, *way) for shape in SHAPES for dtype in ALL for way in WAYS] + LONG,
    "triton": _ODD + LONG,
}


def operands(shape, start, stop, dtype, rms, residual, layout="contiguous"):  # type: ignore[no-untyped-def]
    x, dy, dtotal, r = (lay_out(torch.randn(shape).to(dtype), layout) for _ in range(4))
    weight, bias = torch.randn(shape[start:stop]), None if rms else torch.randn(shape[start:stop])
    return x + 2, r if residual else None, weight, bias, dy, dtotal if residual else None


def both_ways(backend, given, start, stop, rms):  # type: ignore[no-untyped-def]
    x, residual, weight, bias, dy, dtotal = given
    rows = Rows(start, stop, 1e-5, rms)
    y, total, mean, rstd = backend.row_forward((x, residual, None, None, None, weight, bias), rows)
    grads = backend.row_backward(dy, dtotal, KeptByRowNorm(total, mean, rstd, weight), rows)
    return y, total, mean, rstd, *grads


def assert_agree(backend, given, start, stop, rms):  # type: ignore[no-untyped-def]
    """What both verbs give, which is the reference's.

    Both round the same number; their order of addition differs by a few roundings of the arithmetic.
    """
    x = given[0]
    got, want = (both_ways(b, given, start, stop, rms) for b in (backend, REFERENCE))
    kept = math.prod(x.shape[start:stop])
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
    return got
