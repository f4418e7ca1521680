"""A kernel that tells where a tile begins; an interpreted kernel needs a module of its own to be read."""

import triton
import triton.language as tl

from leannorm.ops.backends.triton.tiles import tile, values_before


@triton.jit(do_not_specialize=("t", "C", "inner", "samples"))
def probe(found, t, C, inner, samples, COLUMNS: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr):  # noqa: N803
    t = tl.program_id(0).to(tl.int64) + t
    segment = tl.program_id(0).to(tl.int64)
    start, _, _ = tile(t, segment, BC, C, C, inner, samples, COLUMNS, 16, False, BC, BE)
    tl.store(found, start)
    tl.store(found + 1, values_before(t, inner, samples, COLUMNS, BE))
