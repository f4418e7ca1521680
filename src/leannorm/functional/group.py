"""Group norm and instance norm: per-channel statistics of every single sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function_variadic

from leannorm import _checks
from leannorm._types import Epilogue, Moments, Running, Valid
from leannorm.autograd import fast
from leannorm.autograd.channel import channel_affine, channel_norm, group_norm_by_torch
from leannorm.autograd.sync import Sharing
from leannorm.distributed.collective import add_up
from leannorm.functional import stock
from leannorm.functional.declare import Arguments
from leannorm.functional.door import call_operator, public, run
from leannorm.functional.running import of_channels, running_mean_and_rstd, update_running_statistics
from leannorm.functional.shards import Cut, by_channel, without_channels
from leannorm.functional.valid import (
    Lengths,
    Masking,
    exported_at_data,
    of_one_sample,
    refuse_to_export,
    unmasked,
    valid_positions,
)
from leannorm.ops.activation import lists_activations
from leannorm.ops.modes import exporting, rebuilding, sharded
from leannorm.ops.select import pick


def _group_norm(call: Arguments) -> Tensor:
    input, num_groups, eps = call["input"], call["num_groups"], call["eps"]
    _, epilogue, masking = of_channels(call)
    _checks.activation(epilogue.act)
    if exporting():
        if masking[0] is not None or masking[1] is not None:
            return stock.masked_group_norm(input, num_groups, epilogue, eps, masking)
        return stock.group_norm(input, num_groups, epilogue, eps)
    _checks.floating("input", input)
    _checks.at_least_2d(input)
    _checks.divisible_groups(input, num_groups)
    _checks.parameters(input, weight=epilogue.weight, bias=epilogue.bias)
    _checks.non_negative_eps(eps)
    # torch's rule: groups of one value are rejected only in a batch of one sample
    _checks.more_than_one_value(input, input.numel() // num_groups)
    if sharded(input, epilogue.weight, epilogue.bias):
        return _groups_of_shards(input, num_groups, epilogue, eps, masking)
    valid = valid_positions(input, *masking)
    if valid is None and (y := group_norm_by_torch(input, epilogue, eps, num_groups)) is not None:
        return y
    return channel_norm(input, epilogue, eps, num_groups, valid=valid)[0]


@public(_group_norm, F.group_norm)
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
    fill: str = "zero",
) -> Tensor:
    """Normalize each group of channels of each sample; as `torch.nn.functional.group_norm`.

        y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    E and the biased Var are over the C / `num_groups` channels of a group and all positions, of one sample;
    weight and bias are per channel. `mask`, `lengths` and `fill` are those of `batch_norm`: E and Var are
    then over the valid positions. A sample without any has mean and variance 0.

    Shapes: input (N, C, *), weight and bias (C,), mask and lengths as `batch_norm`; output as input, in the
    same memory layout.
    Dtypes: as `batch_norm`.
    Kept: the input (4 bytes per element in float32) and 16 bytes per group of a sample.
    Raises: `InputError` (a ValueError and a RuntimeError) if `num_groups` does not divide C, if a group has
    one value, if a shape, `mask` or `lengths` does not fit; `DtypeError` if a tensor is not floating.
    Source: Wu and He, 2018, arXiv:1803.08494.

    >>> import torch
    >>> from leannorm import functional as F
    >>> y = F.group_norm(torch.randn(2, 6, 4, 4), 3)
    >>> y.unflatten(1, (3, 2)).mean((2, 3, 4)).abs().max().item() < 1e-6
    True
    """
    if unmasked(mask, lengths, fill) and not has_torch_function_variadic(input, weight, bias):
        y = fast.group_norm(input, weight, bias, eps, "identity", num_groups)
        if y is not None:
            return y
    return run(group_norm, (input, num_groups, weight, bias, eps, mask, lengths, fill))


@public(_group_norm)
@lists_activations
def group_norm_act(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    act: str = "silu",
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
    fill: str = "zero",
) -> Tensor:
    """Group norm and an activation in one pass.

        y = act(group_norm(x))

    `act` is one of <activations>. Everything else is as in `group_norm`; the default follows the group norms
    of diffusion models.

    Shapes: as `group_norm`.
    Dtypes: as `batch_norm`; the result is rounded once, after the activation.
    Kept: as `group_norm`: the activation's input is recomputed from the input.
    Raises: as `group_norm`, and `InputError` if `act` is unknown.
    Source: as `group_norm`.

    >>> import torch
    >>> from leannorm import functional as F
    >>> x = torch.randn(2, 6, 4, 4)
    >>> torch.equal(F.group_norm_act(x, 3, act="relu"), F.group_norm(x, 3).relu())
    True
    """
    if unmasked(mask, lengths, fill) and not has_torch_function_variadic(input, weight, bias):
        y = fast.group_norm(input, weight, bias, eps, act, num_groups)
        if y is not None:
            return y
    return run(group_norm_act, (input, num_groups, weight, bias, eps, act, mask, lengths, fill))


def _groups_of_shards(
    input: Tensor, num_groups: int, epilogue: Epilogue, eps: float, masking: Masking
) -> Tensor:
    """The call on parts of samples, or on whole groups of channels."""
    channels, positions = input.shape[1] // num_groups, range(2, input.dim())

    def run(cut: Cut, x: Tensor, running: Running, epilogue: Epilogue, masking: Masking) -> Tensor:
        if not cut.cuts_between(1, channels):
            raise cut.refuse(f"a rank needs whole groups of {channels} channels", (1,))
        if not (unmasked(*masking) or cut.is_whole(positions)):
            raise cut.refuse("group norm with mask= or lengths= needs whole samples on each rank", positions)
        groups = x.shape[1] // channels
        if groups == 0:
            return without_channels(x, epilogue)
        sharing = cut.merged(positions, "group_norm", eps, groups)
        valid = valid_positions(x, *masking)
        return channel_norm(x, epilogue, eps, groups, valid=valid, sharing=sharing)[0]

    return by_channel(run, input, Running(None, None, None, None), epilogue, masking)


def moves_its_statistics(arguments: Arguments) -> bool:
    """Whether an instance norm called like this writes to its running statistics."""
    return bool(arguments["use_input_stats"]) and arguments["running_mean"] is not None


def _as_layer_instance_norm(arguments: Arguments) -> Any:
    x = arguments["input"]
    return call_operator("layer_instance_norm", arguments, rank=x.dim(), num_features=x.shape[1])


def _instance_norm(call: Arguments) -> Tensor:
    input, use_input_stats, eps = call["input"], call["use_input_stats"], call["eps"]
    running, epilogue, masking = of_channels(call)
    (mean, var, *_), (weight, bias, *_) = running, epilogue
    if exporting():
        _checks.running_statistics(mean, var, use_input_stats)
        if use_input_stats:
            refuse_to_export(call)
        y = stock.instance_norm(input, running, epilogue, use_input_stats, eps)
        return exported_at_data(y, *masking)
    _checks.floating("input", input)
    _checks.at_least_2d(input)
    _checks.parameters(input, running_mean=mean, running_var=var, weight=weight, bias=bias)
    _checks.running_statistics(mean, var, use_input_stats)
    _checks.non_negative_eps(eps)
    _checks.momentum(running.momentum)
    if use_input_stats:
        _checks.more_than_one_spatial_element(input)

    def of_rank(cut: Cut | None, x: Tensor, running: Running, epilogue: Epilogue, masking: Masking) -> Tensor:
        valid = valid_positions(x, *masking)
        if not use_input_stats:
            mask = None if valid is None or not valid.zero else valid.mask
            return channel_affine(x, *running_mean_and_rstd(running, eps), epilogue, mask)
        masked = valid is not None or masking[0] is not None  # even if this rank has no padding
        return _instances(cut, x, running, epilogue, eps, valid, masked)

    if sharded(input, mean, var, weight, bias):
        return by_channel(of_rank, input, running, epilogue, masking, use_input_stats)
    return of_rank(None, input, running, epilogue, masking)


@public(_instance_norm, F.instance_norm, None, moves_its_statistics, _as_layer_instance_norm)
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
    fill: str = "zero",
) -> Tensor:
    """Normalize each channel of each sample over all positions; as `torch.nn.functional.instance_norm`.

        y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    With `use_input_stats` E and the biased Var are each sample's own, and `running_mean` and `running_var`
    (unbiased), if given, are updated with their averages over the samples by `momentum`; otherwise they are
    the running ones. `mask`, `lengths` and `fill` are those of `batch_norm`; samples with fewer than two
    valid positions do not count for the running statistics.

    Shapes: input (N, C, *); weight, bias and running statistics (C,); mask and lengths as `batch_norm`;
    output as input, in the same memory layout.
    Dtypes: as `batch_norm`.
    Kept: the input (4 bytes per element in float32) and 16 bytes per channel of a sample (running statistics:
    16 bytes per channel).
    Raises: `InputError` (a ValueError and a RuntimeError) for a single position, for missing running
    statistics that are needed, and for a shape that does not fit; `DtypeError` if a tensor is not floating;
    nothing is changed then.
    Source: Ulyanov, Vedaldi and Lempitsky, 2016, arXiv:1607.08022.

    >>> import torch
    >>> from leannorm import functional as F
    >>> F.instance_norm(torch.randn(2, 3, 8, 8)).mean((2, 3)).abs().max().item() < 1e-6
    True
    """
    tensors = (input, running_mean, running_var, weight, bias)
    alone = use_input_stats and running_mean is None and running_var is None
    if alone and unmasked(mask, lengths, fill) and not has_torch_function_variadic(*tensors):
        _checks.momentum(momentum)
        quick = fast.instance_norm(input, weight, bias, eps)
        if quick is not None:
            return quick
    settings = use_input_stats, momentum, eps, mask, lengths, fill
    return run(instance_norm, (*tensors, *settings))


def _instances(
    cut: Cut | None,
    input: Tensor,
    running: Running,
    epilogue: Epilogue,
    eps: float,
    valid: Valid | None,
    masked: bool,
) -> Tensor:
    """Normalize by each sample's own statistics; a DTensor's samples, or their axis, may be sharded."""
    channels, sharing, others = input.shape[1], None, None
    whole = input.shape if cut is None else cut.shape
    if channels == 0:  # no channels, so no groups: the input is empty
        return without_channels(input, epilogue)
    if cut is not None:
        positions = range(2, input.dim())
        sharing = cut.merged(positions, "instance_norm", eps, channels)
        others = cut.merged((0,), "instance_norm", eps) if running.mean is not None else None
        if masked and not cut.is_whole(positions):
            rule = "instance norm with mask= or lengths= needs whole samples on each rank"
            raise cut.refuse(rule, positions)
    if valid is not None and others is None:
        _checks.more_than_one_valid(input, valid.total)
    y = group_norm_by_torch(input, epilogue, eps, channels) if valid is None and sharing is None else None
    if y is None:
        y, moments = channel_norm(input, epilogue, eps, channels, valid=valid, sharing=sharing)
    elif running.mean is None:
        return y
    else:
        moments = pick(input).channel_moments(input.detach(), channels)
    if running.mean is not None and moments is not None and whole.numel():
        others = None if rebuilding() else others
        update_running_statistics(running, _average(moments, input, valid, others, masked))
    return y


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


def _of_layer(call: Arguments) -> Tensor:
    return _of_batch(call, _instance_norm)


def _torchs_of_layer(**call: Any) -> Tensor:
    """A tensor subclass gets torch's function from `instance_norm`."""
    return _of_batch(call, _by_function)


def _by_function(call: Arguments) -> Tensor:
    return instance_norm(**{name: v for name, v in call.items() if name not in ("rank", "num_features")})


def _of_batch(call: Arguments, norm: Callable[[Arguments], Tensor]) -> Tensor:
    """A layer's call by the `norm` of a batch."""
    input, rank, affine = call["input"], call["rank"], call["weight"] is not None
    _checks.dim(input, (rank - 1, rank))
    if not exporting():
        _checks.instance_channels(input, input.dim() - rank + 1, call["num_features"], affine)
    if call["momentum"] is None:
        call = {**call, "momentum": 0.0}
    if input.dim() == rank:
        return norm(call)
    _checks.floating("input", input)
    mask, lengths = call.get("mask"), call.get("lengths")
    mask = None if mask is None else mask.unsqueeze(0)
    lengths = None if lengths is None else of_one_sample(lengths)
    return _by_function({**call, "input": input.unsqueeze(0), "mask": mask, "lengths": lengths}).squeeze(0)


@public(_of_layer, _torchs_of_layer, by_batch=moves_its_statistics)
def layer_instance_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    use_input_stats: bool,
    momentum: float | None,
    eps: float,
    rank: int,
    num_features: int,
    *,
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
    fill: str = "zero",
) -> Tensor:
    """What the layers call: `instance_norm`, which also checks the number of axes and of channels.

    `rank` is the number of axes of a batch; an input with one axis fewer is one sample, and its mask and
    length have one axis fewer, too.
    """
    tensors = (input, running_mean, running_var, weight, bias)
    alone = use_input_stats and running_mean is None and unmasked(mask, lengths, fill)
    if alone and not has_torch_function_variadic(*tensors):
        quick = fast.instance_norm(input, weight, bias, eps, rank, num_features)
        if quick is not None:
            return quick
    settings = use_input_stats, momentum, eps, rank, num_features, mask, lengths, fill
    return run(layer_instance_norm, (*tensors, *settings))
