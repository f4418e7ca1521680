"""Shapes to integers: how a tensor is viewed as (outer, kept, inner), before any tensor is touched.

Both families read the same three numbers. Per channel: statistics of each `kept` index, over outer and
inner. Per row: statistics over `kept`, one for each (outer, inner).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Plan(NamedTuple):
    """A tensor's shape folded to three axes. Its product is the number of elements."""

    outer: int
    kept: int
    inner: int


def channel_plan(shape: Sequence[int], groups: int = 0) -> Plan:
    """Fold (N, C, *) for per-channel statistics.

    `groups=0` keeps the channel (batch norm); `groups=G` keeps each (sample, group) of C/G channels
    (group norm; instance norm is G = C); `groups=-B` keeps each channel of every B samples (ghost batch
    norm).
    """
    n, c, inner = shape[0], shape[1], prod(shape[2:])
    if groups == 0:
        return Plan(n, c, inner)
    if groups < 0:
        return Plan(-groups, n // -groups * c, inner)
    return Plan(1, n * groups, c // groups * inner)


def statistics_shape(shape: Sequence[int], groups: int = 0) -> tuple[int, ...]:
    """Shape of the per-channel statistics: (C,), (N, groups) per sample, or (N / B, C) for -B."""
    if groups < 0:
        return (shape[0] // -groups, shape[1])
    return (shape[1],) if groups == 0 else (shape[0], groups)


def values_per_channel(shape: Sequence[int]) -> int:
    """How many values of an (N, C, *) tensor each channel's statistics cover."""
    return shape[0] * prod(shape[2:])


def row_plan(shape: Sequence[int], start: int, stop: int) -> Plan:
    """Fold a tensor whose axes start..stop-1 are normalized together."""
    return Plan(prod(shape[:start]), prod(shape[start:stop]), prod(shape[stop:]))


def row_statistics_shape(shape: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Shape of the per-row statistics: the input's, with 1 for every normalized axis."""
    return (*shape[:start], *(1,) * (stop - start), *shape[stop:])
