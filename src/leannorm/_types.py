"""The small records that travel between rooms."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Moments(NamedTuple):
    """Statistics of a set of values, in the form that merges without cancellation.

    `mean` and `m2` (sum of squared deviations from the mean) share one shape, one entry a statistic;
    `count` is the number of values behind each entry: an int, or a float64 tensor where it is only
    known on the device (ranks that hold different numbers of samples).
    """

    mean: Tensor
    m2: Tensor
    count: int | Tensor


class Grads(NamedTuple):
    """Gradients of a per-channel norm; an entry that nobody asked for is None."""

    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
