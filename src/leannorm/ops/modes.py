"""The mode of a call: compiled, transformed by functorch, recorded by autograd, captured, or plain eager."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd import forward_ad

from leannorm._torch import RELEASE

_T = TypeVar("_T")
_functorch = torch._C._functorch
_by_dynamo, _exporting = torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_dispatch_mode, _mode_keys = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
_included, _above_autograd = torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch
_tracing = torch._C._is_tracing
_backward_pass = torch._C._current_graph_task_id  # -1 outside of one
_PLAIN = (Tensor, torch.nn.Parameter)
_BY_FLAG = RELEASE < (2, 13)


def traced() -> bool:
    """Whether this code is being traced by torch's compiler, or exported.

    `torch.compiler.is_compiling()` and `is_exporting()` are true for all threads while one compiles or
    exports; a thread that exports is in modes of torch's.
    """
    return _by_dynamo() or (_exporting() and bool(_dispatch_modes() or _function_modes()))


def recording() -> bool:
    """Whether one of torch's tracers (`make_fx`, AOTAutograd) records this eager call in a graph.

    It records operators below autograd, or (`pre_dispatch`) an autograd function's forward without gradients:
    either way the function's derivative is lost. Code that differentiates the graph has only its operators,
    so these must be plain torch's.
    """
    if _by_dynamo() or not (_dispatch_modes() or _included(_above_autograd)):
        return False
    tracers = _mode_keys.PROXY, _mode_keys.FUNCTIONAL
    tracing = _included(_above_autograd) or any(_dispatch_mode(key) is not None for key in tracers)
    return tracing and not (_exporting() or _compiling())


def _compiling() -> bool:
    """Whether torch compiles a forward pass or (compiled autograd) a backward pass.

    It traces both, and differentiates neither again: in its graphs kernels stay kernels.
    """
    by_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return TracingContext.try_get() is not None or getattr(by_autograd, "compiled_autograd_enabled", False)


def in_no_mode(run: Callable[[], _T]) -> _T:
    """`run()` in a thread of its own, which is not in the caller's modes."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def transformed(*tensors: Tensor | None) -> bool:
    """Whether a functorch transform, forward-mode AD or a tracer is active, so that only plain torch
    operations work.

    This includes compiled code, where torch drops the backward pass of an autograd function under
    `torch.func.grad`.
    """
    compiling = traced()
    if compiling and _within_transforms():
        return True
    if forward_ad._current_level >= 0:  # compiled code checks again before each call
        return True
    if compiling:
        return False
    if _functorch.peek_interpreter_stack() is not None:  # even if it wraps none of these tensors
        return True
    if recording():
        return True
    wrapped = _functorch.is_functorch_wrapped_tensor
    for t in tensors:  # noqa: SIM110 (a generator would take twice as long)
        if t is not None and wrapped(t):
            return True
    return False


def _within_transforms() -> bool:
    """Called while a compiler traces; counts transforms around the code and those that it has entered by
    then.

    The answer is cached; torch itself compiles again for tensors of another transform.
    """
    return bool(_functorch.get_dynamic_layer_stack_depth() > 0 or forward_ad._current_level >= 0)


_within_transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]


def exporting() -> bool:
    """Whether this call is written into an exported graph, by `torch.export` or by TorchScript's tracer.

    ONNX's two exporters and AOTInductor use one of them. This is the one place that decides.
    """
    if traced():
        # torch 2.10 compiles is_exporting() as if it were true, but reads the flag behind it
        return torch.compiler._is_exporting_flag if _BY_FLAG else torch.compiler.is_exporting()
    return _tracing()  # torch.jit.is_tracing, in a third of its time


def sharded(*tensors: Tensor | None) -> bool:
    """Whether one is a DTensor, for which `functional/shards.py` runs the norm on local tensors."""
    for t in tensors:  # noqa: SIM110 (compilers of all releases trace a loop; the class may not be imported)
        if t is not None and type(t) not in _PLAIN and hasattr(t, "placements"):
            return True
    return False


def recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd records this call; otherwise a Function only costs time."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def differentiable(*tensors: Tensor | None) -> bool:
    """Whether autograd, a transform or a compiler may record this call, so that nothing may be written in
    place."""
    return torch.is_grad_enabled() or traced() or transformed(*tensors)


def many_at_once(dy: Tensor) -> bool:
    """Whether these are several gradients (`is_grads_batched=True`, `vmap`), which do not fit in one
    tensor."""
    if traced():
        return False
    return bool(_functorch.is_legacy_batchedtensor(dy)) or transformed(dy)


def rebuilding() -> bool:
    """Whether this forward pass is a recompute by a backward pass (checkpointing)."""
    return not traced() and _backward_pass() != -1


def capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured, so that the host may not wait for the device or copy to it."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for this tensor's device. (The meta device has none, and asking is an error.)"""
    device = x.device.type
    # not called in compiled code: in torch 2.10 it breaks the graph
    known = traced() or torch.amp.is_autocast_available(device)
    return device != "meta" and known and torch.is_autocast_enabled(device)
