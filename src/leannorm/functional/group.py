"""Group norm and instance norm: per-channel statistics of every single sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function_variadic

from leannorm import _checks
from leannorm.autograd import fast
from leannorm.functional.channels import normalized_channels
from leannorm.functional.declare import Arguments
from leannorm.functional.door import call_operator, public, run
from leannorm.functional.valid import Lengths, of_one_sample
from leannorm.ops.activation import lists_activations
from leannorm.ops.modes import exporting


@public(normalized_channels, F.group_norm)
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
    plain = mask is None and lengths is None and fill == "zero"
    if plain and not has_torch_function_variadic(input, weight, bias):
        tensors = input, weight, bias, None, None, None, None, None
        y = fast.group_norm(tensors, (num_groups, eps, "identity", True, None, True, False))
        if y is not None:
            return y
    return run(group_norm, (input, num_groups, weight, bias, eps, mask, lengths, fill))


@public(normalized_channels)
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
    plain = mask is None and lengths is None and fill == "zero"
    if plain and not has_torch_function_variadic(input, weight, bias):
        tensors = input, weight, bias, None, None, None, None, None
        y = fast.group_norm(tensors, (num_groups, eps, act, True, None, True, False))
        if y is not None:
            return y
    return run(group_norm_act, (input, num_groups, weight, bias, eps, act, mask, lengths, fill))


def moves_its_statistics(arguments: Arguments) -> bool:
    """Whether an instance norm called like this writes to its running statistics."""
    return bool(arguments["use_input_stats"]) and arguments["running_mean"] is not None


def _as_layer_instance_norm(arguments: Arguments) -> Any:
    x = arguments["input"]
    return call_operator("layer_instance_norm", arguments, rank=x.dim(), num_features=x.shape[1])


@public(normalized_channels, F.instance_norm, None, moves_its_statistics, _as_layer_instance_norm)
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
    plain = mask is None and lengths is None and fill == "zero"
    if alone and plain and not has_torch_function_variadic(*tensors):
        _checks.momentum(momentum)
        quick = fast.instance_norm(input, weight, bias, eps)
        if quick is not None:
            return quick
    settings = use_input_stats, momentum, eps, mask, lengths, fill
    return run(instance_norm, (*tensors, *settings))


def _of_layer(call: Arguments) -> Tensor:
    return _of_batch(call, normalized_channels)


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
    plain = mask is None and lengths is None and fill == "zero"
    if plain and use_input_stats and running_mean is None and not has_torch_function_variadic(*tensors):
        quick = fast.instance_norm(input, weight, bias, eps, "identity", rank, num_features)
        if quick is not None:
            return quick
    settings = use_input_stats, momentum, eps, rank, num_features, mask, lengths, fill
    return run(layer_instance_norm, (*tensors, *settings))
