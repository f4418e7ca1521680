"""What a sum begins with, and its rounding to the dtype that is stored."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded_for(pointer, value):
    """The value in the pointer's dtype; float64 goes to 16 bits by way of float32, as in torch."""
    if pointer.dtype.element_ty == tl.float64:
        result = value.to(tl.float64)
    else:
        result = value.to(tl.float32).to(pointer.dtype.element_ty)
    return result


@triton.jit
def zeros(rows: tl.constexpr, columns: tl.constexpr, dtype: tl.constexpr):
    """Zeros of the shape of a tile, or of its rows alone, for sums."""
    if columns is None:
        return tl.zeros((rows,), dtype)
    else:
        return tl.zeros((rows, columns), dtype)
