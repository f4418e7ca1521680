"""Tensors held in fewer bytes: integers in a narrower dtype, widening casts in their source's dtype, masks
as bits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from math import prod
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from leannorm._torch import left_to_python
from leannorm.ops.modes import in_no_mode
from leannorm.saving.device import asynchronous
from leannorm.saving.evidence import bits
from leannorm.saving.flags import current
from leannorm.saving.graph import constant, inputs_of, kind_of
from leannorm.saving.masks import mask_as_bits
from leannorm.saving.recipes.views import SAME_MEMORY, cast_to
from leannorm.saving.steps import Step
from leannorm.saving.values import Value

_SOFTMAXES = {"LogSoftmaxBackward0": torch.log_softmax, "SoftmaxBackward0": torch.softmax}


class CountingHook:
    """A pack hook that is told how many references its tensor has, and which frame called autograd."""

    @left_to_python
    def pack(self, tensor: Tensor) -> Any:
        # Counted in the function that C++ calls: between two Python functions an argument counts twice
        # while torch's compiler watches frames, and after it has failed it may watch for good.
        references = sys.getrefcount(tensor)
        try:
            frame = sys._getframe(1)
        except ValueError:  # a thread of torch's own, as torch.jit.fork starts it
            frame = sys._getframe()
        return self.packed(tensor, references, frame)

    def packed(self, tensor: Tensor, references: int, frame: FrameType) -> Any:
        """What is saved in the tensor's place."""
        raise NotImplementedError


class _Probe(CountingHook):
    def packed(self, tensor: Tensor, references: int, frame: FrameType) -> int:
        return references


_count = _Probe().pack


@lru_cache
def references_when_alone(count: Callable[[Tensor], int] = _count) -> int:
    """The count of a tensor that only autograd holds, as this hook counts."""

    def run() -> int:
        with saved_tensors_hooks(count, lambda t: t):
            node: Any = torch.relu(torch.zeros(1, requires_grad=True)).grad_fn
        references: int = node._raw_saved_result.data
        return references

    return in_no_mode(run)  # what the first caller finds serves the whole process


def is_alone(tensor: Tensor, references: int) -> bool:
    """Does autograd alone hold the tensor? Not a view: the caller may hold its base. `references`: of it.

    Else the caller has the memory anyway, and a copy of it would not see what he writes there.
    """
    return references <= references_when_alone() and tensor._base is None


def narrowed(tensor: Tensor) -> Step | None:
    """A step from a smaller copy, chosen by the values: integers in a narrower dtype, masks as bits."""
    if not tensor.is_contiguous():
        return None
    if tensor.dtype is torch.bool or tensor.is_floating_point():
        return mask_as_bits(tensor)
    if tensor.dtype is not torch.int64 or asynchronous(tensor):
        return None
    fake = isinstance(tensor, FakeTensor)  # has no values; nearly all pooling indices fit in int16
    low, high = (0, 0) if fake else (int(v) for v in tensor.aminmax())
    return _in_fewer_bytes(tensor, low, high)


POOLS = {"MaxPool2DWithIndicesBackward0": 2, "MaxPool3DWithIndicesBackward0": 3}  # and their spatial dims


def narrowed_positions(tensor: Tensor, node: Any, axes: int) -> Step | None:
    """The same for a max pooling node's indices, which are bounded by the input's spatial size.

    For devices, where reading the numbers themselves would stall the step.
    """
    source = inputs_of(node)[0]
    return None if source is None else _in_fewer_bytes(tensor, 0, prod(source.shape[-axes:]) - 1)


def _in_fewer_bytes(tensor: Tensor, low: int, high: int) -> Step | None:
    for dtype in (torch.int16, torch.int32):
        span = torch.iinfo(dtype)
        if span.min <= low and high <= span.max:
            value = Value(tensor.to(dtype), 0, name="integers in a narrower dtype")
            return Step(cast_to, (value,), (), (torch.int64,), kind="scale")
    return None


WIDENS = {*_SOFTMAXES, "ToCopyBackward0"}  # nodes whose output may be held in fewer bytes

_MOVE_ONLY = {*SAME_MEMORY, "CloneBackward0"}


def narrow_source(node: Any, tensor: Tensor, logits: Tensor | None) -> Step | None:
    """A step for a widening cast, or for a softmax of one, from a copy of the cast in its source's dtype.

    `logits` is the input of the softmax call that is running, if one is. On a CPU the cast's bits are
    looked at every time, since it may have been edited.
    """
    narrow_input = _input_widened_by(node, tensor, logits)
    if narrow_input is not None:
        copied = Value(narrow_input.detach().clone(), 0, name="source of a cast")
        constants = constant(node, "dim"), tensor.dtype
        return Step(_SOFTMAXES[kind_of(node)], (copied,), (), constants, flags=current())
    widening = _widening_cast(node, tensor, logits)
    if widening is None or not torch.ops.aten.is_non_overlapping_and_dense(widening[0]):
        return None
    cast, dtype = widening
    narrow = _in_source(cast.detach(), dtype)
    if narrow is None:
        return None
    value = Value(narrow, narrow._version, name="source of a cast")
    step = Step(cast_to, (value,), (), (cast.dtype,), flags=current())
    if cast is tensor:
        return step
    value = Value(None, 0, step, name=kind_of(cast.grad_fn))
    return Step(_SOFTMAXES[kind_of(node)], (value,), (), (constant(node, "dim"),), flags=current())


def copy_that(step: Step) -> Value:
    """The narrower copy that this step reads, perhaps through a cast."""
    narrow = step.inputs[0]
    while narrow.step is not None and narrow.step.inputs:
        narrow = narrow.step.inputs[0]
    return narrow


def narrow_bytes(node: Any, tensor: Tensor, logits: Tensor | None) -> int:
    """What `narrow_source` would hold for this tensor; 0 if that is nothing."""
    narrow_input = _input_widened_by(node, tensor, logits)
    if narrow_input is not None:
        return narrow_input.nbytes
    widening = _widening_cast(node, tensor, logits)
    return 0 if widening is None else tensor.numel() * widening[1].itemsize


def _input_widened_by(node: Any, tensor: Tensor, logits: Tensor | None) -> Tensor | None:
    """The logits of a softmax that widens them itself, such as `F.softmax(x, dim, dtype=torch.float32)`."""
    if kind_of(node) not in _SOFTMAXES or logits is None or logits.grad_fn is None:
        return None
    if not logits.is_floating_point() or logits.itemsize >= tensor.itemsize or logits.shape != tensor.shape:
        return None
    source = node.next_functions[0]
    if source[0] is not None and kind_of(source[0]) == "ToCopyBackward0":
        source = source[0].next_functions[0]
    return logits if source == (logits.grad_fn, logits.output_nr) else None


def _widening_cast(node: Any, tensor: Tensor, logits: Tensor | None) -> tuple[Tensor, torch.dtype] | None:
    """The tensor itself, or the logits of a softmax, if that is a widening cast; and the dtype before it."""
    kind = kind_of(node)
    cast: Tensor | None = tensor
    if kind in _SOFTMAXES:
        cast = logits
        if cast is None or cast.grad_fn is None:
            return None
        if (cast.grad_fn, cast.output_nr) != node.next_functions[0]:
            return None
    elif kind != "ToCopyBackward0":
        return None
    assert cast is not None
    dtype = _source_dtype(cast, cast.grad_fn)
    return None if dtype is None else (cast, dtype)


def _source_dtype(tensor: Tensor, node: Any) -> torch.dtype | None:
    """The dtype before the cast; None if this is no widening cast, or a view or copy of it."""
    while node is not None and kind_of(node) in _MOVE_ONLY:
        node = node.next_functions[0][0]
    source = inputs_of(node)[0] if node is not None and kind_of(node) == "ToCopyBackward0" else None
    if source is None:
        return None
    dtype: torch.dtype = source.dtype
    widened = dtype.is_floating_point and tensor.is_floating_point() and dtype.itemsize < tensor.itemsize
    return dtype if widened else None


def _in_source(wide: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A copy of a cast in the dtype before it; None if the bits, cast back, would be others."""
    if asynchronous(wide) or isinstance(wide, FakeTensor):
        return wide.to(dtype)
    if (wide.dtype, dtype) == (torch.float32, torch.bfloat16) and wide.is_cpu:
        return _upper_halves(wide)
    narrow = wide.to(dtype)
    return narrow if _widens_to(narrow, wide) else None


CHUNK = 1 << 18  # elements that are compared at once, so that no second tensor of this size is made


def _widens_to(narrow: Tensor, tensor: Tensor) -> bool:
    """Are the bits of the narrow tensor, cast back, those of the wide one? Both lie alike in their memory."""
    size = (tensor.numel(),)
    narrow, wide = (t.detach().as_strided(size, (1,)) for t in (narrow, tensor))
    parts = zip(narrow.split(CHUNK), wide.split(CHUNK), strict=True)
    return all(torch.equal(bits(a.to(tensor.dtype)), bits(b)) for a, b in parts)


def _upper_halves(wide: Tensor) -> Tensor | None:
    """The same for bfloat16, which is the upper half of a float32's bits. They are copied, since a cast may
    change those of a NaN, or flush a denormal."""
    memory = wide.as_strided((wide.numel(),), (1,))
    if np.bitwise_or.reduce(memory.view(torch.int32).numpy()) & 0xFFFF:
        return None
    upper = memory.view(torch.int16).view(-1, 2)[:, int(sys.byteorder == "little")]
    narrow = torch.empty_like(wide, dtype=torch.bfloat16)  # which lies in memory like it
    narrow.as_strided(upper.shape, (1,)).view(torch.int16).copy_(upper)
    return narrow
