"""The verbs by torch's own kernels on the CPU, if the C++ kernels are not built.

Torch's norms themselves are used where they are as exact as the reference (`native.py`). Otherwise large
tensors are computed by the reference's formulas in few passes over some samples, or rows, at a time: a * x +
b per channel is torch's batch norm in evaluation, and a mean of many standard deviations is subtracted first.
Values whose squares overflow or vanish in float32 are left to the reference, and so are calls that autograd
or a compiler may record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from leannorm._types import Channels, ChannelTensors, KeptByChannelNorm, Moments, kept_of
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends import native
from leannorm.ops.backends.aten_rows import AtenRows
from leannorm.ops.backends.compiled import DTYPES, like
from leannorm.ops.backends.reference import _SLICE, Backward, Forward, activation_grad
from leannorm.ops.layout import laid_out_for
from leannorm.ops.precision import compute_dtype, statistics_dtype

_SMALL = 1 << 12  # number of values, of a sample or of all, below which the reference is as fast


def _is_exact(kept: KeptByChannelNorm) -> bool:
    """Whether the output of torch's norm, and what is computed from it afterwards, is rounded only once."""
    wide = kept.x.dtype == compute_dtype(kept.x)
    return native.dense(kept.x) and (
        wide or (kept.residual is None and kept.norm.act in ("identity", "relu"))
    )


class Scaling(NamedTuple):
    """a * x + b per channel, computed in one pass by torch's batch norm in evaluation.

    Both are (samples, C), or (1, C) for all samples.
    """

    a: Tensor
    b: Tensor
    zero: Tensor
    one: Tensor

    @classmethod
    def of(cls, a: Tensor, b: Tensor, dtype: torch.dtype) -> Scaling:
        a, b = a.to(dtype), b.to(dtype)
        return cls(a, b, torch.zeros_like(a[0]), torch.ones_like(a[0]))

    def of_one_sample(self) -> Scaling:
        a, b = self.a.reshape(1, -1), self.b.reshape(1, -1)
        return Scaling(a, b, torch.zeros_like(a[0]), torch.ones_like(a[0]))

    def __call__(self, part: slice, x: Tensor, out: Tensor | None = None) -> Tensor:
        at = part.start if self.a.shape[0] > 1 else 0
        given = x, self.a[at], self.b[at], self.zero, self.one, False, 0.0, 0.0
        if out is None:
            y: Tensor = torch.native_batch_norm(*given)[0]
            return y
        torch.native_batch_norm(*given, out=(out, x.new_empty(0), x.new_empty(0)))
        return out


class _Channels:
    """The record, for some samples at a time; for one sample if each has its own statistics."""

    def __init__(self, kept: KeptByChannelNorm) -> None:
        self.kept, self.x, self.dtype = kept, kept.x, compute_dtype(kept.x)
        self.per_sample = kept.mean.dim() == 2
        self.high: Tensor | None = None
        self.mean, self.rstd = self.of_channels(kept.mean), self.of_channels(kept.rstd)
        if native.far(kept.mean, kept.rstd):
            self.high = self.mean.to(self.dtype)
            self.mean = self.mean - self.high.to(self.mean.dtype)

    def of_channels(self, v: Tensor) -> Tensor:
        """Statistics, (C,) or (N, G), as (1, C) or (N, C)."""
        return v.repeat_interleave(self.x.shape[1] // v.shape[1], 1) if v.dim() == 2 else v[None]

    def parts(self) -> Iterator[slice]:
        x = self.x
        step = 1 if self.per_sample else max(1, _SLICE * x.shape[0] // x.numel())
        return (slice(i, i + step) for i in range(0, x.shape[0], step))

    def values(self, part: slice) -> Tensor:
        """x of these samples, minus the larger part of a mean that is far from 0."""
        x = self.x[part].to(self.dtype)
        if self.high is None:
            return x
        high = self.high[part.start if self.per_sample else 0]
        return x - high.reshape(-1, *(1,) * (x.dim() - 2))

    @cached_property
    def normalize(self) -> Scaling:
        """From the values to xhat."""
        return Scaling.of(self.rstd, -self.mean * self.rstd, self.dtype)

    @cached_property
    def scale_and_shift(self) -> Scaling:
        """From the values to weight * xhat + bias."""
        a, b, weight, bias = self.rstd, -self.mean * self.rstd, self.kept.weight, self.kept.bias
        a, b = (a, b) if weight is None else (a * weight.to(a.dtype), b * weight.to(a.dtype))
        return Scaling.of(a, b if bias is None else b + bias.to(b.dtype), self.dtype)

    def before_activation(self, part: slice, x: Tensor, out: Tensor | None = None) -> Tensor:
        z, residual = self.scale_and_shift(part, x, out), self.kept.residual
        return z if residual is None else z.add_(residual[part])

    def gradient(self, part: slice, dy: Tensor, x: Tensor) -> Tensor:
        """dz of these samples."""
        dy, output = dy[part].to(self.dtype), self.kept.output
        if self.kept.norm.act == "relu":
            z = self.before_activation(part, x) if output is None else output[part].to(self.dtype)
            dz: Tensor = torch.ops.aten.threshold_backward(dy, z, 0.0)
            return dz
        some = self.kept._replace(output=None if output is None else output[part])
        return activation_grad(dy, some, lambda: self.before_activation(part, x))


def _axes(x: Tensor, per_sample: bool) -> list[int]:
    """The axes to sum over for one sum per channel, or per channel of each sample."""
    return [*range(2, x.dim())] if per_sample else [0, *range(2, x.dim())]


class Aten(AtenRows):
    """Torch's kernels on the CPU; the reference's formulas wherever those cannot be used."""

    name = "aten"

    def why_not(self, *tensors: Tensor | None, named: bool = False) -> list[str]:
        reasons = [
            f"torch's kernels are taken on the CPU, a tensor is {t.dtype} on {t.device}"
            for t in tensors
            if t is not None and (t.device.type != "cpu" or t.dtype not in DTYPES)
        ]
        return list(dict.fromkeys(reasons))

    @torch.no_grad()
    def channel_moments(self, x: Tensor, groups: int = 0, mask: Tensor | None = None) -> Moments:
        per_sample = groups > 0
        small = per_sample and (x.dim() == 2 or x[:1].numel() < _SMALL)
        if mask is not None or groups < 0 or small or not native.serves(x):
            return super().channel_moments(x, groups, mask)
        found = None if per_sample else native.batch_moments(x)
        if found is None and x.numel() < _SMALL:
            return super().channel_moments(x, groups)
        if found is not None:
            mean, var = (v.to(statistics_dtype(x)) for v in found)
            return Moments(mean, var * (x.numel() // x.shape[1]), x.numel() // x.shape[1])
        dtype, axes, channels = statistics_dtype(x), _axes(x, per_sample), x.shape[1]
        shape = (x.shape[0], groups) if per_sample else (channels,)
        count = x.numel() // math.prod(shape)
        empty = torch.zeros(shape, dtype=dtype)
        pieces = _Channels(KeptByChannelNorm(x, empty, empty))

        def sums(of: Callable[[slice], tuple[Tensor, ...]]) -> list[Tensor]:
            """Sums of these values, in float64, over each set."""
            of_parts = []
            for part in pieces.parts():
                of_part = torch.stack([v.to(dtype) for v in of(part)])
                of_parts.append(of_part.unflatten(2, (groups, -1)).sum(3) if per_sample else of_part)
            return list(torch.cat(of_parts, 1) if per_sample else torch.stack(of_parts).sum(0))

        (mean,) = (s / count for s in sums(lambda part: (pieces.values(part).sum(axes),)))
        rounded = torch.where(mean.isfinite(), mean, 0).to(pieces.dtype).to(dtype)
        pieces.high = pieces.of_channels(rounded).to(pieces.dtype)

        def deviations(part: slice) -> tuple[Tensor, Tensor]:
            deviation = pieces.values(part)
            return deviation.sum(axes), deviation.square_().sum(axes)

        rest, m2 = sums(deviations)
        rest = rest / count
        m2 = (m2 - rest * rest * count).clamp_min(0)
        mean = rounded + rest
        least = torch.finfo(pieces.dtype).tiny * 2.0**24 * count  # squares below may be lost
        wrong = ~(m2 > least) | ~m2.isfinite()
        if per_sample and bool(wrong.any()):
            return super().channel_moments(x, groups)
        if bool(wrong.any()):
            of_wrong = super().channel_moments(x[:, wrong])
            mean[wrong], m2[wrong] = of_wrong.mean, of_wrong.m2
        return Moments(mean, m2, count)

    def _pieces(self, kept: KeptByChannelNorm, *others: Tensor | None) -> _Channels | None:
        """The record, if torch's kernels can be used for it."""
        x, mean = kept.x, kept.mean
        tensors = mean, kept.rstd, kept.weight, kept.bias, kept.residual, kept.output
        if kept.mask is not None or not native.serves(x, *tensors, *others):
            return None
        if mean.dim() == 2 and (mean.shape[0] != x.shape[0] or x.dim() == 2):
            return None
        if mean.dim() == 2 and x[0].numel() < _SMALL and not x.is_contiguous():
            return None  # one call per sample
        return _Channels(kept) if native.usual(mean, kept.rstd) else None

    @torch.no_grad()
    def channel_normalize(self, kept: KeptByChannelNorm) -> Tensor:
        pieces = self._pieces(kept)
        if pieces is None:
            return super().channel_normalize(kept)
        act = kept.norm.act
        cheap = act in ("identity", "relu")  # the others have temporaries of their own
        if cheap and pieces.high is None and _is_exact(kept):
            residual = None if kept.residual is None else kept.residual.to(kept.x.dtype)
            if not pieces.per_sample:
                return native.behind(pieces.scale_and_shift(slice(None), kept.x), residual, act)
            if kept.x.is_contiguous():  # the channels of all samples, as those of one sample
                flat = kept.x.view(1, pieces.mean.numel(), -1)
                z = pieces.scale_and_shift.of_one_sample()(slice(0, 1), flat)
                return native.behind(z.view_as(kept.x), residual, act)
        y = torch.empty_like(kept.x)
        for part in pieces.parts():
            out = y[part] if y.dtype == pieces.dtype else None
            z = native.behind(pieces.before_activation(part, pieces.values(part), out), None, act)
            if z is not out:
                y[part] = z
        return y

    @torch.no_grad()
    def channel_grad_sums(self, dy: Tensor, kept: KeptByChannelNorm) -> tuple[Tensor, Tensor]:
        pieces = None if kept.x.numel() < _SMALL else self._pieces(kept, dy)
        if pieces is None:
            return super().channel_grad_sums(dy, kept)
        axes, sums = _axes(dy, pieces.per_sample), []
        for part in pieces.parts():
            x = pieces.values(part)
            dz = pieces.gradient(part, dy, x)
            product = pieces.normalize(part, x).mul_(dz)
            sums.append(torch.stack((dz.sum(axes), product.sum(axes))).to(statistics_dtype(dy)))
        total = torch.cat(sums, 1) if pieces.per_sample else torch.stack(sums).sum(0)
        return total[0], total[1]

    @torch.no_grad()
    def channel_input_grad(
        self,
        dy: Tensor,
        kept: KeptByChannelNorm,
        means: tuple[Tensor, Tensor] | None = None,
        want_dz: bool = False,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """dx as a * dz + (b * x + c) per channel."""
        pieces = self._pieces(kept, dy, into, *(means or ()))
        if pieces is None:
            return super().channel_input_grad(dy, kept, means, want_dz, into)
        dy = laid_out_for(kept.x, dy)
        dx = torch.empty_like(kept.x) if into is None else into
        all_dz = torch.empty_like(kept.x) if want_dz else None
        a = rstd = pieces.rstd
        if kept.weight is not None:
            a = a * kept.weight.to(a.dtype)
        of_dz, of_x = Scaling.of(a, torch.zeros_like(a), pieces.dtype), None
        if means is None and kept.norm.act == "identity" and not pieces.per_sample and native.dense(kept.x):
            dy = like(kept.x, dy)
            return of_dz(slice(None), dy), dy if want_dz else None
        if means is not None:
            p, q = map(pieces.of_channels, means)
            b = -rstd * rstd * q
            of_x = Scaling.of(b, -rstd * p - b * pieces.mean, pieces.dtype)
        for part in pieces.parts():
            x = pieces.values(part)
            dz = pieces.gradient(part, dy, x)
            if all_dz is not None:
                all_dz[part] = dz
            rest = None if of_x is None else of_x(part, x)  # before x is overwritten
            out = dx[part] if dx.dtype == pieces.dtype else None
            grad = of_dz(part, dz, out)
            if rest is not None:
                grad.add_(rest)
            if out is None:
                dx[part] = grad
        return dx, all_dz

    @torch.no_grad()
    def channel_forward(self, tensors: ChannelTensors, norm: Channels) -> Forward:
        x, *_, mean, _, _, mask = tensors
        plain = norm.groups > 0 and mean is mask is None and native.serves(*tensors[:4])
        made = native.group_moments(x, norm.eps, norm.groups) if plain else None
        if made is None:
            return super().channel_forward(tensors, norm)
        mean, m2, rstd = made
        return self.channel_normalize(kept_of(tensors, mean, rstd, norm)), mean, m2, rstd, None

    @torch.no_grad()
    def channel_backward(
        self, dy: Tensor, kept: KeptByChannelNorm, want_dz: bool = False, into: Tensor | None = None
    ) -> Backward:
        x, weight, groups, act = kept.x, kept.weight, kept.norm.groups, kept.norm.act
        plain = kept.norm.by_batch and kept.mask is None and groups >= 0
        plain = plain and native.serves(x, dy, *kept[1:7])
        wide = weight is not None and weight.dtype == torch.float64 != x.dtype  # its gradients are exact
        if act not in ("identity", "relu") and x.dtype != compute_dtype(x):
            wide = True  # a rounded z may be on the other side of a jump of the derivative
        if not plain or wide or not native.dense(x) or not native.near(kept.mean, kept.rstd):
            return super().channel_backward(dy, kept, want_dz, into)
        dz = self._dz(like(x, dy), kept)
        dx, dweight, dbias = native.channel_backward(dz, kept)
        if native.adds_in_a_row(x):
            sums = self.channel_grad_sums(dy, kept)
            dbias, dweight = ((s.sum(0) if groups else s).to(dweight.dtype) for s in sums)
        return dx, dweight, dbias, dz if want_dz else None

    def _dz(self, dy: Tensor, kept: KeptByChannelNorm) -> Tensor:
        """The gradient before the activation, in x's dtype and layout."""
        act = kept.norm.act
        if act == "identity":
            return dy
        given = kept.output is not None and ACTIVATIONS[act].from_output is not None
        z = kept.output if given else None
        if z is None:
            z = self.channel_normalize(kept._replace(norm=kept.norm._replace(act="identity")))
        if act == "relu":
            of_relu: Tensor = torch.ops.aten.threshold_backward(dy, z, 0.0)
            return of_relu
        dz, dtype, step = torch.empty_like(kept.x), compute_dtype(dy), max(1, _SLICE // dy[0].numel())
        for i in range(0, len(dz), step):
            part = slice(i, i + step)
            some = kept._replace(output=z[part] if given else None)
            dz[part] = activation_grad(dy[part], some, partial(z[part].to, dtype))
        return dz


ATEN = Aten()
