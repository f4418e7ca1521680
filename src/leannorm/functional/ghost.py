"""Ghost batch norm: statistics of groups of samples of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm import _checks
from leannorm._types import Channels, ChannelTensors, Moments
from leannorm.autograd.channel import channel_norm
from leannorm.autograd.sync import Sharing
from leannorm.distributed.collective import add_up
from leannorm.ops.backends.reference import at_least_one
from leannorm.ops.modes import rebuilding
from leannorm.ops.plan import values_per_channel
from leannorm.ops.select import pick


def ghost_norm(tensors: ChannelTensors, norm: Channels) -> tuple[Tensor, Moments]:
    """The output, and the statistics of the whole batch. The last group of samples may be smaller."""
    x, weight, bias, residual, *_ = tensors
    samples, size = x.shape[0], -norm.groups
    whole = samples - samples % size if samples > size else samples
    _checks.more_than_one_value_in_a_group(x, min(samples, size))
    if whole == samples:
        y, moments = _groups(ChannelTensors(x, weight, bias, residual), norm)
        return y, _pooled(moments)
    _checks.more_than_one_value_in_a_group(x, samples - whole)
    parts = [
        _groups(ChannelTensors(x[of], weight, bias, None if residual is None else residual[of]), norm)
        for of in (slice(whole), slice(whole, None))
    ]
    return torch.cat([y for y, _ in parts]), _pooled(*(moments for _, moments in parts))


def _groups(tensors: ChannelTensors, norm: Channels) -> tuple[Tensor, Moments]:
    """Groups of one size in one call; mean and M2 are (groups, C)."""
    x, size = tensors.x, -norm.groups
    samples, channels = x.shape[:2]
    groups = 0 if samples <= size else channels if size == 1 else -size
    y, moments = channel_norm(tensors, Channels(groups, *norm[1:]))
    assert moments is not None
    if groups == 0:
        return y, Moments(moments.mean[None], moments.m2[None], values_per_channel(x.shape))
    return y, Moments(moments.mean, moments.m2, values_per_channel(x[:size].shape))


def _pooled(*parts: Moments) -> Moments:
    """Merge several sets of groups; each part has (groups, C) of one count."""
    total = sum(part.count * part.mean.shape[0] for part in parts)
    zero = parts[0].mean.new_zeros(parts[0].mean.shape[1])
    mean = sum((part.mean.sum(0) * part.count for part in parts), zero) / at_least_one(total)
    m2 = sum((part.m2.sum(0) + (part.mean - mean).square().sum(0) * part.count for part in parts), zero)
    return Moments(mean, m2, total)


def of_all_ranks(moments: Moments, sharing: Sharing | None, x: Tensor) -> Moments:
    """The statistics of all ranks' batches, for the running statistics; a recompute updates nothing."""
    if sharing is None or not sharing.tracks or rebuilding():
        return moments
    backend, count = pick(moments.mean), moments.count
    assert isinstance(count, int)
    sums = backend.sums_of(Moments(moments.mean.detach(), moments.m2.detach(), count))
    total = add_up((sums,), count, sharing.group, sharing.call("statistics of groups", x))
    mean, m2, _, values = backend.moments_of(total, 0.0)
    return Moments(mean, m2, values)
