"""The specification: every verb of both families in plain torch, on any device and dtype.

A tensor is seen as (outer, kept, inner). The channel family keeps statistics of every `kept` index over
outer and inner (batch, sync, group, instance norm); the row family normalizes over `kept`, with
statistics of every (outer, inner) (layer, RMS norm). Both are five verbs:

    moments -> merge -> normalize -> gradient sums -> input gradient

Everything here is differentiable torch, so autograd can differentiate it again; the other backends
compute the same numbers faster. Half precision is computed in float32 and cast once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm._types import Moments
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.plan import channel_plan, row_plan, statistics_shape


def compute_dtype(x: Tensor) -> torch.dtype:
    """Element arithmetic: float64 for float64 input, float32 for everything else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Per-channel statistics: float64 (they are few), float32 on devices that have no float64."""
    return torch.float32 if x.device.type == "mps" else torch.float64


# ---------------------------------------------------------------- channel family: (N, C, *)


def _per_channel(v: Tensor, x: Tensor) -> Tensor:
    """Statistics (C,) or (N, G), spread so that they broadcast against (N, C, *)."""
    if v.dim() == 2:
        v = v.repeat_interleave(x.shape[1] // max(v.shape[1], 1), dim=1)
    else:
        v = v.unsqueeze(0)
    return v.reshape(*v.shape, *(1,) * (x.dim() - 2))


def channel_moments(x: Tensor, groups: int = 0) -> Moments:
    """Mean and M2 of every channel (or of every group of every sample); 0 and 0 where there is no value.

    Two passes with the correction of Chan, Golub and LeVeque (1983): the deviations' own mean, which
    would be zero in exact arithmetic, mends the rounding of the first.
    """
    plan = channel_plan(x.shape, groups)
    count, shape, dtype = plan.outer * plan.inner, statistics_shape(x.shape, groups), statistics_dtype(x)
    folded = x.reshape(plan).to(compute_dtype(x))
    mean = folded.sum((0, 2), keepdim=True) / max(count, 1)
    deviation = folded - mean
    rest = deviation.sum((0, 2)).to(dtype) / max(count, 1)
    m2 = _sum_of_squares(deviation, (0, 2), dtype).flatten() - rest * rest * count
    return Moments((mean.flatten().to(dtype) + rest).reshape(shape), m2.clamp_min(0).reshape(shape), count)


def _sum_of_squares(deviation: Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Sum of squares over `dims` (kept as 1), scaled by the largest so that 1e30 squared is no infinity."""
    if deviation.numel() == 0:
        return deviation.sum(dims, keepdim=True).to(dtype)
    scale = deviation.detach().abs().amax(dims, keepdim=True)
    scale = torch.where((scale > 0) & scale.isfinite(), scale, torch.ones_like(scale))
    norm = torch.linalg.vector_norm(deviation / scale, dim=dims, keepdim=True)
    return norm.to(dtype).square() * scale.to(dtype).square()


def rstd_of(moments: Moments, eps: float) -> Tensor:
    """1 / sqrt(biased variance + eps); an empty set has variance 0."""
    count = moments.count
    divisor = count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)
    return torch.rsqrt(moments.m2 / divisor + eps)


def merge(moments: Moments, dim: int = 0) -> Moments:
    """Merge the sets stacked along `dim` into one (parallel variance, Chan et al.); empty sets do nothing."""
    mean, m2, count = moments
    n = torch.as_tensor(count, dtype=mean.dtype, device=mean.device).expand_as(mean)
    total = n.sum(dim)
    merged = (mean * n).sum(dim) / total.clamp_min(1)
    between = (n * (mean - merged.unsqueeze(dim)).square()).sum(dim)
    return Moments(merged, m2.sum(dim) + between, total)


def _xhat(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """(x - mean) * rstd in compute dtype; the mean is split in two so that a large one loses nothing."""
    dtype = compute_dtype(x)
    high = mean.to(dtype)
    low = (mean - high.to(mean.dtype)).to(dtype)
    centred = x.to(dtype) - _per_channel(high, x) - _per_channel(low, x)
    return centred * _per_channel(rstd.to(dtype), x)


def _affine(xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        xhat = xhat * _per_channel(weight.to(xhat.dtype), xhat)
    return xhat if bias is None else xhat + _per_channel(bias.to(xhat.dtype), xhat)


def channel_normalize(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    act: str = "identity",
) -> Tensor:
    """act((x - mean) * rstd * weight + bias + residual), in x's dtype and layout."""
    z = _affine(_xhat(x, mean, rstd), weight, bias)
    if residual is not None:
        z = z + residual.to(z.dtype)
    return ACTIVATIONS[act].forward(z).to(x.dtype)


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
    if out is not None and activation.grad_from_output is not None:
        return dz * activation.grad_from_output(out.to(xhat.dtype))
    z = _affine(xhat, weight, bias)
    if residual is not None:
        z = z + residual.to(z.dtype)
    return dz * activation.grad(z)


def channel_grad_sums(
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
    """Sums of dz and of dz * xhat: (C,) where the statistics are of the batch, (N, C) where per sample."""
    xhat, dtype = _xhat(x, mean, rstd), statistics_dtype(x)
    dz = _activation_grad(dy, xhat, weight, bias, residual, out, act)
    dims = [d for d in range(x.dim()) if d != 1 and not (d == 0 and mean.dim() == 2)]
    if not dims:  # (N, C) input with per-sample statistics: nothing to add up
        return dz.to(dtype), (dz * xhat).to(dtype)
    return dz.sum(dims).to(dtype), (dz * xhat).sum(dims).to(dtype)


def channel_input_grad(
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
) -> tuple[Tensor, Tensor | None]:
    """dx = rstd * (weight * dz - p - xhat * q), and dz (the residual's gradient) if wanted, in x's dtype.

    p and q have the statistics' shape: the means over the set of weight*dz and of weight*dz*xhat;
    None where the statistics are constants (evaluation).
    """
    xhat = _xhat(x, mean, rstd)
    dz = _activation_grad(dy, xhat, weight, bias, residual, out, act)
    inner = dz if weight is None else dz * _per_channel(weight.to(dz.dtype), x)
    if p is not None and q is not None:
        inner = inner - _per_channel(p.to(dz.dtype), x) - xhat * _per_channel(q.to(dz.dtype), x)
    dx = (inner * _per_channel(rstd.to(dz.dtype), x)).to(x.dtype)
    return dx, dz.to(x.dtype) if want_dz else None


def channel_means(
    sum_dz: Tensor, sum_dz_xhat: Tensor, weight: Tensor | None, groups: int, count: int | Tensor
) -> tuple[Tensor, Tensor]:
    """p and q of `channel_input_grad`: the gradient sums, weighted, added up in groups, over the count."""
    divisor = count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)

    def mean(s: Tensor) -> Tensor:
        s = s if weight is None else s * weight.to(s.dtype)
        return (s if groups == 0 else s.unflatten(1, (groups, -1)).sum(2)) / divisor

    return mean(sum_dz), mean(sum_dz_xhat)


def channel_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    act: str = "identity",
    groups: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """moments and normalize as one call: y, mean, m2, rstd."""
    moments = channel_moments(x, groups)
    rstd = rstd_of(moments, eps)
    return (
        channel_normalize(x, moments.mean, rstd, weight, bias, residual, act),
        moments.mean,
        moments.m2,
        rstd,
    )


def channel_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """gradient sums and input gradient as one call: dx, dweight, dbias (statistics dtype, (C,)), dz."""
    plan = channel_plan(x.shape, groups)
    sums = channel_grad_sums(dy, x, mean, rstd, weight, bias, residual, out, act)
    p, q = channel_means(*sums, weight, groups, plan.outer * plan.inner)
    dx, dz = channel_input_grad(dy, x, mean, rstd, weight, bias, residual, out, p, q, act, want_dz)
    dbias, dweight = sums if groups == 0 else (s.sum(0) for s in sums)
    return dx, dweight, dbias, dz


# ---------------------------------------------------------------- row family: axes start..stop-1


def _along_row(v: Tensor, x: Tensor, start: int, stop: int) -> Tensor:
    """weight or bias of the normalized shape, spread so that it broadcasts against x."""
    return v.reshape(*x.shape[start:stop], *(1,) * (x.dim() - stop))


def row_moments(x: Tensor, start: int, stop: int, eps: float, rms: bool = False) -> tuple[Tensor, Tensor]:
    """mean and rstd of every row, compute dtype, 1 in place of the normalized axes (RMS: mean is 0)."""
    dims, dtype = tuple(range(start, stop)), compute_dtype(x)
    x = x.to(dtype)
    count = max(row_plan(x.shape, start, stop).kept, 1)
    if rms:
        square = _sum_of_squares(x, dims, statistics_dtype(x)) / count
        return torch.zeros_like(square, dtype=dtype), torch.rsqrt(square + eps).to(dtype)
    mean = x.sum(dims, keepdim=True) / count
    deviation = x - mean
    rest = deviation.sum(dims, keepdim=True) / count
    square = _sum_of_squares(deviation, dims, statistics_dtype(x)) / count - rest.square()
    return mean + rest, torch.rsqrt(square.clamp_min(0) + eps).to(dtype)


def row_normalize(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    start: int,
    stop: int,
) -> Tensor:
    """(x - mean) * rstd * weight + bias, in x's dtype."""
    y = (x.to(mean.dtype) - mean) * rstd
    y = y if weight is None else y * _along_row(weight.to(y.dtype), x, start, stop)
    y = y if bias is None else y + _along_row(bias.to(y.dtype), x, start, stop)
    return y.to(x.dtype)


def row_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    start: int,
    stop: int,
    eps: float,
    rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, x + residual (x itself where there is none), mean, rstd."""
    total = x if residual is None else x + residual.to(x.dtype)
    mean, rstd = row_moments(total, start, stop, eps, rms)
    return row_normalize(total, mean, rstd, weight, bias, start, stop), total, mean, rstd


def row_grad_sums(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """dweight = sum over rows of dy * (x - mean) * rstd; dbias = sum of dy."""
    dy = dy.to(mean.dtype)
    dims = [d for d in range(x.dim()) if not start <= d < stop]
    shape = x.shape[start:stop]
    dgamma, dbeta = dy * ((x.to(mean.dtype) - mean) * rstd), dy
    if dims:
        dgamma, dbeta = dgamma.sum(dims), dbeta.sum(dims)
    return dgamma.reshape(shape), dbeta.reshape(shape)


def row_input_grad(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    start: int,
    stop: int,
    rms: bool = False,
) -> Tensor:
    """dx = a*dy*weight + b*x + c, of each row; RMS norm has no c.

    With ds = sum(dy*w*x), db = sum(dy*w), n values a row:
    a = rstd, b = (db*mean - ds) * a^3 / n, c = -b*mean - db*a/n.
    Written here for xhat = (x - mean)*rstd in place of x, which is the same formula without the
    cancellation in db*mean - ds and the overflow of a^3: dx = a * (g - mean(g) - xhat * mean(g*xhat)).
    """
    dims = tuple(range(start, stop))
    count = max(row_plan(x.shape, start, stop).kept, 1)
    g = dy.to(mean.dtype)
    g = g if weight is None else g * _along_row(weight.to(g.dtype), x, start, stop)
    xhat = (x.to(mean.dtype) - mean) * rstd
    inner = g - xhat * ((g * xhat).sum(dims, keepdim=True) / count)
    if not rms:
        inner = inner - g.sum(dims, keepdim=True) / count
    return (rstd * inner).to(x.dtype)


def row_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    start: int,
    stop: int,
    rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias (both of the normalized shape, compute dtype)."""
    dweight, dbias = row_grad_sums(dy, x, mean, rstd, start, stop)
    return row_input_grad(dy, x, mean, rstd, weight, start, stop, rms), dweight, dbias


def why_not(*tensors: Tensor | None) -> list[str]:
    """The reference serves every call."""
    return []
