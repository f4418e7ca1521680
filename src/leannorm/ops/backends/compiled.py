"""The verbs, each as a call of the operator that `schema.py` describes. `backend.py` says what they mean.

An input that is contiguous or channels_last is passed on as it is; any other is made contiguous first, and
the other tensors are brought into its layout. torch's dispatcher chooses the kernel: C++ for CPU tensors,
Triton for CUDA tensors.
"""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from leannorm._types import Moments, Running
from leannorm.ops import schema
from leannorm.ops.backends.backend import Backend
from leannorm.ops.backends.reference_rows import rounded_then_weighted
from leannorm.ops.plan import channel_plan

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _channels_last(x: Tensor) -> bool:
    if x.dim() == 4:  # the same as below, without making a view
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).is_contiguous()


def is_dense(x: Tensor) -> bool:
    return x.layout is torch.strided and (x.is_contiguous() or _channels_last(x))


def dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() or _channels_last(x) else x.contiguous()


@overload
def like(x: Tensor, other: Tensor) -> Tensor: ...
@overload
def like(x: Tensor, other: None) -> None: ...
def like(x: Tensor, other: Tensor | None) -> Tensor | None:
    """`other` in the dtype and layout of x, which is dense."""
    if other is None:
        return None
    if other.dtype != x.dtype:
        other = other.to(x.dtype)
    if x.is_contiguous():
        return other.contiguous()
    return other if _channels_last(other) else other.movedim(1, -1).contiguous().movedim(-1, 1)


def flat(v: Tensor | None) -> Tensor | None:
    return None if v is None else v.contiguous()


def _wanted_dz(dy: Tensor, dz: Tensor, act: str, want_dz: bool) -> Tensor | None:
    """dz, if wanted; without an activation it is dy, which the kernel does not copy."""
    if not want_dz:
        return None
    return dy if act == "identity" else dz


def _number(momentum: float | Tensor | None) -> float | None:
    """A momentum that is a tensor, as its value: who keeps a call's settings must not keep the tensor."""
    return float(momentum) if isinstance(momentum, Tensor) else momentum


def _increment_versions(buffers: tuple[Tensor | None, ...]) -> None:
    """As torch's in-place operations do, so that autograd detects an edit of a tensor that it saved."""
    torch.autograd.graph.increment_version([b for b in buffers if b is not None and not b.is_inference()])


class Compiled(Backend):
    """Kernels behind operators; `ops` offers these by name. A verb that has an operator calls it."""

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

    def channel_moments(self, x: Tensor, groups: int = 0) -> Moments:
        plan = channel_plan(x.shape, groups)
        mean, m2 = self.ops.channel_moments(dense(x), groups)
        return Moments(mean, m2, plan.outer * plan.inner)

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
        x = dense(x)
        statistics = mean.contiguous(), rstd.contiguous()
        return self.ops.channel_normalize(x, *statistics, flat(weight), flat(bias), like(x, residual), act)

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
        x = dense(x)
        return self.ops.channel_grad_sums(
            like(x, dy),
            x,
            mean.contiguous(),
            rstd.contiguous(),
            flat(weight),
            flat(bias),
            like(x, residual),
            like(x, out),
            act,
        )

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
        """`into` is not used."""
        x = dense(x)
        dy = like(x, dy)
        dx, dz = self.ops.channel_input_grad(
            dy,
            x,
            mean.contiguous(),
            rstd.contiguous(),
            flat(weight),
            flat(bias),
            like(x, residual),
            like(x, out),
            flat(p),
            flat(q),
            act,
            want_dz and act != "identity",
        )
        return dx, _wanted_dz(dy, dz, act, want_dz)

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
        """Each channel is normalized while it is in the cache. `running` must not need a gradient."""
        x = dense(x)
        arguments = x, flat(weight), flat(bias), like(x, residual), eps, act
        if running is None:
            result = self.ops.channel_forward(*arguments, groups)
        else:
            *buffers, momentum = running
            result = self.ops.channel_forward_tracked_(*arguments, *buffers, _number(momentum))
            _increment_versions(running[:3])
        return result

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
        x = dense(x)
        dy = like(x, dy)
        arguments = (
            dy,
            x,
            mean.contiguous(),
            rstd.contiguous(),
            flat(weight),
            flat(bias),
            like(x, residual),
            like(x, out),
            act,
            groups,
            want_dz and act != "identity",
        )
        if into is x and not constant:
            dweight, dbias, dz = self.ops.channel_backward_(*arguments)
            return x, dweight, dbias, _wanted_dz(dy, dz, act, want_dz)
        dx, dweight, dbias, dz = self.ops.channel_backward(*arguments, constant)
        return dx, dweight, dbias, _wanted_dz(dy, dz, act, want_dz)

    def row_forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        start: int,
        stop: int,
        eps: float,
        rms: bool = False,
        weight_offset: float = 0.0,
        cast_before: bool = False,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The kernel takes any layout; it does not widen the output for a weight of a wider dtype."""
        if cast_before and weight is not None and torch.promote_types(x.dtype, weight.dtype) != x.dtype:
            plain = start, stop, eps, rms, 0.0, False, valid
            y, total, mean, rstd = self.row_forward(x, residual, None, None, *plain)
            return rounded_then_weighted(y, weight, weight_offset, start, stop), total, mean, rstd
        how = start, stop, eps, rms, weight_offset, cast_before, valid
        y, total, mean, rstd = self.ops.row_forward(x, residual, weight, bias, *how)
        return y, x if residual is None else total, mean, rstd

    def row_backward(
        self,
        dy: Tensor,
        dtotal: Tensor | None,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        start: int,
        stop: int,
        rms: bool = False,
        want_affine: bool = True,
        weight_offset: float = 0.0,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """In a dtype that holds dy, which is wider than x where a wider weight made the output so."""
        input_dtype = x.dtype
        if dy.dtype is not input_dtype:
            dtype = torch.promote_types(dy.dtype, input_dtype)
            x, dtotal = x.to(dtype), None if dtotal is None else dtotal.to(dtype)
        dx, dweight, dbias = self.ops.row_backward(
            dy, dtotal, x, mean, rstd, weight, start, stop, rms, want_affine, weight_offset, valid
        )
        if dx.dtype is not input_dtype:
            dx = dx.to(input_dtype)
        return dx, dweight if want_affine else None, dbias if want_affine and not rms else None

    def move_running(
        self,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches: Tensor | None,
        momentum: float | None,
        mean: Tensor,
        m2: Tensor,
        count: int | Tensor,
    ) -> None:
        """One operator where no buffer needs a gradient and the counter is int64, else the plain formula."""
        if (
            (running_mean is None or running_var is None)
            or (running_mean.requires_grad or running_var.requires_grad)
            or (num_batches is not None and num_batches.dtype is not torch.int64)
        ):
            super().move_running(running_mean, running_var, num_batches, momentum, mean, m2, count)
            return
        given = (count, None) if isinstance(count, int) else (0, count)
        weight = _number(momentum)
        self.ops.move_running_(running_mean, running_var, num_batches, weight, mean, m2, *given)
        _increment_versions((running_mean, running_var, num_batches))

    def constants_of(self, running_mean: Tensor, running_var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.ops.constants_of(running_mean, running_var, eps)

    def sums_of(self, moments: Moments) -> Tensor:
        return self.ops.sums_of(moments.mean, moments.m2, moments.count)

    def moments_of(self, total: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.ops.moments_of(total, eps)

    def means_of(self, total: Tensor, weight: Tensor | None, count: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.means_of(total, weight, count)
