"""Dropped tensors that are rebuilt when an operator reads them, and not before.

A node asks for all of its tensors before it computes anything, and has them until it has ended. So the
rebuilt input of a linear layer would be there while the gradient of that input is made, and with a product,
both factors and both gradients. A node of these kinds gets a tensor without memory instead, `Unbuilt`. The
operator that reads it has it rebuilt, and frees it. Some operators write a gradient over it instead, if
nobody else has its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from leannorm.autograd.nodes import NODES
from leannorm.saving.evidence import layout
from leannorm.saving.flags import without_autocast

_aten = torch.ops.aten
_SOFTMAX = _aten._softmax_backward_data.default
Reader = Callable[[tuple[Any, ...]], Any]
READERS: dict[Any, Reader] = {}
"""By operator, a function of its positional arguments that returns its result, or NotImplemented if it needs
the whole tensors. Every other operator gets those."""
_OVERWRITE = {
    _aten.mul.Tensor: (_aten.mul.out, "out"),
    _SOFTMAX: (_aten._softmax_backward_data.out, "grad_input"),
    _aten.gelu_backward.default: (_aten.gelu_backward.grad_input, "grad_input"),
    _aten.silu_backward.default: (_aten.silu_backward.grad_input, "grad_input"),
    _aten.sigmoid_backward.default: (_aten.sigmoid_backward.grad_input, "grad_input"),
    _aten.tanh_backward.default: (_aten.tanh_backward.grad_input, "grad_input"),
}
"""Operators of a gradient and a saved tensor that compute row by row, or element by element, and so may
write their result over the saved tensor: by which overload, and the name of its argument."""
READ_ROWS = {"aten::_log_softmax": "LogSoftmaxBackward0", "aten::nll_loss_forward": "NllLossBackward0"}
"""The nodes that get a stand-in for a log-softmax, by operator: they read it by rows, or no value of it."""
MAY_WAIT = {
    "aten::mm": "MmBackward0",
    "aten::bmm": "BmmBackward0",
    "aten::mul": "MulBackward0",
    "aten::_softmax": "SoftmaxBackward0",
    "aten::gelu": "GeluBackward0",
    "aten::silu": "SiluBackward0",
    "aten::sigmoid": "SigmoidBackward0",
    "aten::tanh": "TanhBackward0",
}
"""The nodes that get a stand-in for a large tensor, by operator: a gradient of its size takes its memory, or
is made once it is freed. The node of a linear layer with a bias, `AddmmBackward0`, makes the gradient of its
input first: to rebuild the input after that would take more memory, not less."""

# Functions of torch that are not public: if one is missing, nodes get rebuilt tensors
SUPPORTED = hasattr(torch._C, "_len_torch_dispatch_stack") and hasattr(
    torch._C._functorch, "maybe_current_level"
)


def reads(operator: Any) -> Callable[[Reader], Reader]:
    """Add a function to `READERS`."""

    def added(reader: Reader) -> Reader:
        READERS[operator] = reader
        return reader

    return added


class Source:
    """A tensor that was dropped by a pass that C++ records, and can be rebuilt as a whole or, if it is a
    log-softmax, by rows. It can be read once."""

    def __init__(self, saved: Any) -> None:
        self._saved = saved

    def skip(self) -> None:
        """Note that a reader needed no rebuild."""
        NODES.record_skip(self._saved)

    def read(self) -> tuple[Tensor, bool]:
        """The whole tensor, and whether nobody else has its memory."""
        with torch.no_grad(), without_autocast():
            made: tuple[Tensor, bool] = NODES.record_read(self._saved)
            return made

    def source_of_rows(self) -> tuple[Tensor, list[torch.dtype], Any]:
        """The tensor from whose rows these are made, the casts in between, and what the step has spent, if
        that is measured."""
        made: tuple[Tensor, list[torch.dtype], Any] = NODES.record_rows_of(self._saved)
        return made


class Unbuilt(Tensor):
    """Stands for a tensor that is not rebuilt yet."""

    value: Source

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, value: Source, shape: Any, strides: Any, dtype: torch.dtype, device: Any) -> Unbuilt:
        made: Unbuilt = Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=device)
        made.value = value
        return made

    def __init__(self, *_: object) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is _aten.detach.default:
            x = args[0]
            return cls(x.value, x.shape, x.stride(), x.dtype, x.device)
        made = NotImplemented
        if function in _OVERWRITE:
            made = _overwritten(function, args, kwargs)
        elif function in READERS and not kwargs:
            made = READERS[function](args)
        if made is not NotImplemented:
            return made
        return function(*tree_map_only(cls, _whole, args), **tree_map_only(cls, _whole, kwargs))


def _whole(x: Unbuilt) -> Tensor:
    return x.value.read()[0]


def _overwritten(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the operator, in the memory of the saved tensor if nobody else has that; NotImplemented
    if its arguments are not a gradient and a saved tensor."""
    if type(args[0]) is not Tensor or type(args[1]) is not Unbuilt:
        return NotImplemented
    whole, alone = args[1].value.read()
    alone = alone and (function is not _SOFTMAX or whole.is_cpu)  # what a device's kernel allows is not known
    if alone and is_of_torch(whole) and layout(args[0]) == layout(whole):
        overload, result = _OVERWRITE[function]
        return overload(args[0], whole, *args[2:], **kwargs, **{result: whole})
    return function(args[0], whole, *args[2:], **kwargs)


def is_of_torch(t: Tensor) -> bool:
    """Whether torch's allocator made this tensor's memory, for this process alone.

    Other memory may belong to an array, a buffer, a file or another process, which no count here shows.
    """
    memory = t.untyped_storage()
    return memory.resizable() and (memory.device.type != "cpu" or not memory.is_shared())


def stand_in(
    saved: Any, shape: list[int], strides: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """A tensor without memory, for a node that reads what was `saved` and may wait for it. None if a mode or
    a transform is active, or if the backward pass is recorded."""
    if not SUPPORTED or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return None
    if torch._C._functorch.maybe_current_level() is not None:
        return None
    return Unbuilt(Source(saved), shape, strides, dtype, device)
