"""The formulas of `ops/running.py` and `ops/sums.py` for blocks of channels: some KB, one launch each."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _moved(start, end, weight):
    """torch.lerp, from the nearer end."""
    return tl.where(
        tl.abs(weight) < 0.5, tl.fma(weight, end - start, start), tl.fma(weight - 1, end - start, end)
    )


@triton.jit
def _end(start, value, weight):
    """The new value of a running statistic, computed in float32 (float64 if it is float64), in its dtype."""
    dtype: tl.constexpr = tl.float64 if start.dtype == tl.float64 else tl.float32
    one = tl.zeros(start.shape, dtype)
    return _moved(start.to(dtype), value.to(dtype), one + weight.to(dtype)).to(start.dtype)


@triton.jit
def _spoils(start, value, weight):
    """Whether the batch's value is not finite, or the statistic would no longer be."""
    inf: tl.constexpr = float("inf")
    end = _end(start, value, weight).to(tl.float64)
    lost = (tl.abs(start.to(tl.float64)) < inf) & ~(tl.abs(end) < inf)
    return (lost | ~(tl.abs(value) < inf)).to(tl.int32)


@triton.jit(do_not_specialize=["count", "mean_stride", "var_stride", "C"])
def move_running_kernel(
    running_mean, running_var, batches, momentum, momentum_rest, mean, m2, count, total_count,
    mean_stride, var_stride, C, BLOCK: tl.constexpr,
):  # fmt: skip
    """All statistics are updated, or none. In one program, since it increments the counter `batches` that may
    give the weight. 32 bytes per channel, 24 of them twice, the second time from the cache."""
    if total_count is None:
        values = count.to(tl.float64)
    else:
        values = tl.load(total_count)
    weight = values * 0
    if momentum is not None:
        weight = weight + momentum + momentum_rest
    elif batches is not None:
        weight = 1 / (tl.load(batches) + 1).to(tl.float64)
    degrees = tl.where(values > 2, values - 1, 1.0)
    spoiled = tl.zeros((BLOCK,), tl.int32)
    for c0 in range(0, C, BLOCK):
        c = (c0 + tl.arange(0, BLOCK)).to(tl.int64)
        inside = c < C
        value = tl.load(mean + c, mask=inside, other=0.0)
        spoiled |= _spoils(tl.load(running_mean + c * mean_stride, mask=inside, other=0.0), value, weight)
        variance = tl.load(m2 + c, mask=inside, other=0.0) / degrees
        spoiled |= _spoils(tl.load(running_var + c * var_stride, mask=inside, other=0.0), variance, weight)
    moves = (tl.max(spoiled, 0) == 0) & (values > 0)  # an empty batch updates nothing, not even the counter
    if moves:
        for c0 in range(0, C, BLOCK):
            c = (c0 + tl.arange(0, BLOCK)).to(tl.int64)
            inside = c < C
            value = tl.load(mean + c, mask=inside, other=0.0)
            at = running_mean + c * mean_stride
            tl.store(at, _end(tl.load(at, mask=inside, other=0.0), value, weight), mask=inside)
            variance = tl.load(m2 + c, mask=inside, other=0.0) / degrees
            at = running_var + c * var_stride
            tl.store(at, _end(tl.load(at, mask=inside, other=0.0), variance, weight), mask=inside)
    if batches is not None:
        seen = tl.load(batches)
        tl.debug_barrier()  # every warp has read it
        tl.store(batches, seen + moves.to(tl.int64))


@triton.jit(do_not_specialize=["mean_stride", "var_stride", "C"])
def constants_kernel(
    running_mean, running_var, mean, rstd, mean_stride, var_stride, C, EPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Mean and rstd of evaluation in float64, from running statistics of any dtype."""
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    value = tl.load(running_mean + c * mean_stride, mask=inside, other=0.0).to(tl.float64)
    variance = tl.load(running_var + c * var_stride, mask=inside, other=0.0).to(tl.float64)
    tl.store(mean + c, value, mask=inside)
    tl.store(rstd + c, 1 / tl.sqrt(variance + EPS), mask=inside)


@triton.jit
def _leading_bits(v):
    """The 12 leading bits (`ops/sums.py`): Veltkamp's split, rounded after every operation."""
    shifted = v * 2199023255553.0
    lead = shifted - (shifted - v)
    return tl.where(tl.abs(lead) < float("inf"), lead, v)


@triton.jit
def _if_finite(lead, rest):
    """The rest to add to the leading bits: 0 if these are infinite or NaN."""
    return tl.where(tl.abs(lead) < float("inf"), rest, 0.0)


@triton.jit(do_not_specialize=["count", "C"])
def sums_kernel(mean, m2, sums, count, C, BLOCK: tl.constexpr):
    """The sums of `sums_of`, four for each channel."""
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    n = count.to(tl.float64)
    value = tl.load(mean + c, mask=inside, other=0.0)
    lead = _leading_bits(value)
    rest = _if_finite(lead, value - lead)
    n_lead, n_rest = n * lead, n * rest
    square_rest = tl.load(m2 + c, mask=inside, other=0.0) + rest * (n_rest + 2 * n_lead)
    tl.store(sums + c, n_lead, mask=inside)
    tl.store(sums + C + c, n_rest, mask=inside)
    tl.store(sums + 2 * C + c, n_lead * lead, mask=inside)
    tl.store(sums + 3 * C + c, square_rest, mask=inside)


@triton.jit(do_not_specialize=["t", "u", "asked", "count", "one", "both", "size"])
def message_kernel(
    message, first, second, t, u, asked, count, one, both, size, HEADER: tl.constexpr, BLOCK: tl.constexpr
):
    """Header and sums of `message_of`; `one` and `both` are the lengths of the first sums and of all."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = i - HEADER
    value = tl.load(first + at, mask=(at >= 0) & (at < one), other=0.0)
    if second is not None:
        value = tl.where(
            at < one, value, tl.load(second + (at - one), mask=(at >= one) & (at < both), other=0.0)
        )
    t, u = t.to(tl.float64), u.to(tl.float64)
    value = tl.where(i == 0, 1.0, value)
    value = tl.where(i == 1, t, tl.where(i == 2, t * t, value))
    value = tl.where(i == 3, u, tl.where(i == 4, u * u, value))
    value = tl.where(i == 5, asked.to(tl.float64), tl.where(i == 6, count.to(tl.float64), value))
    tl.store(message + i, value, mask=i < size)


@triton.jit(do_not_specialize=["C"])
def moments_kernel(total, mean, m2, rstd, count, C, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """Mean, M2, rstd and count of the union of the sets whose count and sums add up to `total`."""
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    values = tl.load(total)
    n = tl.where(values < 1, 1.0, values)
    sums = total + 1 + c
    n_lead = tl.load(sums, mask=inside, other=0.0)
    n_rest = tl.load(sums + C, mask=inside, other=0.0)
    square_lead = tl.load(sums + 2 * C, mask=inside, other=0.0)
    square_rest = tl.load(sums + 3 * C, mask=inside, other=0.0)
    lead = _leading_bits((n_lead + n_rest) / n)
    n_merged = n * lead
    n_left = (n_lead - n_merged) + n_rest  # small, because the leading part is subtracted first
    left = n_left / n
    square = square_rest + ((square_lead - n_merged * lead) - n_left * (left + 2 * lead))
    square = tl.where(square < 0, 0.0, square)  # NaN stays
    tl.store(mean + c, lead + _if_finite(lead, left), mask=inside)
    tl.store(m2 + c, square, mask=inside)
    tl.store(rstd + c, 1 / tl.sqrt(square / n + EPS), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(count, values)


@triton.jit(do_not_specialize=["C"])
def means_kernel(total, weight, count, p, q, C, BLOCK: tl.constexpr):
    """p and q of the input gradient from `total`: one value that is not read, and the two sums."""
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    values = tl.load(count)
    n = tl.where(values < 1, 1.0, values)
    dz = tl.load(total + 1 + c, mask=inside, other=0.0)
    dz_xhat = tl.load(total + 1 + C + c, mask=inside, other=0.0)
    if weight is not None:
        w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float64)
        dz *= w
        dz_xhat *= w
    tl.store(p + c, dz / n, mask=inside)
    tl.store(q + c, dz_xhat / n, mask=inside)
