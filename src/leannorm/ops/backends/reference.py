"""The specification: every verb of both families in plain torch, on any device and dtype.

A tensor is seen as (outer, kept, inner). The channel family keeps statistics of every `kept` index over
outer and inner (batch, sync, group, instance norm); the row family normalizes over `kept`, with
statistics of every (outer, inner) (layer, RMS norm). Both are five verbs:

    moments -> merge (`ops/sums.py`) -> normalize -> gradient sums -> input gradient

Everything here is differentiable torch, so autograd can differentiate it again. Where autograd does not
record, the channel family works through the batch in slices that stay in cache, so that no temporary is
as large as the input. The other backends compute the same numbers faster. Half precision is
computed in float32 and cast once, at the end. The row family stands in `reference_rows.py`.
`REFERENCE` of `ops/backends` has all of these verbs and nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm._types import Moments, Running
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.layout import in_blocks, laid_out_for, out_of_blocks
from leannorm.ops.modes import differentiable
from leannorm.ops.plan import channel_plan, statistics_shape
from leannorm.ops.precision import (
    compute_dtype,
    gradient_dtype,
    in_dtype,
    statistics_dtype,
    sum_of_squares,
)
from leannorm.ops.running import RunningVerbs

_SLICE = 1 << 18  # elements worked on at a time: 1 MiB of float32


def _slices(x: Tensor, *others: Tensor | None) -> list[slice]:
    """Ranges of samples that fit the cache; one range where autograd, a transform or a compiler records."""
    if differentiable(x, *others) or x.numel() <= _SLICE:
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


def _block(x: Tensor, statistics: Tensor) -> int:
    """How many samples share statistics, where it is neither one nor all: those of ghost batch norm."""
    sets = statistics.shape[0] if statistics.dim() == 2 else 0
    return 0 if sets in (0, x.shape[0]) else x.shape[0] // sets


def _in_blocks(size: int, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else in_blocks(t, size) for t in tensors]


def at_least_one(count: int | Tensor) -> int | Tensor:
    """The count as a divisor: 1 for 0, as the sum over no values is 0."""
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)


def _xhat(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """(x - mean) * rstd in compute dtype; the mean is split in two so that a large one loses nothing."""
    dtype = compute_dtype(x)
    high = mean.to(dtype)
    low = (mean - high.to(mean.dtype)).to(dtype)
    centred = x.to(dtype) - _per_channel(high, x) - _per_channel(low, x)
    return centred * _per_channel(rstd.to(dtype), x)


def _before_activation(
    xhat: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    z = xhat if weight is None else xhat * _per_channel(weight.to(xhat.dtype), xhat)
    z = z if bias is None else z + _per_channel(bias.to(z.dtype), z)
    return z if residual is None else z + residual.to(z.dtype)


def _activation_grad(
    dy: Tensor,
    xhat: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    act: str,
) -> Tensor:
    """dz: the gradient before the activation, from its output where that is given, else rebuilt."""
    dz, activation = dy.to(xhat.dtype), ACTIVATIONS[act]
    if act == "identity":
        return dz
    if out is not None and activation.from_output is not None:
        return dz * activation.from_output(out.to(xhat.dtype))
    return dz * activation.grad(_before_activation(xhat, weight, bias, residual))


class ChannelVerbs(RunningVerbs):
    """Statistics of every channel, or of every group of every sample: batch, sync, group, instance norm."""

    def channel_moments(self, x: Tensor, groups: int = 0) -> Moments:
        """Mean and M2 of every channel (or of every group of every sample); 0 and 0 where there is no value.

        Two passes with the correction of Chan, Golub and LeVeque (1983): the deviations' own mean, which
        would be 0 in exact arithmetic, corrects the rounding of the first.
        """
        if groups < 0:
            return self.channel_moments(in_blocks(x, -groups), x.shape[1])
        plan, dtype = channel_plan(x.shape, groups), statistics_dtype(x)
        count, shape = plan.outer * plan.inner, statistics_shape(x.shape, groups)
        parts = [slice(None)] if groups else _slices(x)

        def folded(part: slice) -> Tensor:
            return x[part].to(compute_dtype(x)).reshape(channel_plan(x[part].shape, groups))

        zero = x.new_zeros((plan.kept,), dtype=dtype)
        mean = sum((folded(part).sum((0, 2)).to(dtype) for part in parts), start=zero) / max(count, 1)
        # 0 in place of an infinite mean, the difference from which would be infinite or NaN
        rounded = torch.where(mean.isfinite(), mean, zero).to(compute_dtype(x)).unsqueeze(-1)
        rest, m2 = zero, zero
        for part in parts:
            deviation = folded(part) - rounded
            rest = rest + deviation.sum((0, 2)).to(dtype)
            m2 = m2 + sum_of_squares(deviation, (0, 2), dtype).reshape(plan.kept)
        rest = rest / max(count, 1)
        m2 = (m2 - rest * rest * count).clamp_min(0)
        return Moments((rounded.flatten().to(dtype) + rest).reshape(shape), m2.reshape(shape), count)

    def rstd_of(self, moments: Moments, eps: float) -> Tensor:
        """1 / sqrt(biased variance + eps); an empty set has variance 0."""
        return torch.rsqrt(moments.m2 / at_least_one(moments.count) + eps)

    def channel_normalize(
        self,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        act: str = "identity",
    ) -> Tensor:
        """act((x - mean) * rstd * weight + bias + residual), in x's dtype and layout."""
        if block := _block(x, mean):
            (r,) = _in_blocks(block, residual)
            y = self.channel_normalize(in_blocks(x, block), mean, rstd, weight, bias, r, act)
            return out_of_blocks(y, x)

        def normalize(part: slice) -> Tensor:
            xhat = _xhat(x[part], _at(part, mean), _at(part, rstd))
            z = _before_activation(xhat, weight, bias, _rows(residual, part))
            return in_dtype(ACTIVATIONS[act].forward(z), x.dtype)

        parts = _slices(x, mean, weight, bias, residual)
        if len(parts) == 1:
            return normalize(parts[0])
        y = torch.empty_like(x)
        for part in parts:
            y[part] = normalize(part)
        return y

    def channel_evaluate(
        self,
        x: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        eps: float,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        act: str = "identity",
    ) -> Tensor:
        """`channel_normalize` by running statistics."""
        constants = self.constants_of(running_mean, running_var, eps)
        return self.channel_normalize(x, *constants, weight, bias, residual, act)

    def channel_grad_sums(
        self,
        dy: Tensor,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        act: str = "identity",
    ) -> tuple[Tensor, Tensor]:
        """Sums of dz and of dz * xhat: (C,) where the statistics are of the batch, else of each set."""
        if block := _block(x, mean):
            r, o = _in_blocks(block, residual, out)
            seen = in_blocks(dy, block), in_blocks(x, block), mean, rstd, weight, bias, r, o, act
            return self.channel_grad_sums(*seen)
        dtype, per_sample = statistics_dtype(x), mean.dim() == 2
        sums = []
        for part in _slices(x, dy, mean, weight):
            xhat = _xhat(x[part], _at(part, mean), _at(part, rstd))
            dz = _activation_grad(dy[part], xhat, weight, bias, _rows(residual, part), _rows(out, part), act)
            folded = torch.stack((dz, dz * xhat)).reshape(2, *channel_plan(dz.shape))
            sums.append(folded.sum(3 if per_sample else (1, 3)).to(dtype))
        total = torch.cat(sums, dim=1) if per_sample else torch.stack(sums).sum(0)
        return total[0], total[1]

    def channel_input_grad(
        self,
        dy: Tensor,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        p: Tensor | None = None,
        q: Tensor | None = None,
        act: str = "identity",
        want_dz: bool = False,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """dx = rstd * (weight * dz - p - xhat * q), and dz (the residual's gradient) if wanted, in x's dtype.

        p and q have the statistics' shape: the means over the set of weight*dz and of weight*dz*xhat;
        None where the statistics are constants (evaluation). `into`, for example x, may be overwritten
        with dx.
        """
        if block := _block(x, mean):
            r, o = _in_blocks(block, residual, out)
            seen = (
                in_blocks(dy, block),
                in_blocks(x, block),
                mean,
                rstd,
                weight,
                bias,
                r,
                o,
                p,
                q,
                act,
                want_dz,
            )
            found = self.channel_input_grad(*seen)
            return out_of_blocks(found[0], x), None if found[1] is None else out_of_blocks(found[1], x)

        def grad(part: slice) -> tuple[Tensor, Tensor]:
            xhat = _xhat(x[part], _at(part, mean), _at(part, rstd))
            dz = _activation_grad(dy[part], xhat, weight, bias, _rows(residual, part), _rows(out, part), act)
            inner = dz if weight is None else dz * _per_channel(weight.to(dz.dtype), dz)
            if p is not None and q is not None:
                inner = inner - _per_channel(_at(part, p).to(dz.dtype), dz)
                inner = inner - xhat * _per_channel(_at(part, q).to(dz.dtype), dz)
            return (inner * _per_channel(_at(part, rstd).to(dz.dtype), dz)).to(x.dtype), dz.to(x.dtype)

        parts = _slices(x, dy, mean, weight)
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
        self, sum_dz: Tensor, sum_dz_xhat: Tensor, weight: Tensor | None, groups: int, count: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """p and q of `channel_input_grad`: the gradient sums, weighted, summed in groups, over the count."""

        def mean(s: Tensor) -> Tensor:
            s = s if weight is None else s * weight.to(s.dtype)
            return (s if groups == 0 else s.unflatten(1, (groups, -1)).sum(2)) / at_least_one(count)

        return mean(sum_dz), mean(sum_dz_xhat)

    def channel_forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
        act: str = "identity",
        groups: int = 0,
        running: Running | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """moments and normalize as one call, which may also move running statistics: y, mean, m2, rstd."""
        moments = self.channel_moments(x, groups)
        rstd = self.rstd_of(moments, eps)
        y = self.channel_normalize(x, moments.mean, rstd, weight, bias, residual, act)
        if running is not None:
            self.move_running(*running, moments.mean, moments.m2, moments.count)
        return y, moments.mean, moments.m2, rstd

    def channel_backward(
        self,
        dy: Tensor,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor | None,
        act: str = "identity",
        groups: int = 0,
        want_dz: bool = False,
        constant: bool = False,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """gradient sums and input gradient as one call: dx, dweight, dbias ((C,), `gradient_dtype`), dz.

        `constant`: the statistics are constants, as in evaluation.
        """
        plan = channel_plan(x.shape, groups)
        sums = self.channel_grad_sums(dy, x, mean, rstd, weight, bias, residual, out, act)
        p = q = None
        if not constant:
            of_channels = x.shape[1] if groups < 0 else groups  # the sums of a block are of each channel
            p, q = self.channel_means(*sums, weight, of_channels, plan.outer * plan.inner)
        dx, dz = self.channel_input_grad(
            dy, x, mean, rstd, weight, bias, residual, out, p, q, act, want_dz, into
        )
        dtype = gradient_dtype(x, weight)
        dbias, dweight = ((s if groups == 0 else s.sum(0)).to(dtype) for s in sums)
        return dx, dweight, dbias, dz
