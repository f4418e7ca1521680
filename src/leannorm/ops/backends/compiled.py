"""The verbs, each as a call of the operator that `schema.py` describes. `backend.py` says what they mean.

An input that is contiguous or channels_last is passed on as it is; any other is made contiguous first, and
the other tensors are brought into its layout. torch's dispatcher chooses the kernel: C++ for CPU tensors,
Triton for CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from leannorm._types import (
    Channels,
    ChannelTensors,
    KeptByChannelNorm,
    KeptByRowNorm,
    Maybe,
    MaybeTensor,
    Moments,
    Rows,
    RowTensors,
    Running,
)
from leannorm.ops import schema
from leannorm.ops.backends.backend import Backend
from leannorm.ops.backends.reference import Backward, Forward
from leannorm.ops.backends.reference_rows import rounded_then_weighted, spread, summed_like
from leannorm.ops.plan import channel_plan
from leannorm.ops.precision import compute_dtype

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _channels_last(x: Tensor) -> bool:
    if x.dim() == 4:  # the same as below, without making a view
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).is_contiguous()


def is_dense(x: Tensor) -> bool:
    return x.layout is torch.strided and (x.is_contiguous() or _channels_last(x))


def dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() or _channels_last(x) else x.contiguous()


def like(x: Tensor, other: MaybeTensor) -> MaybeTensor:
    """`other` in the dtype and layout of x, which is dense."""
    if other is None:
        return other
    if other.dtype != x.dtype:
        other = other.to(x.dtype)
    if x.is_contiguous():
        return other.contiguous()
    return other if _channels_last(other) else other.movedim(1, -1).contiguous().movedim(-1, 1)


def flat(v: Tensor | None) -> Tensor | None:
    return None if v is None else v.contiguous()


def apart(t: Tensor, start: int, dtype: torch.dtype) -> Tensor:
    """(rows, kept), each row contiguous; a copy only if the axes do not make it so."""
    t = t if t.dtype is dtype else t.to(dtype)
    if start != 1 or t.dim() != 2:
        t = t.reshape(-1, prod(t.shape[start:]))
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def wider(t: Tensor | None, x: Tensor) -> bool:
    """Whether t loses digits in the dtype of x."""
    return t is not None and torch.promote_types(t.dtype, x.dtype) != x.dtype


def _by_group(wide: Tensor, x: Tensor, start: int) -> bool:
    """Whether v, spread to x's axes, has x's sizes on the first axes and size 1 after them."""
    broadcast = False
    for size, of_x in zip(wide.shape[:start], x.shape[:start], strict=True):
        if of_x == 1:
            continue
        if broadcast and size != 1:
            return False
        broadcast = size == 1
    return True


def _from_lines(lines: Tensor, v: Tensor, x: Tensor, start: int) -> Tensor:
    """Sums over each line's rows, of v's shape."""
    if lines.numel() == v.numel():
        return lines.view(v.shape)
    return summed_like(lines.view(x.shape), v, start)


def _of_lines(
    dweight: Tensor, dbias: Tensor, dy: Tensor, kept: KeptByRowNorm, start: int, want_bias: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of a weight and a bias from those of their lines."""
    x, _, _, weight, *_ = kept
    assert weight is not None
    if want_bias and dbias.shape != dweight.shape:  # the sum over one row is dy itself
        alike = weight.shape == dy.shape
        # never a view of dy, which autograd would take for a tensor of its own
        dbias = dy if alike else summed_like(dy.to(dweight.dtype, copy=True), weight, start)
    elif want_bias:
        dbias = _from_lines(dbias, weight, x, start)
    return _from_lines(dweight, weight, x, start), dbias


def _is_dy(kept: KeptByChannelNorm) -> bool:
    """Whether the gradient before the activation is dy itself, so that kernels do not write it."""
    return kept.norm.act == "identity" and kept.mask is None


def _wanted_dz(dy: Tensor, dz: Tensor, kept: KeptByChannelNorm, want_dz: bool) -> Tensor | None:
    if not want_dz:
        return None
    return dy if _is_dy(kept) else dz


def _number(momentum: float | Tensor | None) -> float | None:
    """The value of a momentum that is a tensor: a record of a call's settings must not keep the tensor
    alive."""
    return float(momentum) if isinstance(momentum, Tensor) else momentum


def _increment_versions(buffers: Iterable[Tensor | None]) -> None:
    """Mark an edit as torch's in-place operations do, so that autograd detects it in a tensor that it
    saved."""
    torch._C._increment_version([b for b in buffers if b is not None and not b.is_inference()])


class Compiled(Backend):
    """Kernels behind operators; `ops` offers these by name. A verb that has an operator calls it."""

    narrow_lines = False  # whether the kernels take lines of x's dtype, and sum in the arithmetic's

    def __init__(self, ops: Any = schema.OPS) -> None:
        self.ops = ops

    def why_not(self, *tensors: Tensor | None, named: bool = False) -> list[str]:
        """The properties of these tensors that no compiled kernel supports, on any device."""
        reasons = []
        for t in tensors:
            if t is None:
                continue
            if t.dtype not in DTYPES:
                reasons.append(
                    f"the kernels take float32, float64, bfloat16 and float16, a tensor is {t.dtype}"
                )
            if t.is_sparse or t.is_mkldnn:
                reasons.append("the kernels take strided tensors, one is not")
        return reasons

    def _laid_out(self, x: Tensor, *others: Tensor | None) -> tuple[Tensor, Maybe, Maybe, Maybe]:
        """x, weight, bias and residual in one layout."""
        x, (weight, bias, residual) = dense(x), others
        return x, flat(weight), flat(bias), like(x, residual)

    def _kept(self, kept: KeptByChannelNorm) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """x, and the tensors after it in the record, in the order in which operators take them."""
        x, *others = self._laid_out(kept.x, *kept[3:6])
        return x, (kept.mean.contiguous(), kept.rstd.contiguous(), *others, like(x, kept.output))

    def channel_moments(self, x: Tensor, groups: int = 0, mask: Tensor | None = None) -> Moments:
        plan = channel_plan(x.shape, groups)
        mean, m2, count = self.ops.channel_moments(dense(x), groups, mask)
        return Moments(mean, m2, plan.outer * plan.inner if mask is None else count)

    def channel_normalize(self, kept: KeptByChannelNorm) -> Tensor:
        x, (*others, _) = self._kept(kept)
        return self.ops.channel_normalize(x, *others, kept.norm.act, kept.mask)

    def channel_grad_sums(self, dy: Tensor, kept: KeptByChannelNorm) -> tuple[Tensor, Tensor]:
        x, others = self._kept(kept)
        return self.ops.channel_grad_sums(like(x, dy), x, *others, kept.norm.act, kept.mask)

    def channel_input_grad(
        self,
        dy: Tensor,
        kept: KeptByChannelNorm,
        means: tuple[Tensor, Tensor] | None = None,
        want_dz: bool = False,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`into` is not used."""
        x, others = self._kept(kept)
        dy = like(x, dy)
        of_means = (None, None) if means is None else map(flat, means)
        written = want_dz and not _is_dy(kept)
        dx, dz = self.ops.channel_input_grad(dy, x, *others, *of_means, kept.norm.act, written, kept.mask)
        return dx, _wanted_dz(dy, dz, kept, want_dz)

    def channel_forward(self, tensors: ChannelTensors, norm: Channels) -> Forward:
        """Each channel is normalized while it is in the cache. Running statistics must not need a
        gradient."""
        groups, eps, act, _, momentum, *_ = norm
        x, weight, bias, residual, mean, var, num_batches, mask = tensors
        given = self._laid_out(x, weight, bias, residual)
        if mean is None:
            return self.ops.channel_forward(*given, eps, act, groups, mask)
        assert mask is None
        buffers = mean, var, num_batches
        made = self.ops.channel_forward_tracked_(*given, eps, act, *buffers, _number(momentum))
        _increment_versions(buffers)
        return *made, None

    def channel_backward(
        self, dy: Tensor, kept: KeptByChannelNorm, want_dz: bool = False, into: Tensor | None = None
    ) -> Backward:
        x, others = self._kept(kept)
        dy = like(x, dy)
        arguments = dy, x, *others, kept.norm.act, kept.norm.groups, want_dz and not _is_dy(kept)
        if into is x and kept.norm.by_batch and kept.mask is None:
            dweight, dbias, dz = self.ops.channel_backward_(*arguments)
            return x, dweight, dbias, _wanted_dz(dy, dz, kept, want_dz)
        of_mask = (None, None) if kept.mask is None else (kept.mask, kept.size)
        dx, dweight, dbias, dz = self.ops.channel_backward(*arguments, not kept.norm.by_batch, *of_mask)
        return dx, dweight, dbias, _wanted_dz(dy, dz, kept, want_dz)

    def _lines(self, v: Maybe, x: Tensor, start: int) -> Maybe:
        """v as lines (groups, row) of the arithmetic's dtype; a line per row may stay as it is.

        What is broadcast otherwise, over samples but not over tokens, becomes a line for every row.
        """
        if v is None:
            return None
        wide = spread(v, x, start)
        stays = v.dtype == x.dtype and (self.narrow_lines or v.numel() == x.numel())
        if not _by_group(wide, x, start):
            wide, stays = wide.expand(x.shape), False
        return apart(wide, start, x.dtype if stays else compute_dtype(x))

    def row_forward(
        self, tensors: RowTensors, rows: Rows, valid: Maybe = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The kernel takes any layout, with lines contiguous ones; it does not widen the output for a weight
        of a wider dtype."""
        x, residual, gate, _, _, weight, bias = tensors
        if rows.cast_before and weight is not None and torch.promote_types(x.dtype, weight.dtype) != x.dtype:
            plain = rows._replace(weight_offset=0.0, cast_before=False)
            y, total, mean, rstd = self.row_forward(RowTensors(x, residual), plain, valid)
            y = rounded_then_weighted(y, weight, rows.weight_offset, rows.start, rows.stop)
            return y, total, mean, rstd
        given = x
        if gate is not None or (weight is not None and weight.dim() > rows.stop - rows.start):
            if x.numel() == 0 or wider(residual, x):
                return super().row_forward(tensors, rows, valid)
            x = x.contiguous()
            weight, bias, gate = (self._lines(v, x, rows.start) for v in (weight, bias, gate))
        y, total, mean, rstd = self.ops.row_forward(x, residual, weight, bias, *rows[:6], valid, gate)
        return y, given if residual is None else total, mean, rstd

    def row_backward(
        self,
        dy: Tensor,
        dtotal: Tensor | None,
        kept: KeptByRowNorm,
        rows: Rows,
        want_affine: bool = True,
        want_bias: bool | None = None,
    ) -> tuple[Any, ...]:
        """Computed in a dtype that represents dy, which is wider than x if a wider weight made the output
        so."""
        x, mean, rstd, weight, valid, gate, residual, _, _ = kept
        start, stop, _, rms, weight_offset, *_ = rows
        want_bias = want_affine and (not rms if want_bias is None else want_bias)
        lines = weight is not None and weight.dim() > stop - start
        of_gate, input_dtype = gate, x.dtype
        if lines or gate is not None:
            if x.numel() == 0 or wider(residual, x):
                return super().row_backward(dy, dtotal, kept, rows, want_affine, want_bias)
            x = x.contiguous()
            weight, of_gate = self._lines(weight, x, start), self._lines(gate, x, start)
        if dy.dtype is not input_dtype:
            dtype = torch.promote_types(dy.dtype, input_dtype)
            x, dtotal = x.to(dtype), None if dtotal is None else dtotal.to(dtype)
        settings = start, stop, rms, want_affine, want_bias, weight_offset
        dx, dweight, dbias, dresidual, dgate = self.ops.row_backward(
            dy, dtotal, x, mean, rstd, weight, *settings, valid, of_gate, residual
        )
        if lines and want_affine:
            dweight, dbias = _of_lines(dweight, dbias, dy, kept, start, want_bias)
        if dx.dtype is not input_dtype:
            dx, dresidual = dx.to(input_dtype), None if dresidual is None else dresidual.to(input_dtype)
        dweight, dbias = dweight if want_affine else None, dbias if want_bias else None
        if gate is None:
            return dx, dweight, dbias
        return dx, dweight, dbias, dresidual, None if dgate is None else _from_lines(dgate, gate, x, start)

    def move_running(self, running: Running, moments: Moments) -> None:
        """One operator if no buffer needs a gradient and the counter is int64, otherwise the plain
        formula."""
        mean, var, num_batches, momentum = running
        if (
            (mean is None or var is None)
            or (mean.requires_grad or var.requires_grad)
            or (num_batches is not None and num_batches.dtype is not torch.int64)
        ):
            super().move_running(running, moments)
            return
        count = (0, moments.count) if isinstance(moments.count, Tensor) else (moments.count, None)
        self.ops.move_running_(mean, var, num_batches, _number(momentum), moments.mean, moments.m2, *count)
        _increment_versions((mean, var, num_batches))

    def constants_of(self, running_mean: Tensor, running_var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.ops.constants_of(running_mean, running_var, eps)

    def sums_of(self, moments: Moments) -> Tensor:
        """The operator does not take a count that only the device knows."""
        if isinstance(moments.count, Tensor):
            return super().sums_of(moments)
        return self.ops.sums_of(moments.mean, moments.m2, moments.count)

    def moments_of(self, total: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.ops.moments_of(total, eps)

    def means_of(self, total: Tensor, weight: Tensor | None, count: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.means_of(total, weight, count)
