"""The fast path: which calls are passed to a kernel as they are, and how.

A small call takes as long as its Python code. So an eager call on dense tensors, under no transform and in no
mode, is passed to the kernel as it is. A CPU kernel rejects what it does not take before anything is written.
A Triton kernel sees only pointers and numbers: there a call takes the fast path if one with the same shapes,
strides, dtypes, devices and settings took the full path before, and repeats that (`tape.py`). For all other
calls the result is None, and the caller takes the full path: it checks every rule, raises the error if one is
broken, and picks a backend. Both paths use the same functions and operators and give the same bits.

Tensors and settings are plain tuples in the order of `ChannelTensors` and `Channels`: making a record takes
time.

If the autograd nodes in C++ are built (`nodes.py`), they replace `ChannelNorm`, `ChannelAffine`, `RowNorm`
and `GatedNorm`: same names, same saved tensors, which hooks see in the same order. They have the conditions
of `usual_call`, and leave recorded backward passes to the functions in Python (`by_python.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function_variadic

from leannorm._types import Channels, Maybe, Rows
from leannorm.autograd import by_torch
from leannorm.autograd.by_python import backward_of_node
from leannorm.autograd.channel import ChannelAffine, ChannelCall, ChannelNorm, apply_affine, apply_norm
from leannorm.autograd.gated import GatedNorm, RowCall
from leannorm.autograd.nodes import NODES
from leannorm.autograd.rows import RowNorm, apply_row_norm
from leannorm.autograd.sync import Sharing, may_be_repeated
from leannorm.distributed.membership import sharing_group
from leannorm.ops import select
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.as_given import BACKWARD, CPU_AS_GIVEN, EVALUATE, FORWARD, TRITON_AS_GIVEN, RefusedError
from leannorm.ops.backends import ATEN, TRITON
from leannorm.ops.backends.compiled import DTYPES, is_dense
from leannorm.ops.backends.triton import INTERPRETED
from leannorm.ops.backends.triton.tape import hand_over
from leannorm.ops.modes import recording, traced
from leannorm.ops.running import frozen
from leannorm.ops.select import AUTO, picks_aten, picks_cpu, picks_triton

_DTYPES, _PLAIN = frozenset(DTYPES), (Tensor, torch.nn.Parameter)
_EPS, _EPS_OF_DOUBLE = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
_record: Callable[[Any], Channels] = partial(tuple.__new__, Channels)  # in less time than by its class
# looked up once: small calls use them every time
_tracing = torch._C._is_tracing
_transform = torch._C._functorch.peek_interpreter_stack
_backward_pass = torch._C._current_graph_task_id  # -1 outside of one


def _serving(x: Tensor) -> Any:
    """The backend whose kernels compute an eager call on this tensor as it is, an `AsGiven` or ATEN; None if
    there is none.

    Called first, because a compiler or a tracer must not see that sizes are read.
    """
    if type(x) not in _PLAIN or traced() or _tracing():
        return None
    if x.is_cpu and picks_cpu():
        return CPU_AS_GIVEN
    if select._chosen == AUTO and select._PICKED.get((x.device, x.dtype, x.layout)) is TRITON:
        return TRITON_AS_GIVEN  # as `picks_triton` said before, in a small part of its time
    if x.is_cpu and x.dtype in _DTYPES and picks_aten(x):
        return ATEN
    return TRITON_AS_GIVEN if picks_triton(x) else None


def usual_call(tensors: Any, moves: bool = False, dense: bool = True) -> bool:
    """Whether a backend's kernels can take these tensors as they are.

    The call reads running statistics or, if it `moves` them, writes them. With `dense` the kernels take no
    other layout. What a kernel itself rejects before it writes is not checked here.
    """
    if forward_ad._current_level >= 0 or _transform() is not None or _backward_pass() != -1 or recording():
        return False
    x, weight, bias, residual, mean, var, count, _ = tensors
    if has_torch_function_variadic(weight, bias, mean, var, count) or (dense and not is_dense(x)):
        return False
    on_cpu = x.is_cpu
    if weight is not None:
        if weight.is_cpu is not on_cpu:
            return False
        if bias is not None and (bias.is_cpu is not on_cpu or bias.dtype is not weight.dtype):
            return False
    elif bias is not None:
        return False
    if residual is not None and not _is_like(residual, x):
        return False
    if mean is not None and var is not None:
        if mean.is_cpu is not on_cpu or var.is_cpu is not on_cpu:
            return False
        if moves:
            if mean.requires_grad or var.requires_grad or mean.is_inference() or var.is_inference():
                return False
            if count is not None and (count.is_cpu is not on_cpu or count.is_inference()):
                return False
            for v in (x, weight, bias):
                if v is not None and v.is_inference() and _recorded(x, weight, bias, residual):
                    return False  # autograd cannot save it, so statistics must not move
    return True


def _is_like(residual: Tensor, x: Tensor) -> bool:
    """Whether kernels take this residual of x as it is, and autograd can save it."""
    if type(residual) not in _PLAIN or residual.layout is not x.layout or residual.device != x.device:
        return False
    if residual.is_inference() and torch.is_grad_enabled():
        return False
    return residual.dtype is x.dtype and residual.shape == x.shape and residual.stride() == x.stride()


def _plain(*parameters: Maybe) -> bool:
    """The same for torch's own operators, which check the rest (`by_torch.py`)."""
    if forward_ad._current_level >= 0 or _transform() is not None or recording():
        return False
    return not has_torch_function_variadic(*parameters)


def _recorded(x: Tensor, weight: Maybe, bias: Maybe, residual: Maybe = None) -> bool:
    """`modes.recorded` of these."""
    needed = x.requires_grad or (weight is not None and weight.requires_grad)
    needed = needed or (bias is not None and bias.requires_grad)
    return (needed or (residual is not None and residual.requires_grad)) and torch.is_grad_enabled()


def batch_norm(tensors: Any, norm: Any, sharing: Sharing | None = None) -> Maybe:
    """By running statistics, which training updates, or by the batch's if there are none; with `sharing` by
    the statistics of all ranks. The caller has checked that x has channels."""
    x, _, _, residual, mean, var, _, _ = tensors
    _, eps, _, by_batch, momentum, _, _ = norm
    backend = _serving(x)
    if backend is None or not eps > 0:
        return None
    tracks = mean is not None and var is not None
    if not by_batch:
        return _by_constants(backend, tensors, norm) if tracks else None
    if not (momentum is None or (type(momentum) is float and 0 <= momentum <= 1)):
        return None
    if not tracks or frozen():
        if not (tracks or mean is var) or sharing is not None or x.numel() <= x.size(1):
            return None
        if tracks:
            tensors = (*tensors[:4], None, None, None, None)
        return _by_own(backend, tensors, norm)
    if sharing is not None and (group := sharing_group(sharing.asked)) is not None:
        sharing = sharing._replace(group=group, seen=None, norm=Channels._make(norm), tracks=True)
        return None if residual is not None else _by_all(backend, tensors, sharing)
    return _by_own(backend, tensors, norm)


def group_norm(tensors: Any, norm: Any) -> Maybe:
    """By the statistics of each sample's groups of channels."""
    x, groups, backend = tensors[0], norm[0], _serving(tensors[0])
    if backend is None or not (x.dim() > 1 and norm[1] >= 0 and x.numel() >= 2 * groups > 0):
        return None
    return _by_own(backend, tensors, norm)


def instance_norm(
    x: Tensor,
    weight: Maybe,
    bias: Maybe,
    eps: float,
    act: str = "identity",
    rank: int | None = None,
    channels: int | None = None,
) -> Maybe:
    """By the statistics of each sample's channels, of a batch; where given, of so many axes and channels."""
    backend = _serving(x)
    if backend is None or not (x.dim() == rank if rank else x.dim() > 1) or not eps >= 0:
        return None
    channels = x.size(1) if channels is None else channels
    if x.size(1) != channels or x.numel() <= x.size(0) * channels:
        return None
    tensors = x, weight, bias, None, None, None, None, None
    return _by_own(backend, tensors, (channels, eps, act, True, None, True, False))


def _by_own(backend: Any, tensors: Any, norm: Any) -> Maybe:
    """`ChannelNorm`, which also updates the running statistics.

    The caller has checked what no kernel checks: `eps`, the momentum, and that x has channels with more than
    one value each.
    """
    x, weight, bias, residual, mean, var, num_batches, mask = tensors
    groups, eps, act, _, momentum, _, _ = norm
    y: Maybe
    if backend is ATEN:
        if not (_plain(weight, bias) and (residual is None or _is_like(residual, x))):
            return None
        if groups:
            return by_torch.group_norm(tensors, norm)
        made = by_torch.batch_norm(tensors, norm)
        return None if made is None else made[0]
    if NODES is not None:
        running = None if mean is None else (mean, var, num_batches, momentum)
        y = NODES.channel_norm(
            x, weight, bias, eps, act, groups, running, residual, backend is TRITON_AS_GIVEN
        )
        if y is not None:
            return y
    if not usual_call(tensors, mean is not None):
        return None
    try:
        if _recorded(x, weight, bias, residual):
            call = ChannelCall(backend, _record(norm), None, False, None, bias is not None)
            y = apply_norm(x, weight, bias, residual, mask, (mean, var, num_batches), call)
            return y
        y = backend.channel_forward(tensors, norm)[0]
        return y
    except RefusedError:
        return None


def _by_constants(backend: Any, tensors: Any, norm: Any) -> Maybe:
    """`ChannelAffine` by running statistics."""
    x, weight, bias, residual, mean, var, _, mask = tensors
    _, eps, act, _, _, _, _ = norm
    y: Maybe
    if backend is ATEN:
        if not (_plain(weight, bias) and (residual is None or _is_like(residual, x))):
            return None
        return by_torch.evaluation(tensors, norm)
    if NODES is not None and residual is None:
        y = NODES.evaluation(x, weight, bias, eps, act, mean, var, backend is TRITON_AS_GIVEN)
        if y is not None:
            return y
    if not usual_call(tensors):
        return None
    try:
        if _recorded(x, weight, bias, residual):
            constants = backend.ops.constants_of(mean, var, eps)
            call = ChannelCall(backend, _record(norm), None, False, None, bias is not None)
            y = apply_affine(x, weight, bias, residual, mask, *constants, call)
            return y
        y = backend.channel_evaluate(tensors, norm)
        return y
    except RefusedError:
        return None


def _by_all(backend: Any, tensors: Any, sharing: Sharing) -> Maybe:
    """`ChannelNorm` of all ranks' inputs, on the CPU, for a call that no checkpoint repeats.

    Here a kernel would reject an argument too late, while other ranks wait for this rank's sums. So
    everything that it may reject is checked before. Ranks on the fast path and ranks on the full path send
    the same messages.
    """
    x, weight, bias, _, mean, var, count, _ = tensors
    if backend is not CPU_AS_GIVEN or x.dtype not in _DTYPES or sharing.norm.act not in ACTIVATIONS:
        return None
    channels = x.shape[1]
    if may_be_repeated() or channels == 0 or not usual_call(tensors, moves=True):
        return None
    for v in (weight, bias, mean, var):
        if v is not None and not (_of_channels(v, channels) and not v.is_inference()):
            return None
    if x.is_inference() or (count is not None and not (count.dtype is torch.int64 and count.numel() == 1)):
        return None
    call = ChannelCall(backend, sharing.norm, sharing, False, None, bias is not None)
    y: Tensor = apply_norm(x, weight, bias, None, None, (mean, var, count), call)
    return y


def _of_channels(vector: Tensor, channels: int) -> bool:
    strided = vector.layout is torch.strided and vector.is_contiguous()
    return strided and vector.dtype in _DTYPES and vector.shape == (channels,)


def eps_of(x: Tensor, eps: float | None) -> float:
    """The eps of an RMS norm, for which None is the machine epsilon of the arithmetic."""
    return eps if eps is not None else _EPS_OF_DOUBLE if x.dtype is torch.float64 else _EPS


def row_norm(  # noqa: PLR0913
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: Sequence[int],
    eps: float | None,
    rms: bool,
    dim: int | None = None,
    weight_offset: float = 0.0,
    cast: str = "after",
    residual: Maybe = None,
    gate: Maybe = None,
    scale: Maybe = None,
    shift: Maybe = None,
) -> Any:
    """`RowNorm` over the last axes, or over the axis `dim`. With a residual, the norm of the sum, and that
    sum. Calls with a residual or a scale are fast only in C++."""
    backend = _serving(x)
    if backend is None or cast not in ("after", "before") or type(weight_offset) not in (float, int):
        return None
    eps, before = eps_of(x, eps) if eps is None else eps, cast == "before"
    if NODES is not None and backend is not ATEN:
        triton = backend is TRITON_AS_GIVEN
        y = NODES.row_norm(
            x, weight, bias, eps, shape, dim, rms, weight_offset, before, residual, gate, scale, shift, triton
        )
        if y is not None:
            return y
    if residual is not None or scale is not None or shift is not None:
        return None
    usual = dim is None and weight_offset == 0 and not before
    if backend is ATEN and not (rms and usual):
        start = x.dim() - len(shape)
        if not usual or start < 0 or x.shape[start:] != shape or not _plain(weight, bias):
            return None
        made = by_torch.row_norm(x, None, weight, bias, Rows(start, x.dim(), eps, rms))
        return None if made is None else made[0]
    first = -len(shape) if dim is None else dim
    start = first + x.dim() if first < 0 else first
    stop = start + len(shape)
    if not (eps >= 0 and 0 <= start < stop and x.shape[start:stop] == shape and isfinite(weight_offset)):
        return None
    usual = usual_call((x, weight, bias, None, None, None, None, None), dense=False)
    if not (usual and (dim is None or len(shape) == 1)):
        return None
    for v in (weight, bias):
        if v is not None and not (v.shape == shape and v.is_floating_point()):
            return None
    if before and weight is not None and torch.promote_types(weight.dtype, x.dtype) != x.dtype:
        return None  # the output has the wider dtype
    rows = Rows(start, stop, eps, rms, weight_offset, before)
    try:
        if _recorded(x, weight, bias):
            y = apply_row_norm(x, None, None, None, None, weight, bias, None, RowCall(backend, rows))
            return y
        y = backend.row_forward((x, None, None, None, None, weight, bias), rows)[0]
        return y
    except RefusedError:
        return None


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    shape: Sequence[int],
    eps: float | None,
    act: str,
    norm_before_gate: bool,
    cast: str,
) -> Tensor | None:
    """`GatedNorm`; only in C++."""
    backend = None if NODES is None else _serving(x)
    if backend is None or backend is ATEN or cast not in ("after", "before"):
        return None
    how = act, bool(norm_before_gate), cast == "before", backend is TRITON_AS_GIVEN
    y: Maybe = NODES.gated_norm(x, gate, weight, eps_of(x, eps), shape, *how)
    return y


if NODES is not None:
    NODES.set_backward(backward_of_node)
    hand_over(NODES, (*FORWARD, *BACKWARD, EVALUATE), INTERPRETED)
    for _function in (ChannelNorm, ChannelAffine, RowNorm, GatedNorm):
        torch.autograd.graph.Node.register(getattr(NODES, f"{_function.__name__}Backward"))
