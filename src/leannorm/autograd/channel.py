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

from leannorm._types import Epilogue, KeptByChannelNorm, Maybe, Moments, Running, Valid, kept_of
from leannorm.autograd import by_torch
from leannorm.autograd.nodes import NODES
from leannorm.autograd.sync import Sharing, added_up, gradient_sums_of_all, repeatable, shared
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends import ATEN, CPU, REFERENCE, TRITON, Backend
from leannorm.ops.backends.compiled import like
from leannorm.ops.backends.reference import over_channels
from leannorm.ops.backends.shown import shown
from leannorm.ops.layout import memory_format
from leannorm.ops.modes import recorded, recording, traced
from leannorm.ops.plan import channel_plan
from leannorm.ops.precision import gradient_dtype
from leannorm.ops.select import pick, transformed

# mean, M2, rstd, and the count if the shape does not determine it
Statistics = tuple[Tensor, Tensor, Tensor, Maybe]


class ChannelCall(NamedTuple):
    """The arguments of a per-channel norm that are not tensors.

    `zero`: whether results are 0 where there is no data; otherwise they are normalized too, by the statistics
    of the data. With `statistics` the function also returns mean, M2 and count. `wide` is the dtype for the
    weight where the bias has another one (`wide_for`).
    """

    backend: Backend
    act: str = "identity"
    eps: float = 0.0
    groups: int = 0
    sharing: Sharing | None = None
    zero: bool = True
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


def _kept_by(ctx: Any) -> KeptByChannelNorm:
    call = ctx.call
    kept = KeptByChannelNorm._make((*ctx.saved_tensors, call.act))
    if call.wide is None or kept.weight is None:
        return kept
    return kept._replace(weight=kept.weight.to(call.wide))


def statistics_of(x: Tensor, mask: Maybe, call: ChannelCall, again: str = "") -> Statistics:
    """The sums of all ranks that share them. `again`: the name of a second sum, of statistics to be
    differentiated."""
    backend: Backend = REFERENCE if again else call.backend
    moments, sharing = backend.channel_moments(x, call.groups, mask), call.sharing
    if sharing is None:
        size = moments.count if isinstance(moments.count, Tensor) else None
        return moments.mean, moments.m2, backend.rstd_of(moments, call.eps), size
    # of every group of every sample, which is how ranks add them up
    sums = backend.sums_of(Moments(moments.mean.flatten(), moments.m2.flatten(), moments.count))
    if again:
        total = added_up(sums, moments.count, sharing.group, sharing.call(again, x))
    else:
        total = shared(sums, moments.count, sharing, x)
    mean, m2, rstd, count = backend.moments_of(total, call.eps)
    if call.groups:
        mean, m2, rstd = (v.view(moments.mean.shape) for v in (mean, m2, rstd))
    return mean, m2, rstd, count.detach() if again else count


def _forward(
    x: Tensor, epilogue: Epilogue, mask: Maybe, running: Running | None, call: ChannelCall, again: str = ""
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The output and its statistics, verb by verb, for what a single kernel call cannot do."""
    mean, m2, rstd, size = statistics_of(x, mask, call, again)
    y = call.backend.channel_normalize(kept_of(x, mean, rstd, epilogue, mask if call.zero else None))
    if running is not None and size is not None:
        call.backend.move_running(running, Moments(mean, m2, size))
    return y, mean, m2, rstd, size


class ChannelNorm(torch.autograd.Function):
    """act(norm(x) * weight + bias + residual) by the statistics of the input, or of all ranks' inputs."""

    Kept = KeptByChannelNorm

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Maybe, bias: Maybe, residual: Maybe, mask: Maybe, running: Any, call: Any
    ) -> Any:
        act = call.act
        epilogue: Any = (weight, bias, residual, act)  # making a record takes time
        if call.sharing is None and call.zero:
            made = call.backend.channel_forward(x, epilogue, call.eps, call.groups, running, mask)
        else:
            made = _forward(x, epilogue, mask, running, call)
        y, mean, m2, rstd, size = made
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
        call = ctx.call
        backend = call.backend
        if backend.as_given and call.sharing is None and not twice_differentiable():
            x, mean, rstd, weight, bias, *_ = ctx.saved_tensors
            dy = dy if dy.is_contiguous() and x.is_contiguous() else like(x, dy)
            arguments = dy, x, mean, rstd, weight, bias, None, None, call.act, call.groups
            dx, dweight, dbias, _ = backend.ops.channel_backward(*arguments, False, False, None, None)
            if weight is None:
                return dx, None, None, None, None, None, None
            return dx, dweight, dbias if call.has_bias else None, None, None, None, None
        if dy is None and call.sharing is None:
            return (None,) * 7
        needed = ctx.needs_input_grad
        gradients = _backward(ctx, dy, needed, twice_differentiable())
        return *[g if need else None for g, need in zip(gradients, needed, strict=False)], None, None, None


def _backward(
    ctx: Any, dy: Tensor | None, needed: Sequence[bool], twice: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    call: ChannelCall = ctx.call
    kept, backend = _kept_by(ctx), call.backend
    if dy is None:
        dy = torch.zeros_like(kept.x)  # the other ranks wait for this rank's sums even so
    if twice:
        backend = REFERENCE
        mean, _, rstd, _ = statistics_of(kept.x, kept.mask, call, "moments to differentiate twice")
        kept = kept._replace(mean=mean, rstd=rstd)
    if call.sharing is None and call.zero:
        return backend.channel_backward(dy, kept, call.groups, needed[3])
    return _in_steps(backend, dy, kept, call, needed, twice)


def _in_steps(
    backend: Backend,
    dy: Tensor,
    kept: KeptByChannelNorm,
    call: ChannelCall,
    needed: Sequence[bool],
    twice: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """The gradients verb by verb, if ranks share statistics or padding is normalized too."""
    by_data, sharing, means, dx, dz = kept.mask, call.sharing, None, None, None
    kept = kept if call.zero else kept._replace(mask=None)
    sums = dbias, dweight = backend.channel_grad_sums(dy, kept)
    if sharing is None:
        assert kept.size is not None
        means = backend.channel_means(sums, kept.weight, call.groups, kept.size)
        dtype = gradient_dtype(kept.x, kept.weight)
        dbias, dweight = ((s.sum(0) if call.groups else s).to(dtype) for s in sums)
    elif needed[0]:
        assert kept.size is not None
        if call.groups:  # weighted and summed per group, before they are sent
            of_groups = backend.channel_means(sums, kept.weight, call.groups, 1)
            sent = of_groups[0].flatten(), of_groups[1].flatten()
            total = gradient_sums_of_all(sent, sharing, kept.x, twice)
            of_dz, of_dz_xhat = backend.means_of(total, None, kept.size)
            means = of_dz.view(kept.mean.shape), of_dz_xhat.view(kept.mean.shape)
        else:
            total = gradient_sums_of_all(sums, sharing, kept.x, twice)
            means = backend.means_of(total, kept.weight, kept.size)
    if sharing is not None and call.groups:
        dbias, dweight = dbias.sum(0), dweight.sum(0)
    if needed[0] or needed[3]:
        dx, dz = backend.channel_input_grad(dy, kept, means, needed[3])
        if not call.zero and by_data is not None and means is not None:
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
        act, backend = call.act, call.backend
        if backend.as_given:
            y = backend.ops.channel_normalize(x, mean, rstd, weight, bias, None, act, None)
        else:
            y = backend.channel_normalize(kept_of(x, mean, rstd, Epilogue(weight, bias, residual, act), mask))
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
            dx, dweight, dbias, dz = backend.channel_backward(dy, kept, 0, need_residual, constant=True)
        return (
            dx if need_x else None,
            dweight if need_weight else None,
            dbias if need_bias else None,
            dz if need_residual else None,
            *(None, None, None, None),
        )


apply_norm, apply_affine = applied_directly(ChannelNorm), applied_directly(ChannelAffine)


def channel_norm(
    x: Tensor,
    epilogue: Epilogue,
    eps: float,
    groups: int = 0,
    running: Running | None = None,
    valid: Valid | None = None,
    sharing: Sharing | None = None,
) -> tuple[Tensor, Moments | None]:
    """`ChannelNorm`, or under a functorch transform its formula in plain torch.

    The statistics are not returned if they have updated the `running` ones.
    """
    weight, bias, residual, act = epilogue
    tensors = (x, weight, bias, residual)
    buffers = () if running is None else running[:2]
    mask, zero = (None, True) if valid is None else (valid.mask, valid.zero)
    in_transform = transformed(*tensors, *buffers, mask)
    if in_transform:
        backend: Backend = REFERENCE
    elif sharing is None:
        backend = shown(pick(*tensors, *buffers), groups, mask)
    else:
        backend, sharing = pick(*tensors, *buffers), repeatable(sharing)
    if backend is ATEN and groups == 0 and sharing is None and mask is None and not traced():
        if running is None:
            if (of_batch := by_torch.batch_norm(x, *epilogue, eps)) is not None:
                return of_batch
        elif (y := by_torch.tracked_batch_norm(x, *epilogue, eps, running)) is not None:
            return y, None
    if residual is not None and running is not None and valid is None and sharing is None:
        y = _in_one_step(backend, x, epilogue, eps, running)
        if y is not None:
            return y, None
    size: Maybe
    if sharing is None and zero and (mask is None if in_transform else not recorded(*tensors)):
        y, mean, m2, _, size = backend.channel_forward(x, epilogue, eps, groups, running, mask)
    else:
        wide, has_bias = wide_for(weight, bias), bias is not None
        call = ChannelCall(backend, act, eps, groups, sharing, zero, running is None, wide, has_bias)
        if in_transform or (sharing is None and not recorded(*tensors)):
            again = "training forward" if in_transform else ""
            y, mean, m2, _, size = _forward(x, epilogue, mask, running, call, again)
        else:
            apply = ChannelNorm.apply if traced() else apply_norm
            made = apply(x, weight, bias, residual, mask, running, call)
            if running is not None:
                return made, None
            y, mean, m2, *sizes = made
            size = sizes[0] if sizes else None
    if running is not None:
        return y, None
    if size is not None:
        return y, Moments(mean, m2, size)
    plan = channel_plan(x.shape, groups)
    return y, Moments(mean, m2, plan.outer * plan.inner)


def _in_one_step(backend: Backend, x: Tensor, epilogue: Epilogue, eps: float, running: Running) -> Maybe:
    """A call with a residual by its node in C++; None if the function in Python has to do it."""
    if NODES is None or traced() or not (backend is CPU or backend is TRITON):
        return None
    weight, bias, residual, act = epilogue
    y: Maybe = NODES.channel_norm(x, weight, bias, eps, act, 0, running, residual, backend is TRITON)
    return y


def group_norm_by_torch(x: Tensor, epilogue: Epilogue, eps: float, groups: int) -> Maybe:
    """The output of `channel_norm` by each sample's groups, by torch; None if a backend computes it."""
    weight, bias, _, act = epilogue
    if traced() or transformed(x, weight, bias) or pick(x, weight, bias) is not ATEN:
        return None
    return by_torch.group_norm(x, weight, bias, act, eps, groups)


def channel_evaluated(x: Tensor, running: Running, eps: float, epilogue: Epilogue) -> Tensor | None:
    """Evaluation by torch, or that autograd does not record; None if `channel_affine` must do it."""
    tensors = (x, running.mean, running.var, *epilogue[:3])
    if traced() or transformed(*tensors):
        return None
    backend = pick(*tensors)
    y = by_torch.evaluation(x, *epilogue, eps, running) if backend is ATEN else None
    return y if y is not None or recorded(*tensors) else backend.channel_evaluate(x, running, eps, epilogue)


def channel_affine(x: Tensor, mean: Tensor, rstd: Tensor, epilogue: Epilogue, mask: Maybe = None) -> Tensor:
    """`ChannelAffine`, or under a functorch transform its formula in plain torch."""
    weight, bias, residual, act = epilogue
    tensors = (x, weight, bias, residual)
    in_transform = transformed(*tensors, mean, rstd, mask)
    backend = REFERENCE if in_transform else shown(pick(*tensors), 0, mask)
    if in_transform or not recorded(*tensors):
        return backend.channel_normalize(kept_of(x, mean, rstd, epilogue, mask))
    wide, has_bias = wide_for(weight, bias), bias is not None
    call = ChannelCall(backend, act, wide=wide, has_bias=has_bias)
    apply = ChannelAffine.apply if traced() else apply_affine
    y: Tensor = apply(x, weight, bias, residual, mask, mean, rstd, call)
    return y
