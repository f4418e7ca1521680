"""The outputs of norms from their statistics, with what follows them: what one program does
(`as_torch.py`)."""

from __future__ import annotations

import triton
import triton.language as tl

from leannorm.ops.backends.triton.activations import activate
from leannorm.ops.backends.triton.channel_kernels import SIZES
from leannorm.ops.backends.triton.tiles import block_of_channels, constants, read, run_of_tiles, tile


@triton.jit(do_not_specialize=SIZES)
def channel_as_torch_kernel(
    x, residual, y, mean, rstd, weight, bias, C, inner, samples, tiles, parts, G,
    ACT: tl.constexpr, COLUMNS: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr,
    BC: tl.constexpr, BE: tl.constexpr, DOUBLE: tl.constexpr, STAGES: tl.constexpr, OWN: tl.constexpr,
    SIGNED: tl.constexpr,
):  # fmt: skip
    """y = act(norm(x) + residual), rounded after each step: reads x (and residual) once, writes y once.

    The norm is torch's, or leannorm's OWN (`tiles.normalized`). SIGNED: the activation of -0.0 is -0.0.
    """
    stored: tl.constexpr = y.dtype.element_ty
    c0, _part, segment, t0, t1 = run_of_tiles(C, inner, samples, tiles, parts, COLUMNS, BC, BE)
    c, exists, place = block_of_channels(segment, c0, C, G, BC)
    high, low, rstd_of, w, b = constants(mean, rstd, weight, bias, c, exists, place, DOUBLE)
    for t in tl.range(t0, t1, num_stages=STAGES):
        start, offsets, inside = tile(t, segment, c0, C, C, inner, samples, COLUMNS, V, WIDE, BC, BE)
        z = read(x, start, offsets, inside, DOUBLE) - high
        if OWN:
            z = tl.fma((z - low) * rstd_of, w, b)
        else:
            z = tl.fma(w * z, rstd_of, b)
        if residual is not None:
            z = z.to(stored).to(z.dtype) + read(residual, start, offsets, inside, DOUBLE)
        before = z.to(stored).to(z.dtype)
        z = activate(before, ACT)
        if ACT != "identity":
            z = tl.where(before == 0, before if SIGNED else 0.0, z)
        tl.store(y + start + offsets, z.to(stored), mask=inside)


@triton.jit(do_not_specialize=["rows", "inner", "outer_step", "inner_step"])
def row_as_torch_kernel(
    x, y, mean, rstd, weight, bias, rows, inner, outer_step, inner_step,
    V: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """y = norm(x), stored in the dtype of y: reads x once, writes y once.

    In x, `inner` rows are `inner_step` values apart, and blocks of them `outer_step`; y is contiguous.
    """
    dtype: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    begin = row // inner * (outer_step // V * V) + row % inner * (inner_step // V * V)
    scale = tl.load(rstd + row, mask=row < rows, other=0.0).to(dtype)
    shift = tl.load(mean + row, mask=row < rows, other=0.0).to(dtype)
    for k0 in range(0, KEPT, BLOCK):
        k = k0 + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (k < KEPT)
        z = scale * (tl.load(x + begin + k, mask=inside, other=0.0).to(dtype) - shift)
        if weight is not None:
            w = tl.load(weight + k, mask=k < KEPT, other=0.0).to(dtype)
            if bias is not None:
                z = tl.fma(w, z, tl.load(bias + k, mask=k < KEPT, other=0.0).to(dtype))
            else:
                z = w * z
        elif bias is not None:
            z = z + tl.load(bias + k, mask=k < KEPT, other=0.0).to(dtype)
        tl.store(y + row * KEPT + k, z.to(y.dtype.element_ty), mask=inside)
