"""The small records that travel between rooms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Maybe = Tensor | None
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


class Running(NamedTuple):
    """Running statistics, the number of batches if it is counted, momentum (None: 1 / that number)."""

    mean: Tensor | None
    var: Tensor | None
    num_batches: Tensor | None
    momentum: float | None


class Pool:
    """Statistics of several batches, merged on the device; a layer's copies and pickles have none.

    `counts` are the numbers of batches and of values of a channel; all is float64. `of_rank`: of this rank's
    values alone, where the layer shares its statistics with others.
    """

    def __init__(self, channels: int, device: torch.device, of_rank: bool = False) -> None:
        self.counts, self.mean, self.m2 = (
            torch.zeros(n, dtype=torch.float64, device=device) for n in (2, channels, channels)
        )
        self.used, self.of_rank = False, of_rank

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


class Epilogue(NamedTuple):
    """What a kernel makes of the normalized values before it writes: act(xhat * weight + bias + residual)."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    act: str = "identity"


class KeptByChannelNorm(NamedTuple):
    """What a per-channel norm keeps: its backward pass reads it, and its output can be computed again of it.

    The output is kept where the derivative of `act` is computed from it. `mask` is that of `Valid`. `size`
    is the number of values that each statistic is of, where the shape of x does not tell. What the gradients
    do not need is None.
    """

    x: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    output: Tensor | None = None
    mask: Tensor | None = None
    size: Tensor | None = None
    act: str = "identity"

    def epilogue(self) -> Epilogue:
        return Epilogue(self.weight, self.bias, self.residual, self.act)


def kept_of(
    x: Tensor, mean: Tensor, rstd: Tensor, epilogue: Epilogue, mask: Maybe = None
) -> KeptByChannelNorm:
    """The record of a norm that is about to be computed."""
    weight, bias, residual, act = epilogue
    return KeptByChannelNorm(x, mean, rstd, weight, bias, residual, None, mask, None, act)


class Valid(NamedTuple):
    """Which positions of an input are data; what is at the others is never read into a statistic.

    `mask` is bool, (N, positions of a sample), contiguous. `total` are the positions that are data, in all;
    None where only the device knows. `zero`: are results 0 at the others? Else they are normalized too, by
    the statistics of the data.
    """

    mask: Tensor
    total: int | None
    zero: bool = True


class Rows(NamedTuple):
    """Which axes a row norm normalizes, start..stop-1, and how.

    `weight_offset` is added to the weight. `cast_before`: is the normalized value rounded to the dtype of the
    input before it meets the weight?
    """

    start: int
    stop: int
    eps: float
    rms: bool
    weight_offset: float = 0.0
    cast_before: bool = False


class KeptByRowNorm(NamedTuple):
    """What layer and RMS norm keep; with a residual `x` is the sum. Rows that are not `valid` are no data."""

    x: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None = None
    valid: Tensor | None = None


class Modulation(NamedTuple):
    """What a modulated norm takes beside x: norm(x + gate * branch) * (1 + scale) + shift."""

    branch: Tensor | None
    gate: Tensor | None
    scale: Tensor
    shift: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


class KeptByAdaNorm(NamedTuple):
    """What a modulated norm keeps; with a branch `x` is the sum. The branch is for the gate's gradient."""

    x: Tensor
    mean: Tensor
    rstd: Tensor
    scale: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    branch: Tensor | None = None
    gate: Tensor | None = None


class Gating(NamedTuple):
    """How a gated RMS norm meets its gate; the axes from `start` on are normalized."""

    start: int
    eps: float
    act: str
    norm_before_gate: bool
    cast_before: bool = False


class KeptByGatedNorm(NamedTuple):
    """What a gated RMS norm keeps."""

    x: Tensor
    gate: Tensor
    rstd: Tensor
    weight: Tensor | None = None


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
