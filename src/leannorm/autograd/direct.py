"""The usual call in one step: a kernel's operator, without the plumbing around it.

A small call takes as long as its Python does. So a call that is eager, under no transform and in no mode, on
dense tensors, is handed to the kernel as it is. A kernel of the CPU refuses what it does not take before
anything is written. One of Triton sees pointers and numbers: there a call goes this way if one of the same
shapes, strides, dtypes, devices and settings went the whole way before, and repeats it (`tape.py`). For all
other calls the answer is None, and the caller goes the whole way: it checks every rule, which raises the
error if one is broken, and picks a backend.

The operators and what they are given are those of the whole way, and so are the results, bit for bit. The
functions save what `ChannelNorm` and `RowNorm` save, and hand second derivatives to them.

Where autograd nodes in C++ are built (`nodes.py`), they stand in for these classes: same names, same saved
tensors, same bits. They ask for the same conditions and return None where one does not hold; they leave calls
whose saved tensors hooks are to see, and backward passes that are recorded, to the classes here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leannorm._types import KeptByChannelNorm, KeptByRowNorm, Rows
from leannorm.autograd.channel import applied_directly, twice_differentiable
from leannorm.autograd.nodes import NODES
from leannorm.autograd.rows import mean_to_keep
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends import CPU, REFERENCE, TRITON, Backend
from leannorm.ops.backends.compiled import is_dense, like
from leannorm.ops.backends.triton import repeated
from leannorm.ops.backends.triton.tape import hand_over
from leannorm.ops.layout import memory_format
from leannorm.ops.modes import plain
from leannorm.ops.select import picks_cpu, picks_triton


def dispatched(name: str) -> Callable[..., Any]:
    """The operator, called at torch's dispatcher: what torch.ops puts around it is a part of a small call."""
    return partial(
        torch._C._dispatch_call_boxed, torch._C._dispatch_find_schema_or_throw(f"leannorm::{name}", "")
    )


_FORWARD = "channel_forward", "channel_forward_tracked_", "channel_normalize", "constants_of", "row_forward"
_BACKWARD = "channel_backward", "channel_grad_sums", "channel_input_grad", "row_backward"
_OF_CPU = SimpleNamespace(**{name: dispatched(name) for name in (*_FORWARD, *_BACKWARD)})
_EPS, _EPS_OF_DOUBLE = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


class _RefusedError(Exception):
    """The kernel has refused its arguments, or knows no such call, and nothing has been written."""


def _made(backend: Backend, operator: str, *arguments: Any) -> Any:
    """What an operator of a forward pass gives."""
    if backend is TRITON:
        made = repeated(operator, arguments)
        if made is None:
            raise _RefusedError
        return made
    try:
        return getattr(_OF_CPU, operator)(*arguments)
    except RuntimeError as error:
        raise _RefusedError from error


def _backward_of(backend: Backend) -> Any:
    """The operators of a backward pass."""
    return _OF_CPU if backend is CPU else TRITON.ops


class KeptDirectly(NamedTuple):
    """What a per-channel norm without a residual saves."""

    x: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None


class DirectChannelNorm(torch.autograd.Function):
    """The output of `ChannelNorm` without a residual, by one operator."""

    Kept = KeptDirectly

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, how: Any) -> Tensor:
        y, mean, _, rstd = _channel_forward(x, weight, bias, how)
        ctx.act, ctx.eps, ctx.groups, _, ctx.backend = how
        ctx.save_for_backward(x, mean, rstd, weight, None if ctx.act == "identity" else bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        act, groups = ctx.act, ctx.groups
        if torch.is_grad_enabled() and twice_differentiable():
            moments = REFERENCE.channel_moments(x, groups)
            mean, rstd = moments.mean, REFERENCE.rstd_of(moments, ctx.eps)
            kept = KeptByChannelNorm(x, mean, rstd, weight, bias, act=act)
            dx, dweight, dbias, _ = REFERENCE.channel_backward(dy, kept, groups)
        else:
            if not (dy.is_contiguous() and x.is_contiguous()):
                dy = like(x, dy)
            given = dy, x, mean, rstd, weight, bias, None, None
            backward = _backward_of(ctx.backend).channel_backward
            dx, dweight, dbias, _ = backward(*given, act, groups, False, False, None, None)
        if weight is None:
            return dx, None, None, None
        return dx, dweight, dbias, None  # autograd casts each to its input's dtype


class DirectChannelAffine(torch.autograd.Function):
    """The output of `ChannelAffine` without a residual, by running statistics and the CPU's kernels."""

    Kept = KeptByChannelNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, how: Any) -> Tensor:
        y, mean, rstd = _evaluate(x, weight, bias, how)
        *_, act, ctx.backend = how
        ctx.act = act
        out = None
        if not ctx.needs_input_grad[1]:  # x, or the output in its place, is for the activation alone
            out = y if act != "identity" and ACTIVATIONS[act].from_output is not None else None
            if act == "identity" or out is not None:
                x, ctx.layout = None, memory_format(y)  # type: ignore[assignment]
        bias = None if act == "identity" else bias
        ctx.save_for_backward(x, mean, rstd, weight, bias, None, out, None, None)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias, _, out, *_ = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        ops = _backward_of(ctx.backend)
        if x is None:  # only its shape and layout are read
            x = dy = dy.contiguous(memory_format=ctx.layout)
        elif not (dy.is_contiguous() and x.is_contiguous()):
            dy = like(x, dy)
        given = dy, x, mean, rstd, weight, bias, None, out
        dx = dweight = dbias = None
        if twice_differentiable():
            kept = KeptByChannelNorm(*given[1:], act=ctx.act)
            dx, _ = REFERENCE.channel_input_grad(dy, kept)
            dbias, dweight = REFERENCE.channel_grad_sums(dy, kept)
        elif not (need_weight or need_bias):
            dx, _ = ops.channel_input_grad(*given, None, None, ctx.act, False, None)
        elif need_x:
            dx, dweight, dbias, _ = ops.channel_backward(*given, ctx.act, 0, False, True, None, None)
        else:
            dbias, dweight = ops.channel_grad_sums(*given, ctx.act, None)
        return dx if need_x else None, dweight if need_weight else None, dbias if need_bias else None, None


class DirectRowNorm(torch.autograd.Function):
    """The output of `RowNorm` without a residual, by one operator."""

    Kept = KeptByRowNorm

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Any) -> Tensor:
        *ctx.rows, ctx.backend = rows
        y, _, mean, rstd = _row_forward(x, weight, bias, ctx.rows, ctx.backend)
        centre = mean_to_keep(mean, ctx.rows[3], ctx.backend)
        ctx.save_for_backward(x, centre, rstd, weight, None)
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, _ = ctx.saved_tensors
        start, stop, eps, rms, weight_offset, _ = ctx.rows
        _, need_weight, need_bias, _ = ctx.needs_input_grad
        how = start, stop, rms, need_weight or need_bias, weight_offset
        if twice_differentiable():
            rows = Rows(start, stop, eps, rms, weight_offset)
            statistics = REFERENCE.row_moments(x, rows)
            kept = KeptByRowNorm(x, *statistics, weight)
            dx, dweight, dbias = REFERENCE.row_backward(dy, None, kept, rows, how[3])
        else:
            mean = torch.zeros_like(rstd) if mean is None else mean
            backward = _backward_of(ctx.backend).row_backward
            dx, dweight, dbias = backward(dy, None, x, mean, rstd, weight, *how, None)
        return dx, dweight if need_weight else None, dbias if need_bias else None, None


for _function in (DirectChannelNorm, DirectChannelAffine, DirectRowNorm):
    # autograd calls this; torch's own looks for a `vjp` first
    _function._backward_cls.apply = _function.backward  # type: ignore[attr-defined]

_norm, _affine = applied_directly(DirectChannelNorm), applied_directly(DirectChannelAffine)
_row_norm = applied_directly(DirectRowNorm)


def _backward_of_node(
    name: str,
    saved: list[Tensor | None],
    needed: tuple[bool, ...],
    how: tuple[Any, ...],
    dy: Tensor,
    by_triton: bool,
) -> tuple[Tensor | None, ...]:
    """The backward pass of a node in C++, by the class that it stands in for."""
    x, mean, rstd, weight, bias, out = saved
    ctx = SimpleNamespace(needs_input_grad=needed, backend=TRITON if by_triton else CPU)
    if name == "DirectRowNormBackward":
        ctx.saved_tensors, ctx.rows = (x, mean, rstd, weight, None), (*how, 0.0, False)
        return DirectRowNorm.backward(ctx, dy)
    ctx.act, *rest = how
    if name == "DirectChannelAffineBackward":
        ctx.saved_tensors, (ctx.layout,) = (x, mean, rstd, weight, bias, None, out, None, None), rest
        return DirectChannelAffine.backward(ctx, dy)
    ctx.saved_tensors, (ctx.eps, ctx.groups) = (x, mean, rstd, weight, bias), rest
    return DirectChannelNorm.backward(ctx, dy)


if NODES is not None:
    NODES.set_backward(_backward_of_node)
    hand_over(NODES, (*_FORWARD, *_BACKWARD, "channel_evaluate"))
    for _function in (DirectChannelNorm, DirectChannelAffine, DirectRowNorm):
        torch.autograd.graph.Node.register(getattr(NODES, f"{_function.__name__}Backward"))


def _channel_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, how: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    act, eps, groups, running, backend = how
    given = x, weight, bias, None, eps, act
    made: Sequence[Tensor]
    if running is None:
        *made, _ = _made(backend, "channel_forward", *given, groups, None)
    else:
        made = _made(backend, "channel_forward_tracked_", *given, *running)
        torch._C._increment_version(running[:2] if running[2] is None else running[:3])
    y, mean, m2, rstd = made
    return y, mean, m2, rstd


def _evaluate(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    how: tuple[Tensor, Tensor, float, str, Backend],
) -> tuple[Tensor, Tensor, Tensor]:
    running_mean, running_var, eps, act, backend = how
    mean, rstd = _made(backend, "constants_of", running_mean, running_var, eps)
    return _made(backend, "channel_normalize", x, mean, rstd, weight, bias, None, act, None), mean, rstd


def _row_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Sequence[Any], backend: Backend
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made: tuple[Tensor, Tensor, Tensor, Tensor]
    made = _made(backend, "row_forward", x, None, weight, bias, *rows, None)
    return made


def _serving(x: Tensor) -> Backend | None:
    """Whose kernels serve an eager call on this tensor; None: no compiled ones. Asked first of every call."""
    if torch.compiler.is_compiling():
        return None
    if x.is_cpu and picks_cpu():
        return CPU
    return TRITON if picks_triton(x) else None


def direct_channel_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    act: str = "identity",
    groups: int = 0,
    running: tuple[Any, ...] | None = None,
) -> Tensor | None:
    """The output of `channel_norm`, if this call is a usual one.

    Moves the `running` statistics too: mean, variance, counter or None, momentum. The caller has checked what
    no kernel does: `eps`, the momentum, and that x has channels and more than one value of each.
    """
    backend = _serving(x)
    if backend is None:
        return None
    if NODES is not None:
        y: Tensor | None = NODES.channel_norm(x, weight, bias, eps, act, groups, running, backend is TRITON)
        if y is not None:
            return y
    if not (plain() and is_dense(x)):
        return None
    if weight is None or bias is None:
        if weight is not bias:
            return None
        recorded = x.requires_grad
    else:
        if not (x.is_cpu is weight.is_cpu is bias.is_cpu and weight.dtype is bias.dtype):
            return None
        recorded = x.requires_grad or weight.requires_grad or bias.requires_grad
    how = act, eps, groups, running, backend
    if running is not None:
        mean, var, num_batches, _ = running
        if not x.is_cpu is mean.is_cpu is var.is_cpu is (mean if num_batches is None else num_batches).is_cpu:
            return None
        if mean.requires_grad or var.requires_grad or mean.is_inference() or var.is_inference():
            return None
        if recorded and any(v is not None and v.is_inference() for v in (x, weight, bias)):
            return None  # autograd cannot keep it: statistics must not move
    try:
        if recorded and torch.is_grad_enabled():
            y = _norm(x, weight, bias, how)
            return y
        return _channel_forward(x, weight, bias, how)[0]
    except _RefusedError:
        return None


def direct_evaluation(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    act: str = "identity",
) -> Tensor | None:
    """The output of `channel_affine` by running statistics, if this call is a usual one."""
    backend = _serving(x)
    if backend is None:
        return None
    if NODES is not None:
        y: Tensor | None = NODES.evaluation(x, weight, bias, eps, act, mean, var, backend is TRITON)
        if y is not None:
            return y
    if not (plain() and is_dense(x) and x.is_cpu is mean.is_cpu is var.is_cpu):
        return None
    if weight is None or bias is None:
        if weight is not bias:
            return None
        recorded = x.requires_grad
    else:
        if not (x.is_cpu is weight.is_cpu is bias.is_cpu and weight.dtype is bias.dtype):
            return None
        recorded = x.requires_grad or weight.requires_grad or bias.requires_grad
    how = mean, var, eps, act, backend
    try:
        if recorded and torch.is_grad_enabled():
            y = _affine(x, weight, bias, how)
            return y
        if backend is TRITON:  # in one launch
            y = _made(backend, "channel_evaluate", x, mean, var, eps, weight, bias, None, act)
            return y
        return _evaluate(x, weight, bias, how)[0]
    except _RefusedError:
        return None


def direct_row_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], eps: float | None, rms: bool
) -> Tensor | None:
    """The output of `row_norm` over the last axes, if this call is a usual one."""
    backend = _serving(x)
    if backend is None:
        return None
    if eps is None:
        eps = _EPS_OF_DOUBLE if x.dtype is torch.float64 else _EPS
    if NODES is not None:
        y: Tensor | None = NODES.row_norm(x, weight, bias, eps, shape, rms, backend is TRITON)
        if y is not None:
            return y
    if not (plain() and eps >= 0):
        return None
    stop = x.dim()
    start = stop - len(shape)
    if start < 0 or start == stop or x.shape[start:] != shape:
        return None
    recorded = x.requires_grad
    if weight is not None:
        if not (weight.is_cpu is x.is_cpu and weight.shape == shape and weight.is_floating_point()):
            return None
        recorded = recorded or weight.requires_grad
    if bias is not None:
        if weight is None or not (
            bias.is_cpu is x.is_cpu and bias.shape == shape and bias.dtype is weight.dtype
        ):
            return None
        recorded = recorded or bias.requires_grad
    rows = start, stop, eps, rms, 0.0, False
    try:
        if recorded and torch.is_grad_enabled():
            y = _row_norm(x, weight, bias, (*rows, backend))
        else:
            y = _row_forward(x, weight, bias, rows, backend)[0]
    except _RefusedError:
        return None
    return y
