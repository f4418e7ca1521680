"""Rows of a view, such as the heads of q, k and v in a projection: where each begins, without a copy."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from torch import Tensor

from leannorm.ops.backends.triton.row_tiles import vector

_SHORT = 2048  # values of a row that certainly fits into a tile, forward and backward


class View(NamedTuple):
    """The rows of several tensors of one shape, as three axes: the sizes of the two inner ones, and the
    steps.

    For each tensor the steps (far, mid, near) between rows; None if its rows follow each other.
    """

    near: int | None
    mid: int | None
    steps: tuple[tuple[int, int, int] | None, ...]

    def arguments(self, tensors: int) -> tuple[int | None, ...]:
        """The form that the kernels take."""
        none = (None, None, None)
        steps = self.steps or (None,) * tensors
        return (self.near, self.mid, *(v for of_one in steps for v in of_one or none))


NO_VIEW = View(None, None, ())


def _is_line(t: Tensor, start: int) -> bool:
    """Whether the axes from `start` on are contiguous."""
    expected = 1
    for size, step in zip(reversed(t.shape[start:]), reversed(t.stride()[start:]), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def view_of(start: int, stop: int, *tensors: Tensor) -> View | None:
    """None if no tensor needs it, or if steps cannot express it: tensors must then be dense and alike."""
    first = tensors[0]
    rows, kept = prod(first.shape[:start]), prod(first.shape[start:])
    dtype, alike = first.dtype, all(t.is_contiguous() for t in tensors)
    if alike or stop != first.dim() or kept > _SHORT or rows >= 2**31:
        return None
    if any(t.dtype != dtype for t in tensors):
        return None
    if not all(_is_line(t, start) for t in tensors):
        return None
    axes: list[tuple[int, list[int]]] = []  # from the innermost axis
    for d in range(start - 1, -1, -1):
        size, steps = first.shape[d], [t.stride(d) for t in tensors]
        if size == 1:
            continue
        if axes and steps == [axes[-1][0] * step for step in axes[-1][1]]:
            axes[-1] = axes[-1][0] * size, axes[-1][1]
        else:
            axes.append((size, steps))
    if len(axes) > 3:
        return None
    axes += [(1, [0] * len(tensors))] * (3 - len(axes))
    (near, by_near), (mid, by_mid), (_, by_far) = axes
    divides = vector(kept, 1)
    if any(step % divides for step in (*by_near, *by_mid, *by_far)):
        return None  # loads would be narrower than the tile's
    of_each = zip(tensors, by_far, by_mid, by_near, strict=True)
    return View(near, mid, tuple(None if t.is_contiguous() else (far, m, n) for t, far, m, n in of_each))
