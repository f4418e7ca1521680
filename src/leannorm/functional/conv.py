"""Convolution with batch norm as one function that keeps only the convolution's input."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm import _checks
from leannorm._errors import InputError
from leannorm._types import Channels, ChannelTensors, Maybe, MaybeTensor, Moments, Pool, Running
from leannorm.autograd.conv import Convolution, conv_norm, rstd_outside
from leannorm.autograd.sync import Sharing
from leannorm.functional import stock
from leannorm.functional.declare import Arguments, declare, in_training
from leannorm.functional.door import call_operator, hand_over, public
from leannorm.functional.running import running_mean_and_rstd, update_running_statistics
from leannorm.functional.shards import VECTOR, Cut, of_one_mesh
from leannorm.ops.modes import autocasts, exporting, sharded

Operands = tuple[Tensor, Tensor, Tensor | None]
Beside = tuple[Maybe, Maybe, None, Maybe, Maybe, Maybe]  # what `ChannelTensors` has next to x
EPS_MODES = ("inside", "outside")
PADDING_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def _operator(arguments: Arguments) -> Any:
    padding = arguments["padding"]
    by_name = isinstance(padding, str)
    return call_operator(
        "conv_batch_norm",
        arguments,
        weight=arguments["bn_weight"],
        bias=arguments["bn_bias"],
        stride=_each(arguments["stride"]),
        padding=[] if by_name else _each(padding),
        padding_name=padding if by_name else "",
        dilation=_each(arguments["dilation"]),
    )


def _each(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


@public(by_batch=in_training, operator=_operator)
def conv_batch_norm(
    input: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    eps_mode: str = "inside",
    num_batches_tracked: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """Convolve (1-D to 3-D), then normalize each channel over the batch, keeping no convolution output.

        z = conv(x)
        y = (z - E[z]) / sqrt(Var[z] + eps) * bn_weight + bn_bias      for eps_mode="inside"
        y = (z - E[z]) / (sqrt(Var[z]) + eps) * bn_weight + bn_bias    for eps_mode="outside"

    Var is biased for "inside"; for "outside" it is unbiased in training. The backward pass runs the
    convolution a second time. Gradients equal those of the convolution and `batch_norm` run one after the
    other, bit for bit. `num_batches_tracked`, if given, counts this batch; `momentum=None` weights it by 1 /
    that count. `pool` is for `leannorm.accumulate_stats`.

    Shapes: input (N, C, *) with 1 to 3 positions, conv_weight (D, C / groups, *), vectors (D,); output (N, D,
    *).
    Dtypes: as `batch_norm`; conv_weight has the input's dtype, and autocast casts both.
    Kept: the input (4 bytes per element in float32) and 16 bytes per output channel.
    Raises: as `batch_norm`.
    Source: "Fusing Convolution and Batch Norm using Custom Function", PyTorch tutorials.

    >>> import torch
    >>> from leannorm import functional as F
    >>> x, w = torch.randn(2, 3, 8, 8), torch.randn(5, 3, 3, 3)
    >>> F.conv_batch_norm(x, w, None, None, None, padding=1, training=True).shape
    torch.Size([2, 5, 8, 8])
    """
    tensors = (input, conv_weight, conv_bias, running_mean, running_var, bn_weight, bn_bias)
    of_conv = stride, padding, dilation, groups, padding_mode
    values = *tensors, *of_conv, training, momentum, eps, eps_mode, num_batches_tracked, pool
    if (y := hand_over(conv_batch_norm, values)) is not None:
        return y
    _checks.one_of("eps_mode", eps_mode, EPS_MODES)
    _checks.one_of("padding_mode", padding_mode, tuple(PADDING_MODES))
    norm = Channels(0, eps, "identity", training, momentum, outside=eps_mode == "outside")
    of_norm = bn_weight, bn_bias, None, running_mean, running_var
    if exporting():
        _checks.running_statistics(running_mean, running_var, training)
        x = input
        if padding_mode != "zeros":
            layout = _convolution(input, conv_weight, stride, padding, dilation, groups, padding_mode)
            x, padding = layout.padded(input), layout.padding
        z = stock.convolve(x, conv_weight, conv_bias, stride, padding, dilation, groups)
        return stock.batch_norm(ChannelTensors(z, *of_norm), norm)
    _check_convolution(input, conv_weight, conv_bias, groups)
    _checks.positive_eps(eps)
    _checks.momentum(momentum)
    if num_batches_tracked is None and running_mean is not None and training:
        _checks.momentum_is_a_number(momentum)
    vectors = "running_mean", "running_var", "bn_weight", "bn_bias"
    for name, v in zip(vectors, tensors[3:], strict=True):
        _checks.one_per_output_channel(name, v, conv_weight)
    _checks.running_statistics(running_mean, running_var, training)
    _checks.same_device("num_batches_tracked", num_batches_tracked, input)
    convolution = _convolution(input, conv_weight, stride, padding, dilation, groups, padding_mode)
    sizes = convolution.output_sizes(input, conv_weight)
    _checks.positive_output(sizes, input, conv_weight)
    count = input.shape[0] * prod(sizes)
    if training:
        _checks.more_than_one_value(input, count)

    device, autocast = input.device.type, autocasts(input)
    run = _Run(convolution, norm, count, pool, device if autocast else None)
    if autocast:
        input, conv_weight = _autocast(input, device), _autocast(conv_weight, device)
        conv_bias = _autocast(conv_bias, device)
    _checks.same_dtype("conv_weight", conv_weight, input)
    operands, beside = (input, conv_weight, conv_bias), (*of_norm, num_batches_tracked)
    if sharded(*tensors):
        return _of_shards(run, operands, beside, groups, (input.shape[0], len(conv_weight), *sizes))
    return run.output(operands, beside)


class _Run(NamedTuple):
    """One rank's call. `values`: values per channel; `autocast`: the device whose autocast is on."""

    convolution: Convolution
    norm: Channels
    values: int
    pool: Pool | None
    autocast: str | None

    def output(  # by name: torch 2.10's compiler cannot call a NamedTuple
        self, operands: Operands, beside: Beside, sharing: Sharing | None = None
    ) -> Tensor:
        weight, bias, _, running_mean, running_var, num_batches = beside
        mean = rstd = None
        norm = self.norm
        if not norm.by_batch and running_var is not None:
            mean, rstd = running_mean_and_rstd(running_mean, running_var, norm.eps)
            if norm.outside:
                rstd = rstd_outside(running_var.detach().to(rstd.dtype), norm.eps)
        with torch.autocast(self.autocast, enabled=False) if self.autocast else nullcontext():
            y, mean, m2 = conv_norm(self.convolution, operands, (weight, bias, mean, rstd), norm, sharing)
        if m2 is not None:
            running = Running(running_mean, running_var, num_batches, norm.momentum)
            update_running_statistics(running, Moments(mean, m2, self.values), self.pool)
        return y


def _of_shards(run: _Run, operands: Operands, beside: Beside, groups: int, shape: tuple[int, ...]) -> Tensor:
    """The call on parts of the batch, or with parts of the weight by output channels."""
    input, conv_weight, conv_bias = operands
    of_one_mesh(*operands, *beside)
    of_input, positions = Cut.of(input), range(1, input.dim())
    if not of_input.is_whole(positions):
        raise of_input.refuse(
            "a convolution with its batch norm takes parts of a batch (to_pair() makes two layers)",
            positions,
        )
    of_weight = Cut.of(conv_weight, range(0 if groups > 1 else 1, conv_weight.dim()))
    both = zip(of_input.axes, of_weight.axes, strict=True)
    axes = [0 if i == 0 else 1 if j == 0 else None for i, j in both]
    cut, elements = Cut(of_input.mesh, axes, torch.Size(shape)), range(input.dim())
    parts = (
        cut.local(input, [0, *(-1 for _ in positions)]),
        cut.local(conv_weight, [1, *(-1 for _ in positions)]),
        cut.local(conv_bias, VECTOR),
    )
    weight, bias, _, *running = beside
    local = cut.running(*running)
    sharing = cut.merged((0,), "conv_batch_norm", run.norm)
    y = run.output(parts, (cut.local(weight, VECTOR), cut.local(bias, VECTOR), None, *local), sharing)
    cut.write_back(running[:2], local[:2])
    return cut.whole(y, elements)


def _autocast(v: MaybeTensor, device: str) -> MaybeTensor:
    """Cast a convolution's operand as autocast does; it leaves float64 alone."""
    return v if v is None or v.dtype == torch.float64 else v.to(torch.get_autocast_dtype(device))


def _check_convolution(input: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> None:
    _checks.floating("input", input)
    _checks.floating("conv_weight", weight)
    _checks.same_device("conv_weight", weight, input)
    _checks.dim(input, (3, 4, 5))
    if groups < 1 or weight.shape[0] % groups:
        raise InputError(
            f"groups must be positive and divide the {weight.shape[0]} output channels, got {groups}"
        )
    if weight.dim() != input.dim():
        raise InputError(
            f"conv_weight must have as many axes as the input ({input.dim()}), got shape "
            f"{tuple(weight.shape)}; use the layer of the input's rank"
        )
    if weight.shape[1] * groups != input.shape[1]:
        raise InputError(
            f"the input must have {weight.shape[1] * groups} channels (conv_weight {tuple(weight.shape)}, "
            f"groups={groups}), got {input.shape[1]} in {tuple(input.shape)}; set in_channels to match"
        )
    _checks.one_per_output_channel("conv_bias", bias, weight)


def _convolution(
    input: Tensor,
    weight: Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
    groups: int,
    padding_mode: str,
) -> Convolution:
    axes = input.dim() - 2

    def each(name: str, v: int | Sequence[int], least: int) -> tuple[int, ...]:
        sizes = (v,) * axes if isinstance(v, int) else tuple(v) * (axes if len(v) == 1 else 1)
        if len(sizes) != axes or any(size < least for size in sizes):
            raise InputError(f"{name} must be one integer, or {axes}, of at least {least}; got {v}")
        return sizes

    stride, dilation, none = each("stride", stride, 1), each("dilation", dilation, 1), (0,) * axes
    if padding == "same":
        if any(s != 1 for s in stride):
            raise InputError(f"padding='same' needs stride 1, got {stride}; give the padding in numbers")
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        before, after = [t // 2 for t in total], [t - t // 2 for t in total]
    elif isinstance(padding, str):
        _checks.one_of("padding", padding, ("same", "valid"))
        before = after = list(none)
    else:
        before = after = list(each("padding", padding, 0))
    pad = [n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair]
    by_itself = before == after and padding_mode == "zeros"  # otherwise F.pad comes before it
    own, added = (tuple(before), none * 2) if by_itself else (none, tuple(pad))
    return Convolution(stride, own, dilation, groups, added, PADDING_MODES[padding_mode])


_GEOMETRY = "stride padding padding_name dilation groups padding_mode"
_OPTIONS = f"{_GEOMETRY} training momentum eps eps_mode".split()


def _run(*arguments: Any) -> Tensor:
    tracked, weight, bias, *values = arguments[5:]
    tensors: Any = (*arguments[:5], weight, bias)
    options = dict(zip(_OPTIONS, values, strict=True))
    options["padding"] = options.pop("padding_name") or options["padding"]
    return conv_batch_norm(*tensors, num_batches_tracked=tracked, **options)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    stride, padding, name, dilation, groups, mode = rest[5:11]
    return _convolution(x, weight, stride, name or padding, dilation, groups, mode).apply(x, weight, bias)


def _why_not_folded(call: Arguments) -> str:
    if call["eps_mode"] == "outside":
        return "it is one operator with its convolution, and has no to_pair() with eps_mode='outside'"
    return "it is one operator with its convolution; take to_pair() of the layer"


declare(
    "conv_batch_norm(Tensor x, Tensor conv_weight, Tensor? conv_bias, Tensor(a!)? running_mean,"
    " Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, Tensor? weight, Tensor? bias, int[] stride,"
    " int[] padding, str padding_name, int[] dilation, int groups, str padding_mode, bool training,"
    " float? momentum, float eps, str eps_mode) -> Tensor",
    _run,
    _fake,
    in_training,
    _why_not_folded,
)
