"""The small records that are passed between packages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Maybe = Tensor | None
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


class Running(NamedTuple):
    """Running statistics, the number of batches if it is counted, and momentum (None: 1 / that number)."""

    mean: Tensor | None
    var: Tensor | None
    num_batches: Tensor | None
    momentum: float | None


class Pool:
    """Statistics of several batches, merged on the device; copies and pickles of a layer have none.

    `counts` are the numbers of batches and of values per channel; everything is float64. `of_rank`: whether
    they are of this rank's values alone, though the layer shares its statistics with other ranks.
    """

    def __init__(self, channels: int, device: torch.device, of_rank: bool = False) -> None:
        self.counts, self.mean, self.m2 = (
            torch.zeros(n, dtype=torch.float64, device=device) for n in (2, channels, channels)
        )
        self.used, self.of_rank = False, of_rank

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


class Channels(NamedTuple):
    """A per-channel norm: whose statistics it takes, and what it does with the normalized values.

    `groups` is 0 for statistics of each channel, G for those of each sample's G groups of channels, -B for
    those of each channel of every B samples. `by_batch`: whether they are the input's, to which running ones
    move by `momentum` (None: 1 / the number of batches); otherwise they are the running ones, as constants.
    `zero`: whether results are 0 where there is no data; otherwise that is normalized too, by the statistics
    of the data. `outside`: whether eps is added to the root and not below it.
    """

    groups: int = 0
    eps: float = 0.0
    act: str = "identity"
    by_batch: bool = True
    momentum: float | None = None
    zero: bool = True
    outside: bool = False


class ChannelTensors(NamedTuple):
    """What a per-channel norm takes: act(norm(x) * weight + bias + residual).

    Then the running statistics, the number of batches if it is counted, and the mask: bool, (N, positions of
    a sample), contiguous, True at data; None if all of the input is data.
    """

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    mean: Tensor | None = None
    var: Tensor | None = None
    num_batches: Tensor | None = None
    mask: Tensor | None = None


class KeptByChannelNorm(NamedTuple):
    """What a per-channel norm keeps: its backward pass reads it, and its output can be computed from it
    again.

    The output is kept if the derivative of the activation is computed from it. `size` is the number of values
    behind each statistic, if the shape of x does not determine it. What the gradients do not need is None.
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
    norm: Channels = Channels()


def kept_of(tensors: ChannelTensors, mean: Tensor, rstd: Tensor, norm: Channels) -> KeptByChannelNorm:
    """The record of a norm that is about to be computed."""
    x, weight, bias, residual, *_, mask = tensors
    return KeptByChannelNorm(x, mean, rstd, weight, bias, residual, None, mask, None, norm)


class Valid(NamedTuple):
    """Which positions of an input are data; values at the others never enter a statistic.

    `mask` is that of `ChannelTensors`. `total` is the number of positions that are data; None if only the
    device knows it.
    """

    mask: Tensor
    total: int | None


class Rows(NamedTuple):
    """A row norm: which axes it normalizes, start..stop-1, and how.

    `weight_offset` is added to the weight. `cast_before`: whether the normalized value is rounded to the
    input's dtype before it is multiplied by the weight. `act` is the activation of a gate that the input or
    the normalized value is multiplied by; None if there is no such gate.
    """

    start: int
    stop: int
    eps: float
    rms: bool
    weight_offset: float = 0.0
    cast_before: bool = False
    act: str | None = None
    norm_before_gate: bool = True


class RowTensors(NamedTuple):
    """What a row norm takes: norm(x + gate * residual) * weight + bias, then times 1 + scale, plus shift.

    Gate, scale and shift have some of the input's leading axes, each of its size or 1, then the normalized
    shape; over the other axes they are broadcast. The gate of `Rows.act` has the input's shape.
    """

    x: Tensor
    residual: Tensor | None = None
    gate: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


class KeptByRowNorm(NamedTuple):
    """What layer and RMS norm keep; with a residual `x` is the sum. Rows outside of `valid` are not data.

    The residual is kept for the gate's gradient. The scale, and with it the bias, are the function's: for a
    verb they are part of the weight, which then has lines.
    """

    x: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None = None
    valid: Tensor | None = None
    gate: Tensor | None = None
    residual: Tensor | None = None
    scale: Tensor | None = None
    bias: Tensor | None = None


class KeptByGatedNorm(NamedTuple):
    """What a gated RMS norm keeps."""

    x: Tensor
    gate: Tensor
    rstd: Tensor
    weight: Tensor | None = None


@dataclass(frozen=True)
class Moments:
    """Statistics of a set of values, in the form that merges without cancellation.

    `mean` and `m2` (sum of squared deviations from the mean) have one shape, with one entry per statistic;
    `count` is the number of values behind each entry: an int, or a float64 tensor where it is only
    known on the device (ranks that have different numbers of samples).
    """

    mean: Tensor
    m2: Tensor
    count: int | Tensor
