"""The small records that travel between rooms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

# running mean and variance, the number of batches if it is counted, momentum (None: 1 / that number)
Running: TypeAlias = tuple[Tensor, Tensor, Tensor | None, float | None]


@dataclass(frozen=True)
class Moments:
    """Statistics of a set of values, in the form that merges without cancellation.

    `mean` and `m2` (sum of squared deviations from the mean) share one shape, one entry a statistic;
    `count` is the number of values behind each entry: an int, or a float64 tensor where it is only
    known on the device (ranks that hold different numbers of samples).
    """

    mean: Tensor
    m2: Tensor
    count: int | Tensor
