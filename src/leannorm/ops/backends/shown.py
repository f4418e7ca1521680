"""Per-channel norms as `torch.compile` sees them: the moments are an operator, everything else is a formula.

An operator is opaque. The compiler cannot fuse it with its neighbours, cannot recompute its output instead of
saving it (an activation before squeeze-and-excite would be saved in addition to the norm's input), and must
pass it the layout of the eager program: compiled convolutions on a CPU are channels_last, so tensors would be
copied before and after each operator. So everything elementwise is written out here, and so are the
gradients' sums, which the compiler fuses with what they sum. The moments stay an operator, which takes any
layout: it reads the input once, while an equally exact formula reads it three times.

Per-channel values are computed in float64 and cast once, into the rows of one small tensor; as a part of the
formula they would be computed for every element. As in all kernels the mean is subtracted in two parts: the
larger one from x, which is exact where it matters, the rest after the scaling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm._types import KeptByChannelNorm, Moments
from leannorm.ops import schema
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends.backend import Backend
from leannorm.ops.backends.compiled import Compiled, dense
from leannorm.ops.backends.reference import activation_grad
from leannorm.ops.modes import traced
from leannorm.ops.plan import channel_plan
from leannorm.ops.precision import compute_dtype, in_dtype, statistics_dtype


class Shown(Backend):
    """The verbs for statistics of the batch, or of each sample's groups of channels, in compiled code.

    `channel_forward` and `channel_backward` are the reference's, which call these.
    """

    name = "shown"

    def why_not(self, *tensors: Tensor | None, named: bool = False) -> list[str]:
        """It is used where the operators are, and is never chosen by name."""
        return []

    def channel_moments(self, x: Tensor, groups: int = 0, mask: Tensor | None = None) -> Moments:
        assert mask is None
        plan = channel_plan(x.shape, groups)
        mean, m2, _ = schema.OPS.channel_moments(dense(x), groups)
        return Moments(mean, m2, plan.outer * plan.inner)

    def channel_normalize(self, kept: KeptByChannelNorm) -> Tensor:
        return in_dtype(ACTIVATIONS[kept.norm.act].forward(_before_activation(kept)), kept.x.dtype)

    def channel_grad_sums(self, dy: Tensor, kept: KeptByChannelNorm) -> tuple[Tensor, Tensor]:
        x, dz = kept.x, activation_grad(dy, kept, lambda: _before_activation(kept))
        dims = [d for d in range(x.dim()) if d > 1 or (d == 0 and kept.mean.dim() == 1)]
        sums = (v.sum(dims) if dims else v for v in (dz, dz * _xhat(kept)))
        sum_dz, sum_dz_xhat = (s.to(statistics_dtype(x)) for s in sums)
        return sum_dz, sum_dz_xhat

    def channel_input_grad(
        self,
        dy: Tensor,
        kept: KeptByChannelNorm,
        means: tuple[Tensor, Tensor] | None = None,
        want_dz: bool = False,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`into` is not used."""
        x, dz = kept.x, activation_grad(dy, kept, lambda: _before_activation(kept))
        scale = rstd = _of_channels(x, kept.rstd)
        if kept.weight is not None:
            scale = scale * kept.weight
        if means is None:
            (factor,) = _rows(x, scale)
            dx = dz * factor
        else:
            mean_dz, mean_dz_xhat = (_of_channels(x, v) * rstd for v in means)
            factor, of_dz, of_xhat = _rows(x, scale, mean_dz, mean_dz_xhat)
            dx = dz * factor - of_dz - _xhat(kept) * of_xhat
        return dx.to(x.dtype), dz.to(x.dtype) if want_dz else None


def _of_channels(x: Tensor, v: Tensor) -> Tensor:
    """(C,) as it is; (N, G) as (N, C)."""
    return v if v.dim() == 1 else v[..., None].expand(*v.shape, x.shape[1] // v.shape[1]).flatten(1)


def _rows(x: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """(C,) or (N, C) values in the arithmetic's dtype, computed once, spread to broadcast against x."""
    rows = torch.stack([v.to(compute_dtype(x)) for v in values])
    return rows.view(*rows.shape, *(1,) * (x.dim() - 2)).unbind()


def _centred(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
    """(x - mean) * scale + shift; all but x have one value per channel."""
    mean = _of_channels(x, mean)
    large = mean.to(compute_dtype(x))
    rest = (large - mean) * scale
    large, scale, rest = _rows(x, large, scale, rest if shift is None else rest + shift)
    return (x.to(large.dtype) - large) * scale + rest


def _xhat(kept: KeptByChannelNorm) -> Tensor:
    return _centred(kept.x, kept.mean, _of_channels(kept.x, kept.rstd))


def _before_activation(kept: KeptByChannelNorm) -> Tensor:
    scale = _of_channels(kept.x, kept.rstd)
    scale = scale if kept.weight is None else scale * kept.weight
    z = _centred(kept.x, kept.mean, scale, kept.bias)
    return z if kept.residual is None else z + kept.residual.to(z.dtype)


SHOWN = Shown()


def shown(backend: Backend, groups: int = 0, mask: Tensor | None = None) -> Backend:
    """In compiled code `SHOWN` instead of a backend whose verbs are operators.

    Not for statistics of groups of samples (`groups` below 0), and not with a mask.
    """
    if traced() and isinstance(backend, Compiled) and groups >= 0 and mask is None:
        return SHOWN
    return backend
