"""The specification: every verb of both families in plain torch, on any device and dtype.

A tensor is viewed as (outer, kept, inner). The channel family keeps statistics of every `kept` index over
outer and inner (batch, sync, group, instance norm); the row family normalizes over `kept`, with
statistics of every (outer, inner) (layer, RMS norm). Both are five verbs:

    moments -> merge (`ops/sums.py`) -> normalize -> gradient sums -> input gradient

Everything here is differentiable torch, so autograd can differentiate it again. If autograd does not record,
the channel family works through the batch in slices that stay in cache, so that no temporary is as large as
the input. The other backends compute the same numbers faster. Half precision is computed in float32 and cast
once, at the end. The row family is in `reference_rows.py`. `REFERENCE` of `ops/backends` has all of these
verbs and nothing else.

If some positions are not data (padding), a mask marks those that are: bool, (N, positions of a sample).
Values at the other positions, even NaN, are replaced before they are used (a product with 0 would not be 0),
and results there are 0. Counts are then float64 tensors, () or (N, 1), as the host may not know them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from leannorm._types import (
    Channels,
    ChannelTensors,
    KeptByChannelNorm,
    MaybeTensor,
    Moments,
    Running,
    kept_of,
)
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.layout import in_blocks, laid_out_for, out_of_blocks
from leannorm.ops.modes import differentiable
from leannorm.ops.plan import channel_plan, statistics_shape
from leannorm.ops.precision import (
    compute_dtype,
    gradient_dtype,
    in_dtype,
    power,
    statistics_dtype,
    sum_of_squares,
)
from leannorm.ops.running import RunningVerbs

_SLICE = 1 << 18  # elements worked on at a time: 1 MiB of float32


def _slices(x: Tensor, mask: Tensor | None, *others: Tensor | None) -> list[slice]:
    """Ranges of samples that fit the cache; one range if autograd, a transform or a compiler records.

    Also one range on a device if there is a mask.
    """
    whole = x.numel() <= _SLICE or (mask is not None and x.device.type != "cpu")
    if whole or differentiable(x, mask, *others):
        return [slice(None)]
    samples = max(1, _SLICE * x.shape[0] // x.numel())
    return [slice(i, i + samples) for i in range(0, x.shape[0], samples)]


def _rows(v: Tensor | None, part: slice) -> Tensor | None:
    return None if v is None else v[part]


def _at(part: slice, statistics: Tensor) -> Tensor:
    """The statistics of these samples: their own rows of (N, G), all of (C,)."""
    return statistics[part] if statistics.dim() == 2 else statistics


def _per_channel(v: Tensor, x: Tensor) -> Tensor:
    """(C,) or (N, G) values, spread so that they broadcast against x (N, C, *)."""
    v = v.repeat_interleave(x.shape[1] // max(v.shape[1], 1), dim=1) if v.dim() == 2 else v[None]
    return v.reshape(*v.shape, *(1,) * (x.dim() - 2))


def over_channels(mask: Tensor, x: Tensor) -> Tensor:
    """(N, positions) as (N, 1, *), which broadcasts against x (N, C, *)."""
    return mask.reshape(mask.shape[0], 1, *x.shape[2:])


def at_data(mask: Tensor | None, v: MaybeTensor, fill: Tensor | float = 0.0) -> MaybeTensor:
    """v, with `fill` at the positions that the mask does not mark as data; in the layout of v."""
    if v is None or mask is None:
        return v
    if not isinstance(fill, Tensor):
        fill = torch.full((), fill, dtype=v.dtype, device=v.device)
    return torch.where(over_channels(mask, v), v, fill.to(v.dtype))


def _of_samples(part: slice, kept: KeptByChannelNorm) -> KeptByChannelNorm:
    """The record of these samples. At positions that are not data x is its mean, and the residual 0."""
    x, mean, mask = kept.x[part], _at(part, kept.mean), _rows(kept.mask, part)
    if mask is not None:
        x = at_data(mask, x, _per_channel(mean.detach(), x))
    residual, output = at_data(mask, _rows(kept.residual, part)), _rows(kept.output, part)
    return kept._replace(
        x=x, mean=mean, rstd=_at(part, kept.rstd), residual=residual, output=output, mask=mask
    )


def _block(x: Tensor, statistics: Tensor) -> int:
    """How many samples share statistics, if it is neither one nor all, as in ghost batch norm."""
    sets = statistics.shape[0] if statistics.dim() == 2 else 0
    return 0 if sets in (0, x.shape[0]) else x.shape[0] // sets


def _in_blocks(size: int, kept: KeptByChannelNorm) -> KeptByChannelNorm:
    """The record, with each block of that many samples as one sample."""
    tensors = kept.x, kept.residual, kept.output
    x, residual, output = (None if t is None else in_blocks(t, size) for t in tensors)
    assert x is not None
    return kept._replace(x=x, residual=residual, output=output)


def at_least_one(count: int | Tensor) -> int | Tensor:
    """The count as a divisor: 1 for 0, as the sum over no values is 0."""
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)


def _xhat(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """(x - mean) * rstd in compute dtype; the mean is split in two so that a large one loses no digits."""
    dtype = compute_dtype(x)
    high = mean.to(dtype)
    low = (mean - high.to(mean.dtype)).to(dtype)
    centred = x.to(dtype) - _per_channel(high, x) - _per_channel(low, x)
    return centred * _per_channel(rstd.to(dtype), x)


def _before_activation(xhat: Tensor, kept: KeptByChannelNorm) -> Tensor:
    weight, bias, residual = kept[3:6]
    z = xhat if weight is None else xhat * _per_channel(weight.to(xhat.dtype), xhat)
    z = z if bias is None else z + _per_channel(bias.to(z.dtype), z)
    return z if residual is None else z + residual.to(z.dtype)


def activation_grad(dy: Tensor, kept: KeptByChannelNorm, z: Callable[[], Tensor]) -> Tensor:
    """dz: the gradient before the activation, from its output if that is kept, otherwise from its input
    `z()`."""
    act = kept.norm.act
    dz, activation = dy.to(compute_dtype(kept.x)), ACTIVATIONS[act]
    if act == "identity":
        return dz
    if kept.output is not None and activation.from_output is not None:
        return dz * activation.from_output(kept.output.to(dz.dtype))
    return dz * activation.grad(z())


def _gradient(dy: Tensor, part: slice, kept: KeptByChannelNorm) -> tuple[Tensor, Tensor, KeptByChannelNorm]:
    """dz and xhat of these samples, and their record."""
    some = _of_samples(part, kept)
    xhat = _xhat(some.x, some.mean, some.rstd)
    dy = at_data(some.mask, dy[part])
    return activation_grad(dy, some, lambda: _before_activation(xhat, some)), xhat, some


# y, mean, m2, rstd, count; dx, dweight, dbias, dz
Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
Backward = tuple[Tensor, Tensor, Tensor, Tensor | None]


class ChannelVerbs(RunningVerbs):
    """Statistics of every channel, or of every group of every sample: batch, sync, group, instance norm."""

    def channel_moments(self, x: Tensor, groups: int = 0, mask: Tensor | None = None) -> Moments:
        """Mean and M2 of every channel (or of every group of every sample); 0 and 0 if there is no value.

        Two passes with the correction of Chan, Golub and LeVeque (1983): the deviations' own mean, which
        would be 0 in exact arithmetic, corrects the rounding of the first.
        """
        if groups < 0:
            assert mask is None
            return self.channel_moments(in_blocks(x, -groups), x.shape[1])
        plan, shape = channel_plan(x.shape, groups), statistics_shape(x.shape, groups)
        dtype = statistics_dtype(x)
        count: int | Tensor = plan.outer * plan.inner
        of_each: int | Tensor = count
        if mask is not None:
            count = mask.sum(1, keepdim=True, dtype=dtype) * (x.shape[1] // groups if groups else 1)
            count = count if groups else count.sum()
            of_each = count.expand(shape).flatten()
        parts = [slice(None)] if groups else _slices(x, mask)

        def folded(part: slice, fill: Tensor | None = None) -> Tensor:
            wide = x[part].to(compute_dtype(x))
            if mask is not None:
                centre = 0.0 if fill is None else _per_channel(fill.reshape(shape), wide)
                wide = at_data(mask[part], wide, centre)
            return wide.reshape(channel_plan(wide.shape, groups))

        zero = x.new_zeros((plan.kept,), dtype=dtype)
        mean = sum((folded(part).sum((0, 2)).to(dtype) for part in parts), start=zero) / at_least_one(of_each)
        # 0 instead of an infinite mean, the difference from which would be infinite or NaN
        rounded = torch.where(mean.isfinite(), mean, zero).to(compute_dtype(x))
        rest, m2 = zero, zero
        for part in parts:
            deviation = folded(part, rounded) - rounded.unsqueeze(-1)
            rest = rest + deviation.sum((0, 2)).to(dtype)
            m2 = m2 + sum_of_squares(deviation, (0, 2), dtype).reshape(plan.kept)
        rest = rest / at_least_one(of_each)
        m2 = (m2 - rest * rest * of_each).clamp_min(0)
        return Moments((rounded.to(dtype) + rest).reshape(shape), m2.reshape(shape), count)

    def rstd_of(self, moments: Moments, eps: float) -> Tensor:
        """1 / sqrt(biased variance + eps); an empty set has variance 0."""
        return power(moments.m2 / at_least_one(moments.count) + eps, -0.5)

    def channel_normalize(self, kept: KeptByChannelNorm) -> Tensor:
        """act((x - mean) * rstd * weight + bias + residual), in x's dtype and layout."""
        x = kept.x
        if block := _block(x, kept.mean):
            return out_of_blocks(self.channel_normalize(_in_blocks(block, kept)), x)

        def normalize(part: slice) -> Tensor:
            some = _of_samples(part, kept)
            z = _before_activation(_xhat(some.x, some.mean, some.rstd), some)
            return at_data(some.mask, in_dtype(ACTIVATIONS[kept.norm.act].forward(z), x.dtype))

        parts = _slices(x, kept.mask, kept.mean, *kept[3:6])
        if len(parts) == 1:
            return normalize(parts[0])
        y = torch.empty_like(x)
        for part in parts:
            y[part] = normalize(part)
        return y

    def channel_evaluate(self, tensors: ChannelTensors, norm: Channels) -> Tensor:
        """`channel_normalize` by running statistics."""
        mean, var = tensors[4:6]
        assert mean is not None
        assert var is not None
        return self.channel_normalize(kept_of(tensors, *self.constants_of(mean, var, norm.eps), norm))

    def channel_grad_sums(self, dy: Tensor, kept: KeptByChannelNorm) -> tuple[Tensor, Tensor]:
        """Sums of dz and of dz * xhat: (C,) if the statistics are of the batch, otherwise per set."""
        x, mean = kept.x, kept.mean
        if block := _block(x, mean):
            return self.channel_grad_sums(in_blocks(dy, block), _in_blocks(block, kept))
        dtype, per_sample = statistics_dtype(x), mean.dim() == 2
        sums = []
        for part in _slices(x, kept.mask, dy, mean, kept.weight):
            dz, xhat, _ = _gradient(dy, part, kept)
            folded = torch.stack((dz, dz * xhat)).reshape(2, *channel_plan(dz.shape))
            sums.append(folded.sum(3 if per_sample else (1, 3)).to(dtype))
        total = torch.cat(sums, dim=1) if per_sample else torch.stack(sums).sum(0)
        return total[0], total[1]

    def channel_input_grad(
        self,
        dy: Tensor,
        kept: KeptByChannelNorm,
        means: tuple[Tensor, Tensor] | None = None,
        want_dz: bool = False,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """dx = rstd * (weight * dz - mean_dz - xhat * mean_dz_xhat), and dz (the residual's gradient).

        Both in x's dtype; dz only on request. The `means` over the set, of weight*dz and of weight*dz*xhat,
        have the statistics' shape; None if the statistics are constants (evaluation). `into`, for example x,
        may be overwritten with dx.
        """
        x, weight = kept.x, kept.weight
        if block := _block(x, kept.mean):
            dx, dz = self.channel_input_grad(in_blocks(dy, block), _in_blocks(block, kept), means, want_dz)
            return out_of_blocks(dx, x), None if dz is None else out_of_blocks(dz, x)

        def grad(part: slice) -> tuple[Tensor, Tensor]:
            dz, xhat, some = _gradient(dy, part, kept)
            inner = dz if weight is None else dz * _per_channel(weight.to(dz.dtype), dz)
            if means is not None:
                mean_dz, mean_dz_xhat = (_per_channel(_at(part, v).to(dz.dtype), dz) for v in means)
                inner = inner - mean_dz
                inner = inner - xhat * mean_dz_xhat
            dx = (inner * _per_channel(some.rstd.to(dz.dtype), dz)).to(x.dtype)
            return at_data(some.mask, dx), at_data(some.mask, dz.to(x.dtype))

        parts = _slices(x, kept.mask, dy, kept.mean, weight)
        dy = laid_out_for(x, dy)  # so that results have x's layout
        if len(parts) == 1 and into is None:
            dx, dz = grad(parts[0])
            return dx, dz if want_dz else None
        dx = torch.empty_like(x) if into is None else into
        all_dz = torch.empty_like(x) if want_dz else None
        for part in parts:
            dx[part], dz = grad(part)
            if all_dz is not None:
                all_dz[part] = dz
        return dx, all_dz

    def channel_means(
        self, sums: tuple[Tensor, Tensor], weight: Tensor | None, groups: int, count: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """The means of `channel_input_grad`: the sums, weighted, added up in groups, over the count."""

        def mean(s: Tensor) -> Tensor:
            s = s if weight is None else s * weight.to(s.dtype)
            if groups:  # of no samples, too
                s = s.reshape(s.shape[0], groups, s.shape[1] // groups).sum(2)
            return s / at_least_one(count)

        return mean(sums[0]), mean(sums[1])

    def channel_forward(self, tensors: ChannelTensors, norm: Channels) -> Forward:
        """moments and normalize as one call, which also updates running statistics that are given.

        Returns y, mean, m2, rstd and, with a mask, the count.
        """
        x, _, _, _, mean, var, num_batches, mask = tensors
        moments = self.channel_moments(x, norm.groups, mask)
        rstd = self.rstd_of(moments, norm.eps)
        y = self.channel_normalize(kept_of(tensors, moments.mean, rstd, norm))
        if mean is not None:
            self.move_running(Running(mean, var, num_batches, norm.momentum), moments)
        return y, moments.mean, moments.m2, rstd, moments.count if isinstance(moments.count, Tensor) else None

    def channel_backward(
        self, dy: Tensor, kept: KeptByChannelNorm, want_dz: bool = False, into: Tensor | None = None
    ) -> Backward:
        """gradient sums and input gradient as one call: dx, dweight, dbias ((C,), `gradient_dtype`), dz."""
        x, weight, groups = kept.x, kept.weight, kept.norm.groups
        sums, means = self.channel_grad_sums(dy, kept), None
        if kept.norm.by_batch:
            plan = channel_plan(x.shape, groups)
            of_channels = x.shape[1] if groups < 0 else groups  # the sums of a block are per channel
            count = plan.outer * plan.inner if kept.size is None else kept.size
            means = self.channel_means(sums, weight, of_channels, count)
        dx, dz = self.channel_input_grad(dy, kept, means, want_dz, into)
        dtype = gradient_dtype(x, weight)
        dbias, dweight = ((s if groups == 0 else s.sum(0)).to(dtype) for s in sums)
        return dx, dweight, dbias, dz
