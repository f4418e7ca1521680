"""Adds up shares of dweight and dbias, from a per-row norm's programs or a group norm's samples."""

from __future__ import annotations

import triton
import triton.language as tl

from leannorm.ops.backends.triton.rounding import rounded_for


@triton.jit(do_not_specialize=["count", "kept", "groups"])
def sum_shares(shares, dweight, dbias, count, kept, groups, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """dweight, and then dbias, of each group as the sums of `count` shares each, always in the same order.

    Reads `count` values of the statistics' dtype for each that it writes in the gradient's, in one launch.
    """
    blocks = tl.cdiv(kept, BLOCK)
    vector = tl.program_id(0) // blocks
    k = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    shares += vector.to(tl.int64) * count * kept
    sums = tl.zeros([COUNT, BLOCK], shares.dtype.element_ty)
    for begin in range(0, count, COUNT):
        at = (begin + tl.arange(0, COUNT))[:, None]
        inside = (at < count) & (k < kept)[None, :]
        sums += tl.load(shares + at.to(tl.int64) * kept + k[None, :], inside, 0.0)
    value = rounded_for(dweight, tl.sum(sums, 0))
    to = (vector % groups).to(tl.int64) * kept + k
    if dbias is None:
        tl.store(dweight + to, value, k < kept)
    else:
        tl.store(tl.where(vector < groups, dweight, dbias) + to, value, k < kept)
