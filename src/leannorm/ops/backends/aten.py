"""The verbs by torch's own kernels, for large CPU tensors where the C++ kernels are not built.

The reference writes each operation of a formula by itself. Here the same formulas are few passes over some
samples, or rows, at a time: a * x + b of each channel is torch's batch norm in evaluation. Torch's norms
themselves are taken where they are as exact as the reference. A mean of many standard deviations is
subtracted first. Values whose squares overflow or vanish in float32 are left to the reference, and so is
what autograd or a compiler may record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from leannorm._types import KeptByChannelNorm, KeptByRowNorm, Maybe, Moments, Rows
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends.backend import Backend
from leannorm.ops.backends.compiled import DTYPES
from leannorm.ops.backends.reference import _SLICE, activation_grad
from leannorm.ops.backends.reference_rows import shifted_weight
from leannorm.ops.layout import laid_out_for
from leannorm.ops.modes import recorded, traced, transformed
from leannorm.ops.plan import row_plan
from leannorm.ops.precision import compute_dtype, row_gradient_dtype, statistics_dtype

_SMALL = 1 << 12  # fewer are the reference's: a call of torch's takes as long as these
_NEAR = 4.0  # standard deviations between 0 and a mean that costs no digit
_USUAL = 1e-10, 1e10  # of rstd: its square is far from what float32 cannot hold


def _serves(x: Tensor, *others: Tensor | None) -> bool:
    """Are these large, plain tensors, of which nobody records what is computed?"""
    if traced() or transformed(x, *others) or recorded(x, *others):
        return False
    return x.numel() >= _SMALL and all(type(t) in (Tensor, Parameter) for t in (x, *others) if t is not None)


def _usual(mean: Tensor, rstd: Tensor) -> bool:
    """May the statistics be squared, and are they finite?"""
    return bool(((rstd > _USUAL[0]) & (rstd < _USUAL[1]) & mean.isfinite()).all())


def _far(mean: Tensor, rstd: Tensor) -> bool:
    return bool(((mean * rstd).abs() > _NEAR).any())


class Scaling(NamedTuple):
    """a * x + b of each channel, as torch's batch norm in evaluation computes it, in one pass.

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

    def __call__(self, part: slice, x: Tensor, out: Tensor | None = None) -> Tensor:
        at = part.start if self.a.shape[0] > 1 else 0
        given = x, self.a[at], self.b[at], self.zero, self.one, False, 0.0, 0.0
        if out is None:
            y: Tensor = torch.native_batch_norm(*given)[0]
            return y
        torch.native_batch_norm(*given, out=(out, x.new_empty(0), x.new_empty(0)))
        return out


class _Channels:
    """What is kept, some samples at a time; of statistics of each sample, one sample."""

    def __init__(self, kept: KeptByChannelNorm) -> None:
        self.kept, self.x, self.dtype = kept, kept.x, compute_dtype(kept.x)
        self.per_sample = kept.mean.dim() == 2
        self.high: Tensor | None = None
        self.mean, self.rstd = self.of_channels(kept.mean), self.of_channels(kept.rstd)
        if _far(kept.mean, kept.rstd):
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
        """x of these samples, without the larger part of a mean that is far from 0."""
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
        a, b, (weight, bias, *_) = self.rstd, -self.mean * self.rstd, self.kept.epilogue()
        a, b = (a, b) if weight is None else (a * weight.to(a.dtype), b * weight.to(a.dtype))
        return Scaling.of(a, b if bias is None else b + bias.to(b.dtype), self.dtype)

    def before_activation(self, part: slice, x: Tensor, out: Tensor | None = None) -> Tensor:
        z, residual = self.scale_and_shift(part, x, out), self.kept.residual
        return z if residual is None else z.add_(residual[part])

    def gradient(self, part: slice, dy: Tensor, x: Tensor) -> Tensor:
        """dz of these samples."""
        dy, output = dy[part].to(self.dtype), self.kept.output
        if self.kept.act == "relu":
            z = self.before_activation(part, x) if output is None else output[part].to(self.dtype)
            dz: Tensor = torch.ops.aten.threshold_backward(dy, z, 0.0)
            return dz
        some = self.kept._replace(output=None if output is None else output[part])
        return activation_grad(dy, some, lambda: self.before_activation(part, x))


def _axes(x: Tensor, per_sample: bool) -> list[int]:
    """Over which a sum is one of each channel, or of each channel of each sample."""
    return [*range(2, x.dim())] if per_sample else [0, *range(2, x.dim())]


class Aten(Backend):
    """Torch's kernels on the CPU; in each case that they do not serve, the reference's formulas."""

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
        if mask is not None or groups < 0 or small or not _serves(x):
            return super().channel_moments(x, groups, mask)
        dtype, axes, channels = statistics_dtype(x), _axes(x, per_sample), x.shape[1]
        shape = (x.shape[0], groups) if per_sample else (channels,)
        count = x.numel() // math.prod(shape)
        empty = torch.zeros(shape, dtype=dtype)
        pieces = _Channels(KeptByChannelNorm(x, empty, empty))

        def sums(of: Callable[[slice], tuple[Tensor, ...]]) -> list[Tensor]:
            """Sums of these values, in float64, over each set."""
            found = []
            for part in pieces.parts():
                of_part = torch.stack([v.to(dtype) for v in of(part)])
                found.append(of_part.unflatten(2, (groups, -1)).sum(3) if per_sample else of_part)
            return list(torch.cat(found, 1) if per_sample else torch.stack(found).sum(0))

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
        """What is kept, if torch's kernels serve it."""
        x, mean = kept.x, kept.mean
        tensors = mean, kept.rstd, kept.weight, kept.bias, kept.residual, kept.output
        if kept.mask is not None or not _serves(x, *tensors, *others):
            return None
        if mean.dim() == 2 and (mean.shape[0] != x.shape[0] or x[0].numel() < _SMALL or x.dim() == 2):
            return None
        return _Channels(kept) if _usual(mean, kept.rstd) else None

    @torch.no_grad()
    def channel_normalize(self, kept: KeptByChannelNorm) -> Tensor:
        pieces = self._pieces(kept)
        if pieces is None:
            return super().channel_normalize(kept)
        y = torch.empty_like(kept.x)
        for part in pieces.parts():
            out = y[part] if y.dtype == pieces.dtype else None
            z = pieces.before_activation(part, pieces.values(part), out)
            if kept.act == "relu":
                z.relu_()
            elif kept.act != "identity":
                z = ACTIVATIONS[kept.act].forward(z)
            if z is not out:
                y[part] = z
        return y

    @torch.no_grad()
    def channel_grad_sums(self, dy: Tensor, kept: KeptByChannelNorm) -> tuple[Tensor, Tensor]:
        pieces = self._pieces(kept, dy)
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
        """As a * dz + (b * x + c) of each channel."""
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
    def row_forward(
        self, x: Tensor, residual: Maybe, weight: Maybe, bias: Maybe, rows: Rows, valid: Maybe = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        given = x, residual, weight, bias, valid
        size = _row_size(x, rows)
        between = rows.cast_before and not rows.rms  # a cast between the norm and the weight: torch has none
        if not size or valid is not None or between or not _serves(*given):
            return super().row_forward(*given[:4], rows, valid)
        total = x if residual is None else x + residual.to(x.dtype)
        if rows.rms:
            return self._rms_forward(total, weight, bias, rows, size)
        shape = total.shape[rows.start :]
        dtype = compute_dtype(x)
        gamma = torch.ones(shape, dtype=dtype)
        gamma = gamma if weight is None else shifted_weight(weight, rows.weight_offset, dtype)
        beta = torch.zeros_like(gamma) if bias is None else bias.to(dtype)
        y, mean, rstd = torch.native_layer_norm(total, shape, gamma, beta, rows.eps)
        if not _usual(mean, rstd) or _far(mean, rstd):
            return super().row_forward(total, None, weight, bias, rows)
        return y, total, mean, rstd

    def _rms_forward(
        self, x: Tensor, weight: Maybe, bias: Maybe, rows: Rows, size: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The reference's, some rows at a time: its temporaries stay in cache."""
        flat = x.reshape(-1, *x.shape[rows.start :])
        of_flat = rows._replace(start=1, stop=flat.dim())
        y, rstd = torch.empty_like(flat), x.new_empty(flat.shape[0], dtype=compute_dtype(x))
        for part in _row_parts(flat, size):
            y_of, _, _, rstd_of = super().row_forward(flat[part], None, weight, bias, of_flat)
            if y_of.dtype != y.dtype:
                return super().row_forward(x, None, weight, bias, rows)
            y[part], rstd[part] = y_of, rstd_of.flatten()
        rstd = rstd.reshape(*x.shape[: rows.start], *(1,) * (x.dim() - rows.start))
        return y.reshape(x.shape), x, torch.zeros_like(rstd), rstd

    @torch.no_grad()
    def row_backward(
        self, dy: Tensor, dtotal: Tensor | None, kept: KeptByRowNorm, rows: Rows, want_affine: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, mean, rstd, weight, valid = kept
        size = _row_size(x, rows)
        if not size or valid is not None or not _serves(x, mean, rstd, weight, dy, dtotal):
            return super().row_backward(dy, dtotal, kept, rows, want_affine)
        native = not rows.rms and dy.dtype == x.dtype and _usual(mean, rstd) and not _far(mean, rstd)
        if native and x.dtype == compute_dtype(x):
            return _layer_norm_backward(dy, dtotal, kept, rows, want_affine)
        return self._some_rows_backward(dy, dtotal, kept, rows, size, want_affine, native)

    def _some_rows_backward(
        self,
        dy: Tensor,
        dtotal: Tensor | None,
        kept: KeptByRowNorm,
        rows: Rows,
        size: int,
        want_affine: bool,
        native: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The reference's, some rows at a time; `native`: the input gradient by torch's kernel."""
        x, shape = kept.x, kept.x.shape[rows.start :]
        each, of_flat = (-1, *(1,) * len(shape)), rows._replace(start=1, stop=1 + len(shape))
        flat, dy = x.reshape(-1, *shape), dy.reshape(-1, *shape)
        mean, rstd = kept.mean.reshape(each), kept.rstd.reshape(each)
        through = None if dtotal is None else dtotal.reshape(-1, *shape)
        dx, sums = torch.empty_like(flat), []
        for part in _row_parts(flat, size):
            some = KeptByRowNorm(flat[part], mean[part], rstd[part], kept.weight)
            given = dy[part], None if through is None else through[part], some, of_flat
            dx[part] = _layer_norm_backward(*given, False)[0] if native else self.row_input_grad(*given)
            if want_affine:
                sums.append(torch.stack(self.row_grad_sums(dy[part], some, of_flat)).to(statistics_dtype(x)))
        if not want_affine:
            return dx.reshape(x.shape), None, None
        dweight, dbias = torch.stack(sums).sum(0).to(row_gradient_dtype(x, kept.weight))
        return dx.reshape(x.shape), dweight, None if rows.rms else dbias


def _row_size(x: Tensor, rows: Rows) -> int:
    """Values of a row, where rows are lines of memory; else 0."""
    lines = rows.stop == x.dim() and x.is_contiguous()
    return row_plan(x.shape, rows.start, rows.stop).kept if lines else 0


def _row_parts(flat: Tensor, size: int) -> Iterator[slice]:
    step = max(1, _SLICE // size)
    return (slice(i, i + step) for i in range(0, flat.shape[0], step))


def _layer_norm_backward(
    dy: Tensor, dtotal: Tensor | None, kept: KeptByRowNorm, rows: Rows, want_affine: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x, mean, rstd, weight, _ = kept
    shape, dtype = x.shape[rows.start :], compute_dtype(x)
    gamma = torch.ones(shape, dtype=dtype)
    gamma = gamma if weight is None else shifted_weight(weight, rows.weight_offset, dtype)
    wanted = True, want_affine, want_affine
    given = dy.contiguous(), x, shape, mean, rstd, gamma, torch.zeros_like(gamma), wanted
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(*given)
    dx = dx if dtotal is None else (dx.to(dtype) + dtotal.to(dtype)).to(x.dtype)
    if not want_affine:
        return dx, None, None
    dtype = row_gradient_dtype(x, weight)
    return dx, dweight.to(dtype), dbias.to(dtype)


ATEN = Aten()
