"""Writes in place through a view of a base: the base after them. A tensor that is no view has other nodes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leannorm.saving.graph import Layout, constant, exact, identity, in_view, kind_of, noted_in_view
from leannorm.saving.recipes.activations import IN_PLACE, step_of
from leannorm.saving.recipes.registry import ValueOf, recipe
from leannorm.saving.steps import UNFILLED, Step, is_unfilled
from leannorm.saving.values import Value


def _add(view: Tensor, other: Tensor, alpha: float) -> Tensor:
    return view.add_(other, alpha=alpha)


def _subtract(view: Tensor, other: Tensor, alpha: float) -> Tensor:
    return view.sub_(other, alpha=alpha)


_SUMS: dict[str, Callable[..., Tensor]] = {"AddBackward0": _add, "SubBackward0": _subtract}
_COPY = "CopyBackwards"


def is_sum_in_view(node: Any) -> bool:
    """Did a sum in place write into the view, where `node` is a CopySlices?"""
    written = in_view(node)
    return written is not None and kind_of(written[0]) in _SUMS


@recipe("CopySlices")
def written_in_a_view(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """An activation on a view of the whole base, such as instance norm puts out; a residual sum; a copy."""
    written = in_view(node)
    if written is None:
        noted = noted_in_view(node)
        return None if noted is None else _activation(value_of(0), *noted)
    inner, base, view = written
    kind, dtype = kind_of(inner), node._input_metadata[0].dtype
    if dtype.is_complex or inner._input_metadata[0].dtype != dtype or not _is_within(view, base):
        return None
    if kind in IN_PLACE and prod(view.shape) == prod(base.shape) and _covers(base, (view,)):
        return _activation(value_of(0), kind, tuple(constant(inner, name) for name in IN_PLACE[kind][2]))
    told = identity(inner)
    source = value_of(1) if told is not None and (kind in _SUMS or kind == _COPY) else None
    if source is None or source.spec is not None:
        return None
    before = value_of(0)
    if node.next_functions[0][0] is None or (before is not None and is_unfilled(before.step)):
        return None if kind in _SUMS else _filled(node, before, source, base, view, told)
    if before is None or before.spec is not None:
        return None
    write = (_SUMS[kind], inner._saved_alpha) if kind in _SUMS else (Tensor.copy_,)
    step_kind = "sum" if kind in _SUMS else "scale"
    step = Step(_written, (before, source), (), (*write, base, view), in_place=_overwritten, kind=step_kind)
    return step._replace(identity=told, in_any_layout=True)


def _activation(x: Value | None, kind: str, constants: tuple[Hashable, ...]) -> Step | None:
    if x is None or kind not in IN_PLACE:
        return None
    step = step_of(x, kind, constants)
    return step._replace(identity=(step.identity, kind, exact(constants)))


def _in_base(tensor: Tensor, base: Layout, view: Layout) -> Tensor:
    return tensor.as_strided(view.shape, view.stride, view.offset - base.offset + tensor.storage_offset())


def _empty(base: Layout, like: Tensor) -> Tensor:
    return torch.empty_strided(base.shape, base.stride, dtype=like.dtype, device=like.device)


def _written(x: Tensor, source: Tensor, *rest: Any) -> Tensor:
    return _overwritten(_empty(rest[-2], x).copy_(x), source, *rest)


def _overwritten(x: Tensor, source: Tensor, *rest: Any) -> Tensor:
    write, *numbers, base, view = rest
    if x.stride() != base.stride:
        return _written(x, source, *rest)
    write(_in_base(x, base, view), source, *numbers)
    return x


@recipe("AsStridedBackward0")
def view_of_what_was_written(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """A view of a base that was written to: autograd makes such a node in the place of the view's own."""
    written = in_view(node.next_functions[0][0])
    if written is not None:
        base = written[1]
        view = Layout(*(constant(node, name) for name in ("size", "stride", "storage_offset")))
        x = value_of(0) if _is_within(view, base) else None
        return None if x is None or x.spec is not None else Step(_seen, (x,), (), (base, view), kind="view")
    whole = None if like is None else like._base  # without the C++ nodes a view of all of it, both contiguous
    if like is None or whole is None or not (like.is_contiguous() and whole.is_contiguous()):
        return None
    if whole.numel() != like.numel() or whole.storage_offset() != like.storage_offset():
        return None
    x = value_of(0)
    return None if x is None else Step(torch.reshape, (x,), (), (tuple(like.shape),), kind="view")


def _seen(x: Tensor, base: Layout, view: Layout) -> Tensor:
    return _in_base(x if x.stride() == base.stride else _empty(base, x).copy_(x), base, view)


def _filled(
    node: Any, before: Value | None, source: Value, base: Layout, view: Layout, told: Hashable
) -> Step | None:
    """New memory after copies into its parts, as DeepSeek's keys are made; of no use until all is filled."""
    producer, number = node.next_functions[1]
    if producer._input_metadata[number].dtype != node._input_metadata[0].dtype:
        return None
    sources: tuple[Value, ...] = (source,)
    views: tuple[Any, ...] = (view,)
    proved = True
    if before is not None and before.step is not None:
        sources, views = (*before.step.inputs, source), (*before.step.constants[1:], view)
        told, proved = (told, before.step.identity), before.step.proved
    kind = "scale" if _covers(base, views) else UNFILLED
    step = Step(_fill, sources, (), (base, *views), kind=kind, proved=proved, identity=told)
    return step._replace(in_any_layout=True)


def _fill(*sources_and_layouts: Any) -> Tensor:
    count = len(sources_and_layouts) // 2
    sources, (base, *views) = sources_and_layouts[:count], sources_and_layouts[count:]
    whole = _empty(base, sources[0])
    for source, view in zip(sources, views, strict=True):
        _in_base(whole, base, view).copy_(source)
    return whole


def _places(layout: Layout) -> tuple[int, int]:
    """The first place in memory, and the one behind the last."""
    shape, stride, offset = layout
    return offset, offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _is_within(view: Layout, base: Layout) -> bool:
    (start, end), (first, last) = _places(view), _places(base)
    return 0 not in base.shape and 0 not in view.shape and first <= start and end <= last


@lru_cache(maxsize=256)
def _covers(base: Layout, views: tuple[Layout, ...]) -> bool:
    """Do these views of a base, which has no gaps, lie everywhere in it?"""
    first, last = _places(base)
    there = np.zeros(last - first, dtype=bool)
    for view in views:
        np.lib.stride_tricks.as_strided(there[view.offset - first :], view.shape, view.stride)[...] = True
    return last - first == prod(base.shape) and bool(there.all())
