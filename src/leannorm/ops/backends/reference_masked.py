"""The channel family where some positions are no data (padding): the same verbs, with a mask.

`mask` is bool, (N, positions of a sample). What stands at the other positions, NaN too, is replaced before
it meets anything: a product with 0 would not be 0. Counts are float64 tensors, () or (N, 1), as the host
may not know them. Results at the other positions are 0.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from leannorm._types import Moments
from leannorm.ops.backends.reference import ChannelVerbs, _at, _per_channel, _rows, _slices, at_least_one
from leannorm.ops.layout import laid_out_for
from leannorm.ops.plan import channel_plan, statistics_shape
from leannorm.ops.precision import compute_dtype, gradient_dtype, statistics_dtype, sum_of_squares

Given = TypeVar("Given", Tensor, Tensor | None)


def over_channels(mask: Tensor, x: Tensor) -> Tensor:
    """(N, positions) as (N, 1, *), which broadcasts against x (N, C, *)."""
    return mask.reshape(mask.shape[0], 1, *x.shape[2:])


def at_data(mask: Tensor, v: Given, fill: Tensor | float = 0.0) -> Given:
    """v, and `fill` at all other positions; in the layout of v."""
    if v is None:
        return v
    other = (
        fill.to(v.dtype) if isinstance(fill, Tensor) else torch.full((), fill, dtype=v.dtype, device=v.device)
    )
    return torch.where(over_channels(mask, v), v, other)


def _parts(x: Tensor, *others: Tensor | None) -> list[slice]:
    """As `_slices`; a device gets the whole at once."""
    return _slices(x, *others) if x.device.type == "cpu" else [slice(None)]


class MaskedVerbs(ChannelVerbs):
    """Each is the verb of its name in `ChannelVerbs`, of the positions that are data."""

    def masked_moments(self, x: Tensor, mask: Tensor, groups: int = 0) -> Moments:
        """As `channel_moments`; `count` is a tensor, () or (N, 1)."""
        dtype, shape = statistics_dtype(x), statistics_shape(x.shape, groups)
        count = mask.sum(1, keepdim=True, dtype=dtype) * (x.shape[1] // groups if groups else 1)
        count = count if groups else count.sum()
        of_each = count.expand(shape).flatten()
        parts = [slice(None)] if groups else _parts(x, mask)
        rest = m2 = zero = x.new_zeros(of_each.shape, dtype=dtype)

        def folded(v: Tensor) -> Tensor:
            return v.reshape(channel_plan(v.shape, groups))

        mean = zero
        for part in parts:
            wide = at_data(mask[part], x[part].to(compute_dtype(x)))
            mean = mean + folded(wide).sum((0, 2)).to(dtype)
        mean = mean / at_least_one(of_each)
        # 0 in place of an infinite mean, the difference from which would be infinite or NaN
        rounded = torch.where(mean.isfinite(), mean, zero).to(compute_dtype(x))
        for part in parts:
            centre = _per_channel(rounded.reshape(shape), x[part])
            deviation = folded(at_data(mask[part], x[part].to(compute_dtype(x)) - centre))
            rest = rest + deviation.sum((0, 2)).to(dtype)
            m2 = m2 + sum_of_squares(deviation, (0, 2), dtype).reshape(zero.shape)
        rest = rest / at_least_one(of_each)
        m2 = (m2 - rest * rest * of_each).clamp_min(0)
        return Moments((rounded.to(dtype) + rest).reshape(shape), m2.reshape(shape), count)

    def masked_normalize(
        self,
        x: Tensor,
        mask: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        act: str = "identity",
    ) -> Tensor:
        """As `channel_normalize`, and 0 at the other positions."""

        def normalize(part: slice) -> Tensor:
            valid, mean_of = mask[part], _at(part, mean)
            seen = at_data(valid, x[part], _per_channel(mean_of.detach(), x[part]))
            r = at_data(valid, _rows(residual, part))
            y = self.channel_normalize(seen, mean_of, _at(part, rstd), weight, bias, r, act)
            return at_data(valid, y)

        parts = _parts(x, mean, weight, bias, residual)
        if len(parts) == 1:
            return normalize(parts[0])
        y = torch.empty_like(x)
        for part in parts:
            y[part] = normalize(part)
        return y

    def masked_grad_sums(
        self,
        dy: Tensor,
        x: Tensor,
        mask: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        act: str = "identity",
    ) -> tuple[Tensor, Tensor]:
        """As `channel_grad_sums`."""
        sums, per_sample = [], mean.dim() == 2
        for part in _parts(x, dy, mean, weight):
            valid, mean_of = mask[part], _at(part, mean)
            sums.append(
                torch.stack(
                    self.channel_grad_sums(
                        at_data(valid, dy[part]),
                        at_data(valid, x[part], _per_channel(mean_of.detach(), x[part])),
                        mean_of,
                        _at(part, rstd),
                        weight,
                        bias,
                        at_data(valid, _rows(residual, part)),
                        _rows(out, part),
                        act,
                    )
                )
            )
        total = torch.cat(sums, dim=1) if per_sample else torch.stack(sums).sum(0)
        return total[0], total[1]

    def masked_input_grad(
        self,
        dy: Tensor,
        x: Tensor,
        mask: Tensor,
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
        zero: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """As `channel_input_grad`; at the other positions 0 or, if not `zero`, by constant statistics."""

        def grad(part: slice) -> tuple[Tensor, Tensor | None]:
            valid, mean_of = mask[part], _at(part, mean)
            dy_of, x_of, r, o = dy[part], x[part], _rows(residual, part), _rows(out, part)
            if zero:
                dy_of, r = at_data(valid, dy_of), at_data(valid, r)
                x_of = at_data(valid, x_of, _per_channel(mean_of.detach(), x_of))
            given: list[Any] = [dy_of, x_of, mean_of, _at(part, rstd), weight, bias, r, o]
            means = [None if v is None else _at(part, v) for v in (p, q)]
            dx, dz = self.channel_input_grad(*[*given, *means, act, want_dz])
            if zero:
                return at_data(valid, dx), at_data(valid, dz)
            if p is None or q is None:
                return dx, dz
            constant, _ = self.channel_input_grad(*[*given, None, None, act])
            return torch.where(over_channels(valid, dx), dx, constant), dz

        parts = _parts(x, dy, mean, weight)
        dy = laid_out_for(x, dy)  # so that results have x's layout
        if len(parts) == 1:
            return grad(parts[0])
        dx, all_dz = torch.empty_like(x), torch.empty_like(x) if want_dz else None
        for part in parts:
            dx[part], dz = grad(part)
            if all_dz is not None and dz is not None:
                all_dz[part] = dz
        return dx, all_dz

    def masked_forward(
        self,
        x: Tensor,
        mask: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
        act: str = "identity",
        groups: int = 0,
        zero: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """moments and normalize as one call: y, mean, m2, rstd, count. If not `zero` all is normalized."""
        moments = self.masked_moments(x, mask, groups)
        rstd, epilogue = self.rstd_of(moments, eps), (weight, bias, residual, act)
        if zero:
            y = self.masked_normalize(x, mask, moments.mean, rstd, *epilogue)
        else:
            y = self.channel_normalize(x, moments.mean, rstd, *epilogue)
        assert isinstance(moments.count, Tensor)
        return y, moments.mean, moments.m2, rstd, moments.count

    def masked_backward(
        self,
        dy: Tensor,
        x: Tensor,
        mask: Tensor,
        mean: Tensor,
        rstd: Tensor,
        count: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor | None,
        act: str = "identity",
        groups: int = 0,
        want_dz: bool = False,
        zero: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """gradient sums and input gradient as one call: dx, dweight, dbias, dz, as `channel_backward`."""
        given: list[Any] = [mean, rstd, weight, bias, residual, out]
        if zero:
            sums = self.masked_grad_sums(*[dy, x, mask, *given, act])
        else:
            sums = self.channel_grad_sums(*[dy, x, *given, act])
        p, q = self.channel_means(*sums, weight, groups, count)
        dx, dz = self.masked_input_grad(*[dy, x, mask, *given, p, q, act, want_dz, zero])
        dtype = gradient_dtype(x, weight)
        dbias, dweight = ((s if groups == 0 else s.sum(0)).to(dtype) for s in sums)
        return dx, dweight, dbias, dz
