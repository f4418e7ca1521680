"""Per-channel norms as autograd functions: what they save for the backward pass, and that pass.

Saved, in bytes per input element: the input itself (4 in float32, 2 in half precision) and, with one
exception, nothing else of its size. With a residual and an activation the output is saved too (the next layer
saves it anyway) if the derivative can be computed from it, else the residual. Mean and rstd are float64. A
mask adds one byte per position, statistics of several ranks 8 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm._types import Channels, ChannelTensors, KeptByChannelNorm, Maybe, Moments, Running, kept_of
from leannorm.autograd import by_torch
from leannorm.autograd.sync import Sharing, added_up, gradient_sums_of_all, repeatable, shared
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends import ATEN, REFERENCE, Backend
from leannorm.ops.backends.compiled import is_dense, like
from leannorm.ops.backends.reference import Forward, over_channels
from leannorm.ops.backends.shown import shown
from leannorm.ops.layout import memory_format
from leannorm.ops.modes import recorded, recording, traced
from leannorm.ops.plan import channel_plan
from leannorm.ops.precision import gradient_dtype
from leannorm.ops.select import pick, picks_cpu, transformed

Gradients = tuple[Tensor | None, Tensor, Tensor, Tensor | None]  # of x, weight, bias and residual
# mean, M2, rstd, and the count if the shape does not determine it
Statistics = tuple[Tensor, Tensor, Tensor, Maybe]


class ChannelCall(NamedTuple):
    """The arguments of a per-channel norm that are not tensors.

    With `statistics` the function also returns mean, M2 and count. `wide` is the dtype for the weight where
    the bias has another one (`wide_for`).
    """

    backend: Backend
    norm: Channels = Channels()
    sharing: Sharing | None = None
    statistics: bool = False
    wide: torch.dtype | None = None
    has_bias: bool = False


def twice_differentiable() -> bool:
    """Whether autograd (create_graph=True) or a tracer records this backward pass.

    If so, it uses plain torch operations.
    """
    return (torch.is_grad_enabled() and not traced()) or recording()


def applied_directly(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its check for functorch transforms; the caller has made that check.

    Also, autograd then calls the backward pass without looking for a `vjp` first.
    """
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def wide_for(weight: Tensor | None, bias: Tensor | None) -> torch.dtype | None:
    """A dtype that represents the gradients of both, which kernels store in the weight's; None if the
    weight's does."""
    if weight is None or bias is None or weight.dtype is bias.dtype:
        return None
    return torch.promote_types(weight.dtype, bias.dtype)


def _behind(act: str, residual: Tensor | None, y: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The tensor that the derivative of the activation is computed from: the residual, or the output."""
    if residual is None or ACTIVATIONS[act].from_output is None:
        return residual, None
    return None, None if act == "identity" else y


def _dense(kept: KeptByChannelNorm) -> KeptByChannelNorm:
    """The same in a layout that kernels take, since a hook of saved tensors may have returned another one."""
    laid_out = kept.output if kept.x is None else kept.x
    if traced():  # no hook runs there, and the compiler lets no backward pass read a layout
        return kept
    if (laid_out is None or is_dense(laid_out)) and kept.mean.is_contiguous():
        return kept
    tensors = {name: getattr(kept, name) for name in ("x", "mean", "rstd", "residual", "output")}
    return kept._replace(**{name: t.contiguous() for name, t in tensors.items() if t is not None})


def _kept_by(ctx: Any) -> KeptByChannelNorm:
    call = ctx.call
    kept = _dense(KeptByChannelNorm._make((*ctx.saved_tensors, call.norm)))
    if call.wide is None or kept.weight is None:
        return kept
    return kept._replace(weight=kept.weight.to(call.wide))


def statistics_of(x: Tensor, mask: Maybe, call: ChannelCall, again: str = "") -> Statistics:
    """The sums of all ranks that share them. `again`: the name of a second sum, of statistics to be
    differentiated."""
    backend: Backend = REFERENCE if again else call.backend
    groups, eps, *_ = call.norm
    moments, sharing = backend.channel_moments(x, groups, mask), call.sharing
    if sharing is None:
        size = moments.count if isinstance(moments.count, Tensor) else None
        return moments.mean, moments.m2, backend.rstd_of(moments, eps), size
    # of every group of every sample, which is how ranks add them up
    sums = backend.sums_of(Moments(moments.mean.flatten(), moments.m2.flatten(), moments.count))
    if again:
        total = added_up(sums, moments.count, sharing.group, sharing.call(again, x))
    else:
        total = shared(sums, moments.count, sharing, x)
    mean, m2, rstd, count = backend.moments_of(total, eps)
    if groups:
        mean, m2, rstd = (v.view(moments.mean.shape) for v in (mean, m2, rstd))
    return mean, m2, rstd, count.detach() if again else count


def _forward(tensors: ChannelTensors, call: ChannelCall, again: str = "") -> Forward:
    """The output and its statistics, verb by verb, for what a single kernel call cannot do."""
    x, weight, bias, residual, running_mean, var, num_batches, mask = tensors
    norm = call.norm
    mean, m2, rstd, size = statistics_of(x, mask, call, again)
    behind = weight, bias, residual, None, mask if norm.zero else None, None, norm
    y = call.backend.channel_normalize(KeptByChannelNorm(x, mean, rstd, *behind))
    if running_mean is not None and size is not None:
        running = Running(running_mean, var, num_batches, norm.momentum)
        call.backend.move_running(running, Moments(mean, m2, size))
    return y, mean, m2, rstd, size


class ChannelNorm(torch.autograd.Function):
    """act(norm(x) * weight + bias + residual) by the statistics of the input, or of all ranks' inputs."""

    Kept = KeptByChannelNorm

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Maybe, bias: Maybe, residual: Maybe, mask: Maybe, running: Any, call: Any
    ) -> Any:
        backend, norm, sharing, _, _, _ = call
        running_mean, var, num_batches = running
        # making a record takes time
        tensors: Any = (x, weight, bias, residual, running_mean, var, num_batches, mask)
        act = norm[2]
        if sharing is None and norm[5]:
            y, mean, m2, rstd, size = backend.channel_forward(tensors, norm)
        else:
            y, mean, m2, rstd, size = _forward(tensors, call)
        residual, out = (None, None) if residual is None else _behind(act, residual, y)
        bias = None if act == "identity" else bias
        ctx.save_for_backward(x, mean, rstd, weight, bias, residual, out, mask, size)
        ctx.call = call
        if not call.statistics:
            return y
        ctx.set_materialize_grads(False)  # zeros for mean, M2 and count would be launches of their own
        statistics = (mean, m2) if size is None else (mean, m2, size)
        ctx.mark_non_differentiable(*statistics)
        return y, *statistics

    @staticmethod
    def backward(ctx: Any, dy: Any, *unused: Any) -> tuple[Tensor | None, ...]:
        call, needed = ctx.call, ctx.needs_input_grad
        backend = call.backend
        if backend.as_given and call.sharing is None and not (needed[3] or twice_differentiable()):
            x, mean, rstd, weight, bias, residual, out, *_ = ctx.saved_tensors
            if not (x.is_contiguous() and mean.is_contiguous()):
                kept = _dense(KeptByChannelNorm(x, mean, rstd, weight, bias, residual, out))
                x, mean, rstd, residual, out = kept.x, kept.mean, kept.rstd, kept.residual, kept.output
            dy = dy if dy.is_contiguous() and x.is_contiguous() else like(x, dy)
            norm = call.norm
            arguments = dy, x, mean, rstd, weight, bias, residual, out, norm[2], norm[0]
            dx, dweight, dbias, _ = backend.ops.channel_backward(*arguments, False, False, None, None)
            if weight is None:
                return dx, None, None, None, None, None, None
            return dx, dweight, dbias if call.has_bias else None, None, None, None, None
        if dy is None and call.sharing is None:
            return (None,) * 7
        gradients = _backward(ctx, dy, needed, twice_differentiable())
        return *[g if need else None for g, need in zip(gradients, needed, strict=False)], None, None, None


def _backward(ctx: Any, dy: Tensor | None, needed: Sequence[bool], twice: bool) -> Gradients:
    call: ChannelCall = ctx.call
    kept, backend = _kept_by(ctx), call.backend
    if dy is None:
        dy = torch.zeros_like(kept.x)  # the other ranks wait for this rank's sums even so
    if twice:
        backend = REFERENCE
        mean, _, rstd, _ = statistics_of(kept.x, kept.mask, call, "moments to differentiate twice")
        kept = kept._replace(mean=mean, rstd=rstd)
    if call.sharing is None and call.norm.zero:
        return backend.channel_backward(dy, kept, needed[3])
    return _in_steps(call._replace(backend=backend), dy, kept, needed, twice)


def _in_steps(
    call: ChannelCall, dy: Tensor, kept: KeptByChannelNorm, needed: Sequence[bool], twice: bool
) -> Gradients:
    """The gradients verb by verb, if ranks share statistics or padding is normalized too."""
    backend, norm, sharing, *_ = call
    by_data, groups, means, dx, dz = kept.mask, norm.groups, None, None, None
    kept = kept if norm.zero else kept._replace(mask=None)
    sums = dbias, dweight = backend.channel_grad_sums(dy, kept)
    if sharing is None:
        assert kept.size is not None
        means = backend.channel_means(sums, kept.weight, groups, kept.size)
        dtype = gradient_dtype(kept.x, kept.weight)
        dbias, dweight = ((s.sum(0) if groups else s).to(dtype) for s in sums)
    elif needed[0]:
        assert kept.size is not None
        if groups:  # weighted and summed per group, before they are sent
            of_groups = backend.channel_means(sums, kept.weight, groups, 1)
            sent = of_groups[0].flatten(), of_groups[1].flatten()
            total = gradient_sums_of_all(sent, sharing, kept.x, twice)
            of_dz, of_dz_xhat = backend.means_of(total, None, kept.size)
            means = of_dz.view(kept.mean.shape), of_dz_xhat.view(kept.mean.shape)
        else:
            total = gradient_sums_of_all(sums, sharing, kept.x, twice)
            means = backend.means_of(total, kept.weight, kept.size)
    if sharing is not None and groups:
        dbias, dweight = dbias.sum(0), dweight.sum(0)
    if needed[0] or needed[3]:
        dx, dz = backend.channel_input_grad(dy, kept, means, needed[3])
        if not norm.zero and by_data is not None and means is not None:
            constant, _ = backend.channel_input_grad(dy, kept)  # no statistic depends on the other positions
            dx = torch.where(over_channels(by_data, dx), dx, constant)
    return dx, dweight, dbias, dz


class ChannelAffine(torch.autograd.Function):
    """act((x - mean) * rstd * weight + bias + residual) by given statistics, which are constants.

    If the weight needs no gradient, only the activation may need x, or instead the output, which the next
    layer keeps too.
    """

    Kept = KeptByChannelNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Any:
        weight, bias, residual, mask, mean, rstd, call = others
        act, backend = call.norm.act, call.backend
        if backend.as_given:
            y = backend.ops.channel_normalize(x, mean, rstd, weight, bias, residual, act, None)
        else:
            behind = weight, bias, residual, None, mask, None, call.norm
            y = backend.channel_normalize(KeptByChannelNorm(x, mean, rstd, *behind))
        kept_x: Maybe = x
        if ctx.needs_input_grad[1]:
            residual, out = _behind(act, residual, y)
        else:
            by_output = ACTIVATIONS[act].from_output is not None
            residual, out = (None, None if act == "identity" else y) if by_output else (residual, None)
            if act == "identity" or out is not None:
                kept_x, ctx.layout = None, memory_format(y)
        bias = None if act == "identity" else bias
        ctx.save_for_backward(kept_x, mean, rstd, weight, bias, residual, out, mask, None)
        ctx.call = call
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept, needed = _kept_by(ctx), ctx.needs_input_grad
        backend = REFERENCE if twice_differentiable() else ctx.call.backend
        need_x, need_weight, need_bias, need_residual, *_ = needed
        dx = dweight = dbias = dz = None
        if kept.x is None:  # only the shape and layout are read
            dy = dy.contiguous(memory_format=ctx.layout) if kept.output is None else like(kept.output, dy)
            kept = kept._replace(x=dy)
        if not (need_weight or need_bias):
            dx, dz = backend.channel_input_grad(dy, kept, want_dz=need_residual)
        elif not (need_x or need_residual):
            dbias, dweight = backend.channel_grad_sums(dy, kept)
        else:
            dx, dweight, dbias, dz = backend.channel_backward(dy, kept, need_residual)
        return (
            dx if need_x else None,
            dweight if need_weight else None,
            dbias if need_bias else None,
            dz if need_residual else None,
            *(None, None, None, None),
        )


apply_norm, apply_affine = applied_directly(ChannelNorm), applied_directly(ChannelAffine)


def channel_norm(
    tensors: ChannelTensors, norm: Channels, sharing: Sharing | None = None
) -> tuple[Tensor, Moments | None]:
    """`ChannelNorm`, or under a functorch transform its formula in plain torch.

    The statistics are not returned if they have moved the running ones.
    """
    x, weight, bias, _, mean, var, num_batches, mask = tensors
    given, compiling = tensors[:4], traced()
    seen = given if mean is None else tensors[:6]
    in_transform = transformed(*seen) if mask is None else transformed(*seen, mask)
    backend: Backend = REFERENCE if in_transform else pick(*seen)
    records = not in_transform and recorded(*given)
    if sharing is not None:
        sharing = sharing if in_transform else repeatable(sharing)
    elif compiling:
        backend = shown(backend, norm.groups, mask)
    elif backend is ATEN and mask is None and norm.groups == 0:
        of_torch = by_torch.batch_norm(tensors, norm)
        if of_torch is not None:
            return of_torch
    size: Maybe
    if sharing is None and norm.zero and not records and not (in_transform and mask is not None):
        y, of_mean, m2, _, size = backend.channel_forward(tensors, norm)
    else:
        wide, has_bias = wide_for(weight, bias), bias is not None
        call = ChannelCall(backend, norm, sharing, mean is None, wide, has_bias)
        if in_transform or (sharing is None and not records):
            y, of_mean, m2, _, size = _forward(tensors, call, "training forward" if in_transform else "")
        else:
            apply = ChannelNorm.apply if compiling else apply_norm
            made = apply(*given, mask, (mean, var, num_batches), call)
            if mean is not None:
                return made, None
            y, of_mean, m2, *sizes = made
            size = sizes[0] if sizes else None
    if mean is not None:
        return y, None
    if size is not None:
        return y, Moments(of_mean, m2, size)
    plan = channel_plan(x.shape, norm.groups)
    return y, Moments(of_mean, m2, plan.outer * plan.inner)


def group_norm_by_torch(tensors: ChannelTensors, norm: Channels) -> Maybe:
    """The output of `channel_norm` by each sample's groups, by torch; None if a backend computes it."""
    given = tensors[:3]
    if tensors.mask is not None or traced() or picks_cpu():
        return None
    if transformed(*given) or pick(*given) is not ATEN:
        return None
    return by_torch.group_norm(tensors, norm)


def channel_evaluated(tensors: ChannelTensors, norm: Channels) -> Tensor | None:
    """Evaluation by torch, or that autograd does not record; None if `channel_affine` must do it."""
    given = tensors[:6]
    if traced() or transformed(*given):
        return None
    backend = pick(*given)
    y = by_torch.evaluation(tensors, norm) if backend is ATEN else None
    return y if y is not None or recorded(*given) else backend.channel_evaluate(tensors, norm)


def channel_affine(tensors: ChannelTensors, mean: Tensor, rstd: Tensor, norm: Channels) -> Tensor:
    """`ChannelAffine`, or under a functorch transform its formula in plain torch."""
    given, mask = tensors[:4], tensors.mask
    in_transform = transformed(*given, mean, rstd, mask)
    backend = REFERENCE if in_transform else shown(pick(*given), 0, mask)
    if in_transform or not recorded(*given):
        return backend.channel_normalize(kept_of(tensors, mean, rstd, norm))
    _, weight, bias, _ = given
    wide, has_bias = wide_for(weight, bias), bias is not None
    apply = ChannelAffine.apply if traced() else apply_affine
    y: Tensor = apply(*given, mask, mean, rstd, ChannelCall(backend, norm, None, False, wide, has_bias))
    return y
