"""What the per-channel norms compute of their arguments: every rule is checked, then one call.

The names of a function's arguments say which norm it is: `num_groups` a group norm, `use_input_stats` an
instance norm, and neither of them a batch norm. What a function does not take has its default here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leannorm import _checks
from leannorm._errors import InputError
from leannorm._types import Channels, ChannelTensors, Maybe, Moments, Pool, Running, Valid
from leannorm.autograd.channel import channel_affine, channel_evaluated, channel_norm, group_norm_by_torch
from leannorm.autograd.sync import Sharing
from leannorm.distributed.collective import add_up
from leannorm.distributed.membership import sharing_group
from leannorm.functional import stock
from leannorm.functional.declare import Arguments
from leannorm.functional.ghost import ghost_norm, of_all_ranks
from leannorm.functional.running import may_be_fused, running_mean_and_rstd, update_running_statistics
from leannorm.functional.shards import Cut, by_channel, without_channels
from leannorm.functional.valid import Masking, exported_at_data, masking_of, refuse_to_export, valid_positions
from leannorm.ops.modes import exporting, rebuilding, recorded, sharded
from leannorm.ops.plan import values_per_channel
from leannorm.ops.select import pick

AllButMask = tuple[Tensor, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe]  # of `ChannelTensors`


def normalized_channels(call: Arguments) -> Tensor:
    """The result of a call that nobody else answers."""
    get, is_layer, name = call.get, "dims" in call, "batch_norm"
    mean, size, sharing, pool = get("running_mean"), get("group_size"), get("sharing"), get("pool")
    counted = mean, get("running_var"), get("num_batches_tracked")
    tensors: Any = (call["input"], call["weight"], call["bias"], get("residual"), *counted)
    masking, groups, by_batch = masking_of(call), 0, True
    if "num_groups" in call:
        name, groups = "group_norm", call["num_groups"]
    elif "use_input_stats" in call:
        name, by_batch = "instance_norm", bool(call["use_input_stats"])
    else:
        by_batch = bool(call["training"]) or (is_layer and mean is None)
        if is_layer:
            _checks.dim(tensors[0], call["dims"])
        else:  # it does not count batches
            _checks.momentum_is_a_number(call["momentum"])
        if size is not None and by_batch:
            groups = -size
    of_batch = by_batch, get("momentum")
    norm = Channels(groups, call["eps"], get("act", "identity"), *of_batch, masking[2] == "zero")
    if exporting():
        return _exported(call, name, ChannelTensors(*tensors), norm, masking)
    if sharing is not None:
        group = sharing_group(sharing.asked)
        tracks = mean is not None
        sharing = None if group is None else sharing._replace(group=group, norm=norm, tracks=tracks)
    _check(name, tensors, norm)

    def of_rank(cut: Cut | None, tensors: AllButMask, masking: Masking) -> Tensor:
        valid = valid_positions(tensors[0], *masking)
        of = ChannelTensors(*tensors, None if valid is None else valid.mask)
        here = norm if norm.zero or valid is not None else Channels(*norm[:5])  # all is data
        if not by_batch:
            return _by_constants(of, here)
        if name == "batch_norm":
            shares = sharing if cut is None else _of_batch(cut, of, norm, sharing, pool)
            return _by_batch(of, here, valid, shares, pool)
        masked = valid is not None or masking[0] is not None  # even if this rank has no padding
        return _by_samples(cut, of, here, valid, masked)

    if not sharded(*tensors):
        return of_rank(None, tensors, masking)
    if name == "batch_norm" and by_batch and size is None:
        _checks.more_than_one_value(tensors[0], values_per_channel(tensors[0].shape))
    return by_channel(of_rank, tensors, masking, by_batch)


def _exported(
    call: Arguments, name: str, tensors: ChannelTensors, norm: Channels, masking: Masking
) -> Tensor:
    """The call in an exported graph; no size may be read."""
    sharing = call.get("sharing")
    _checks.activation(norm.act)
    if name == "group_norm":
        return stock.group_norm(tensors, norm, masking)
    if "dims" not in call:
        _checks.running_statistics(tensors.mean, tensors.var, norm.by_batch)
    if norm.by_batch:
        refuse_to_export(call)
    if sharing is not None and sharing_group(sharing.asked) is not None:
        raise InputError(
            "statistics of several ranks cannot be exported to ONNX, got a synchronized batch norm in "
            "training mode; call model.eval() first"
        )
    y = (stock.batch_norm if name == "batch_norm" else stock.instance_norm)(tensors, norm)
    return exported_at_data(y, *masking)


def _check(name: str, tensors: Any, norm: Channels) -> None:
    x, weight, bias, residual, mean, var, num_batches = tensors
    _checks.floating("input", x)
    _checks.at_least_2d(x)
    _checks.activation(norm.act)
    if name == "group_norm":
        _checks.divisible_groups(x, norm.groups)
        _checks.parameters(x, weight=weight, bias=bias)
        _checks.non_negative_eps(norm.eps)
        # torch's rule: groups of one value are rejected only in a batch of one sample
        _checks.more_than_one_value(x, x.numel() // norm.groups)
        return
    _checks.parameters(x, running_mean=mean, running_var=var, weight=weight, bias=bias)
    _checks.running_statistics(mean, var, norm.by_batch)
    _checks.momentum(norm.momentum)
    if name == "instance_norm":
        _checks.non_negative_eps(norm.eps)
        if norm.by_batch:
            _checks.more_than_one_spatial_element(x)
        return
    _checks.same_device("num_batches_tracked", num_batches, x)
    _checks.positive_eps(norm.eps)
    _checks.like_input("residual", residual, x)
    if norm.by_batch and recorded(x, weight, bias, residual):
        of_act = {} if norm.act == "identity" else {"bias": bias, "residual": residual}
        _checks.may_be_kept(input=x, weight=weight, **of_act)


def _by_constants(tensors: ChannelTensors, norm: Channels) -> Tensor:
    """Normalize by running statistics."""
    if not norm.zero:
        tensors = ChannelTensors(*tensors[:7])
    if tensors.mask is None and (y := channel_evaluated(tensors, norm)) is not None:
        return y
    constants = running_mean_and_rstd(tensors.mean, tensors.var, norm.eps)
    return channel_affine(tensors, *constants, norm)


def _of_batch(
    cut: Cut, tensors: ChannelTensors, norm: Channels, sharing: Sharing | None, pool: Pool | None
) -> Sharing | None:
    """How the statistics of a DTensor's batch are merged, of which each rank has a part."""
    positions = range(2, tensors.x.dim())
    reduced = (0, *positions)
    merged = cut.merged(reduced, "batch_norm", norm)
    if sharing is not None and (merged is not None or cut.holds_rank_of(sharing.group)):
        raise InputError(
            "the ranks of process_group may hold no parts of the same DTensor, whose statistics are "
            f"merged already, got placements {cut.placements}; take a BatchNorm, or the group of another "
            "dimension of the mesh than the input's"
        )
    size = -norm.groups
    if size and not (cut.cuts_between(0, size) and cut.is_whole(positions)):
        rule = f"batch norm with group_size={size} needs whole groups of samples on each rank"
        raise cut.refuse(rule, reduced)
    if pool is not None and not cut.is_whole((1,)):
        raise cut.refuse("accumulate_stats() needs all channels on each rank", (1,))
    return sharing if merged is None else merged._replace(tracks=tensors.mean is not None)


def _by_batch(
    tensors: ChannelTensors, norm: Channels, valid: Valid | None, sharing: Sharing | None, pool: Pool | None
) -> Tensor:
    x, of_rank = tensors.x, pool is not None and pool.of_rank
    running, count = Running(*tensors[4:7], norm.momentum), None if valid is None else valid.total
    if norm.groups:
        if valid is not None:
            _checks.no_groups_of_samples(-norm.groups)
        y, moments = ghost_norm(tensors, norm)
        update_running_statistics(running, of_all_ranks(moments, None if of_rank else sharing, x), pool)
        return y
    if valid is None and sharing is None:
        _checks.more_than_one_value(x, values_per_channel(x.shape))
    elif sharing is None:
        _checks.more_than_one_valid(x, count)
    if tensors.mean is not None and (pool is not None or valid is not None or not may_be_fused(running)):
        tensors = without_running(tensors)
    y, statistics = channel_norm(tensors, norm, sharing)
    if statistics is not None:
        if sharing is not None and of_rank:
            statistics = pick(x).channel_moments(x, mask=tensors.mask)
        if valid is not None and sharing is None and count is not None:
            statistics = Moments(statistics.mean, statistics.m2, count)
        elif valid is not None and pool is None:  # with fewer than two values the running statistics stay
            statistics = Moments(statistics.mean, statistics.m2, statistics.count * (statistics.count > 1))
        update_running_statistics(running, statistics, pool)
    return y


def _by_samples(
    cut: Cut | None, tensors: ChannelTensors, norm: Channels, valid: Valid | None, masked: bool
) -> Tensor:
    """Normalize by the statistics of each sample's groups, of which an instance norm has one a channel.

    A DTensor's samples, or their axis, may be sharded. `masked`: whether there is a mask, even if this rank
    has no padding.
    """
    x, tracks, sharing, others = tensors.x, tensors.mean is not None, None, None
    of_instances = norm.groups == 0
    if of_instances:
        norm = Channels(x.shape[1], *norm[1:])
    if cut is not None:
        name, positions = "instance_norm" if of_instances else "group_norm", range(2, x.dim())
        if not of_instances:
            channels = cut.shape[1] // norm.groups
            if not cut.cuts_between(1, channels):
                raise cut.refuse(f"a rank needs whole groups of {channels} channels", (1,))
            norm = norm._replace(groups=x.shape[1] // channels)
        if masked and not cut.is_whole(positions):
            rule = f"{name.replace('_', ' ')} with mask= or lengths= needs whole samples on each rank"
            raise cut.refuse(rule, positions)
        sharing = cut.merged(positions, name, norm)
        others = cut.merged((0,), name, norm._replace(groups=0)) if tracks else None
    if norm.groups == 0:  # no channels: the input is empty
        return without_channels(tensors)
    if of_instances and valid is not None and others is None:
        _checks.more_than_one_valid(x, valid.total)
    alone = without_running(tensors) if tracks else tensors
    y, moments = group_norm_by_torch(alone, norm) if sharing is None else None, None
    if y is None:
        y, moments = channel_norm(alone, norm, sharing)
    if tracks and (x.shape if cut is None else cut.shape).numel():
        if moments is None:
            moments = pick(x).channel_moments(x.detach(), norm.groups)
        running, others = Running(*tensors[4:7], norm.momentum), None if rebuilding() else others
        update_running_statistics(running, _average(moments, x, valid, others, masked))
    return y


def without_running(tensors: ChannelTensors) -> ChannelTensors:
    """The tensors of a call that leaves running statistics as they are."""
    return ChannelTensors(*tensors[:4], mask=tensors.mask)


def _average(
    moments: Moments, input: Tensor, valid: Valid | None, others: Sharing | None, masked: bool
) -> Moments:
    """The average of the samples' means and variances, over the ranks that share the samples.

    With a mask, of the samples that have more than one valid position.
    """
    mean, m2, count = moments.mean, moments.m2, moments.count
    if valid is None and others is None:
        return Moments(mean.mean(0), m2.mean(0), count)
    samples: Tensor = mean.new_tensor(len(input))
    if masked:
        counts = count if isinstance(count, Tensor) else mean.new_full((len(input), 1), count)
        enough = counts > 1
        samples = enough.sum()
        mean, m2 = (torch.where(enough, v, 0.0) for v in (mean, m2 / (counts - 1).clamp_min(1)))
        count = 2  # of two values, m2 is the variance
    sums = torch.cat((mean.sum(0), m2.sum(0)))
    if others is not None:
        data = input[:, 0].numel() if valid is None else valid.total
        told = sums.new_tensor([data] if input.is_cpu else [])  # otherwise the host does not know
        total = add_up((sums, told), samples, others.group, others.call("average", input))
        samples, sums, told = total[0], total[1 : 1 + len(sums)], total[1 + len(sums) :]
        if masked and told.numel():
            _checks.more_than_one_valid(input, int(told))
    mean, m2 = (sums / samples.clamp_min(1)).chunk(2)
    return Moments(mean, m2, count * (samples > 0).to(m2.dtype) if masked else count)
