"""Convolution and batch norm as one autograd function that keeps only the convolution's input.

Saved, in bytes per element of the convolution's input: 4 in float32; of its output: 0. The backward pass runs
the convolution again, overwrites its output with the gradient of that output, and passes this to
`convolution_backward` (the input gradient of a large batch in slices). So besides the incoming gradient only
one tensor of the output's size exists.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leannorm._types import Channels, ChannelTensors, KeptByChannelNorm, Maybe
from leannorm.autograd.channel import ChannelCall, Statistics, statistics_of, twice_differentiable
from leannorm.autograd.sync import Sharing, gradient_sums_of_all
from leannorm.ops.backends import REFERENCE
from leannorm.ops.modes import differentiable, many_at_once
from leannorm.ops.plan import values_per_channel
from leannorm.ops.precision import power
from leannorm.ops.select import pick, transformed

aten = torch.ops.aten


def _slices(dz: Tensor, x: Tensor) -> list[slice]:
    """Quarters of a large batch; one slice if the batch is small or autograd records.

    Convolutions on the CPU copy their operands into internal layouts. A sample's input gradient does not
    depend on other samples, so slices keep these copies small. With 16 samples or more a slice runs the
    algorithm of the whole batch, and the gradient is equal bit for bit.
    """
    samples = -(-x.shape[0] // 4)
    large = samples >= 16 and x.shape[0] % samples in (0, *range(16, samples)) and dz.numel() >= 1 << 20
    if not large or dz.device.type != "cpu" or differentiable(dz, x):
        return [slice(None)]
    return [slice(i, i + samples) for i in range(0, x.shape[0], samples)]


class Convolution(NamedTuple):
    """A convolution's arguments; `pad` is what F.pad adds before it (last axis first), in `padding_mode`."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    pad: tuple[int, ...]
    padding_mode: str

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(self.padded(x), weight, bias, *self._settings())

    def _settings(self) -> tuple[Any, ...]:
        """The arguments that torch's operators take after the operands."""
        return self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), self.groups

    def padded(self, x: Tensor) -> Tensor:
        return F.pad(x, self.pad, mode=self.padding_mode) if any(self.pad) else x

    def backward(
        self, dz: Tensor, x: Tensor, weight: Tensor, bias: bool, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of x, weight and bias; None for those not needed."""
        padded = self.padded(x)

        def gradients(part: slice, mask: tuple[bool, bool, bool]) -> tuple[Tensor, Tensor, Tensor]:
            operands = dz[part], padded[part], weight, [weight.shape[0]] if bias else None
            result: tuple[Tensor, Tensor, Tensor] = aten.convolution_backward(
                *operands, *self._settings(), mask
            )
            return result

        parts = _slices(dz, padded) if needed[0] else []
        if len(parts) <= 1:
            dx, dweight, dbias = gradients(slice(None), needed)
        else:
            _, dweight, dbias = gradients(slice(None), (False, *needed[1:]))
            dx = torch.empty_like(padded)
            for part in parts:
                dx[part] = gradients(part, (True, False, False))[0]
        return self._unpadded(dx, x) if needed[0] else None, dweight, dbias

    def _unpadded(self, gradient: Tensor, x: Tensor) -> Tensor:
        """The adjoint of `padded`: a padded position's gradient is added where its value was copied from."""
        if not any(self.pad):
            return gradient
        if self.padding_mode == "constant":
            return F.pad(gradient, [-p for p in self.pad])
        if self.padding_mode == "circular":
            for axis in range(2, x.dim()):
                before, after = self.pad[2 * (x.dim() - 1 - axis) :][:2]
                size = x.shape[axis]
                head = gradient.narrow(axis, 0, before)
                body = gradient.narrow(axis, before, size)
                tail = gradient.narrow(axis, before + size, after)
                spread = [0] * (2 * (x.dim() - axis))
                spread[-2:] = [size - before, 0]
                body = body + F.pad(head, spread)
                spread[-2:] = [0, size - after]
                gradient = body + F.pad(tail, spread)
            return gradient
        kind = {"reflect": "reflection", "replicate": "replication"}[self.padding_mode]
        adjoint = getattr(aten, f"{kind}_pad{x.dim() - 2}d_backward")
        result: Tensor = adjoint(gradient, x, self.pad)
        return result

    def output_sizes(self, x: Tensor, weight: Tensor) -> list[int]:
        """The output's size along each spatial axis."""
        sizes = []
        for axis in range(x.dim() - 2):
            before, after = self.pad[2 * (x.dim() - 3 - axis) :][:2]
            size = x.shape[2 + axis] + before + after + 2 * self.padding[axis]
            reach = self.dilation[axis] * (weight.shape[2 + axis] - 1)
            sizes.append((size - reach - 1) // self.stride[axis] + 1)
        return sizes


def rstd_outside(variance: Tensor, eps: float) -> Tensor:
    """1 / (sqrt(variance) + eps): epsilon outside of the root."""
    return power(power(variance, 0.5) + eps, -1.0)


def _statistics(z: Tensor, call: ChannelCall, again: bool = False) -> Statistics:
    """The sums of all ranks that share them; those of a call `again` can be differentiated."""
    mean, m2, rstd, size = statistics_of(z, None, call, "training forward again" if again else "")
    if call.norm.outside:
        degrees = max(values_per_channel(z.shape) - 1, 1) if size is None else (size - 1).clamp_min(1)
        rstd = rstd_outside(m2 / degrees, call.norm.eps)
    return mean, m2, rstd, size


class KeptByConvNorm(NamedTuple):
    """What a convolution with its batch norm saves; `size`: the values per channel on all ranks that
    share."""

    x: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    weight: Tensor | None
    mean: Tensor
    rstd: Tensor
    size: Tensor | None = None


class ConvNorm(torch.autograd.Function):
    """norm(conv(x)) * weight + bias, by the batch's statistics, which it returns too, or by the given
    ones."""

    Kept = KeptByConvNorm

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, conv_weight: Tensor, *others: Any
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        conv_bias, weight, bias, mean, rstd, convolution, norm, sharing = others
        z = convolution.apply(x, conv_weight, conv_bias)
        backend = ctx.backend = pick(z, weight, bias)
        m2 = size = None
        ctx.constant = mean is not None
        if mean is not None and rstd is not None:
            y = backend.channel_normalize(KeptByChannelNorm(z, mean, rstd, weight, bias))
        elif norm.outside or sharing is not None:
            mean, m2, rstd, size = _statistics(z, ChannelCall(backend, norm, sharing))
            y = backend.channel_normalize(KeptByChannelNorm(z, mean, rstd, weight, bias))
        else:
            y, mean, m2, rstd, _ = backend.channel_forward(ChannelTensors(z, weight, bias), norm)
        ctx.save_for_backward(*KeptByConvNorm(x, conv_weight, conv_bias, weight, mean, rstd, size))
        ctx.convolution, ctx.norm, ctx.sharing = convolution, norm, sharing
        ctx.dtypes = [None if v is None else v.dtype for v in (weight, bias)]
        ctx.set_materialize_grads(False)
        if m2 is None:
            return y  # not (y, None, None): torch.compile traces no backward of an output that is None
        ctx.mark_non_differentiable(mean, m2)
        return y, mean, m2

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 10
        x, conv_weight, conv_bias, weight, mean, rstd, size = KeptByConvNorm(*ctx.saved_tensors)
        needed = ctx.needs_input_grad
        into: Tensor | None = None
        if ctx.constant and not needed[3]:
            z = dy  # has z's shape; only the gradient of the norm's weight reads z's values
        else:
            z = ctx.convolution.apply(x, conv_weight, conv_bias)
            into = None if many_at_once(dy) else z
        backend, norm, sharing, twice = ctx.backend, ctx.norm, ctx.sharing, twice_differentiable()
        if twice:
            backend, into = REFERENCE, None
            if not ctx.constant:
                mean, _, rstd, _ = _statistics(z, ChannelCall(backend, norm, sharing), twice)
        kept, means = KeptByChannelNorm(z, mean, rstd, weight), None
        if ctx.constant or norm.outside or sharing is not None:
            sums = dbias, dweight = backend.channel_grad_sums(dy, kept)
            if not ctx.constant:
                count = values_per_channel(z.shape) if size is None else size
                if sharing is None:
                    means = REFERENCE.channel_means(sums, weight, 0, count)
                else:
                    total = gradient_sums_of_all(sums, sharing, z, twice)
                    means = backend.means_of(total, weight, count)
                if norm.outside:  # d rstd / d x has this additional factor
                    degrees = max(count - 1, 1) if size is None else (size - 1).clamp_min(1)
                    means = means[0], means[1] * (count / (degrees * (1 - norm.eps * rstd)))
            dz, _ = backend.channel_input_grad(dy, kept, means, into=into)
        else:
            dz, dweight, dbias, _ = backend.channel_backward(dy, kept, into=into)
        gradients = ctx.convolution.backward(dz, x, conv_weight, conv_bias is not None, needed[:3])
        affine = [
            v.to(dtype) if need else None
            for v, dtype, need in zip((dweight, dbias), ctx.dtypes, needed[3:5], strict=True)
        ]
        return (*gradients, *affine, None, None, None, None, None)


def conv_norm(
    convolution: Convolution,
    operands: tuple[Tensor, Tensor, Tensor | None],
    of_norm: tuple[Maybe, Maybe, Maybe, Maybe],
    norm: Channels,
    sharing: Sharing | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`ConvNorm`, or under a functorch transform its formula in plain torch.

    `of_norm` are the norm's weight and bias, and its mean and rstd if they are constants.
    """
    weight, bias, mean, rstd = of_norm
    if transformed(*operands, weight, bias):
        z, m2 = convolution.apply(*operands), None
        if mean is None or rstd is None:
            mean, m2, rstd, _ = _statistics(z, ChannelCall(REFERENCE, norm, sharing), again=True)
        return REFERENCE.channel_normalize(KeptByChannelNorm(z, mean, rstd, weight, bias)), mean, m2
    result = ConvNorm.apply(*operands, *of_norm, convolution, norm, sharing)
    if mean is not None:
        return result, mean, None
    y, mean, m2 = result
    return y, mean, m2
