"""Checks that a tensor still holds what a node read: by its version counter, and a sample of its bytes.

Every in-place edit raises autograd's version counter, except edits through `.data`. Those are found by the
sample if they change a sampled byte, as an optimizer's step or a weight average does.
"""

from __future__ import annotations

import gc
import sys
import warnings
from ctypes import string_at

import torch
from torch import Tensor

from leannorm._errors import LeannormError
from leannorm.autograd.nodes import NODES
from leannorm.saving.shards import PLAIN, as_plain, counter_of, local_of

RUNS, RUN = 4, 256
"""A sample is RUNS runs of RUN bytes: 256 elements in float32. Read by address, it takes a microsecond."""
PLACES, PLACE = 256, 8
"""Zeros, such as a ReLU's, and NaN stay what they are where a tensor is scaled. So where each of these runs
repeats one value, a sample also has PLACES runs of PLACE bytes."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EMPTY: dict[tuple[torch.device, torch.dtype], Tensor] = {}


class EditedError(RuntimeError):
    """In the forward pass: a tensor no longer holds what a node read, so no step may read it."""


class RebuildError(LeannormError, RuntimeError):
    """A rebuilt tensor is not the one that the forward pass saved."""


def is_parameter(tensor: Tensor) -> bool:
    """Is it a parameter or a view of one? Those exist without autograd too, also where they are frozen."""
    base = tensor._base
    if base is None:
        base = tensor
    if base.requires_grad and base.is_leaf:
        return True
    return type(base) is not Tensor and isinstance(base, torch.nn.Parameter)


def version_of(tensor: Tensor) -> Tensor | None:
    """A tensor without memory that shares `tensor`'s version counter; None for a fake tensor."""
    if type(tensor) not in PLAIN:
        return counter_of(tensor)
    kind = tensor.device, tensor.dtype
    empty = _EMPTY.get(kind)
    if empty is None:
        empty = _EMPTY[kind] = torch.empty(0, device=kind[0], dtype=kind[1])
    if NODES is not None:
        shared: Tensor = NODES.version_of(tensor, empty)
        return shared
    counter = tensor.detach()
    counter.data = empty  # replaces the memory and keeps the version counter
    return counter


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that a NaN equals itself."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def sample_of(tensor: Tensor) -> bytes | None:
    """The tensor's size and some of its bytes, spread over its memory; None if it is not on the CPU, has no
    memory (in forward-mode AD), or gaps between its elements. A parameter with gaps is copied for this."""
    if type(tensor) not in PLAIN:
        tensor = _own(tensor)
    content: bytes | None = _content(tensor) if NODES is None else NODES.sample(tensor)
    if content is None and tensor.requires_grad and tensor.is_leaf and _has_gaps(tensor):
        return sample_of(tensor.detach().contiguous())
    if content is None or NODES is not None:
        return content
    return tensor.numel().to_bytes(8, sys.byteorder) + content


def _has_gaps(tensor: Tensor) -> bool:
    is_there = tensor.is_cpu and tensor.layout == torch.strided and type(tensor) in PLAIN
    return is_there and tensor.untyped_storage().nbytes() > 0 and not _fills_its_memory(tensor)


def matches(sample: bytes | None, tensor: Tensor) -> bool:
    """Does the tensor still hold the sampled bytes? True without a sample."""
    return sample is None or sample_of(tensor) == sample


_ROUNDING = 2**-6  # of the largest sampled value; four units in the last place of bfloat16


def near(sample: bytes | None, tensor: Tensor) -> bool:
    """Do the sampled values differ by rounding alone, as where a library has chosen another kernel? If they
    do, it is warned of."""
    other = sample_of(tensor)
    if sample is None or other is None:
        return True
    real = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    if sample[:8] != other[:8] or not real.is_floating_point:
        return sample == other
    a, b = (_decoded(content[8:], tensor.nbytes, real) for content in (sample, other))
    if len(a) != len(b):  # one repeats a value in the first runs, and has more of them
        a, b = (values[: min(len(a), len(b))] for values in (a, b))
    largest = torch.maximum(a.abs(), b.abs()).nan_to_num(0, 0).max() if len(a) else 0.0
    rounded = torch.allclose(a, b, 0, _ROUNDING * float(largest), equal_nan=True)
    if rounded and not torch.allclose(a, b, 0, 0, equal_nan=True):  # NaNs may have other payloads
        warnings.warn(_ROUNDED, UserWarning, stacklevel=2)
    return rounded


_ROUNDED = (
    "leannorm: what lean() has rebuilt differs from what was saved, as by rounding: a library has chosen"
    " another kernel, or a tensor was edited a little where autograd does not see it. The gradients of this"
    " step are not bit for bit those without lean(); lean(verify=True) names the layer"
)


def _decoded(content: bytes, nbytes: int, dtype: torch.dtype) -> Tensor:
    """The values that lie whole in the runs of a sample, which begin at any byte."""
    parts, size = list[bytes](), dtype.itemsize
    runs = [(RUNS, RUN), (PLACES, PLACE)] if nbytes > RUNS * RUN else [(1, nbytes)]
    for count, length in runs:
        step = (nbytes - length) // max(count - 1, 1)
        for i in range(count if content else 0):
            run = content[i * length + -i * step % size : (i + 1) * length]
            parts.append(run[: len(run) // size * size])
        content = content[count * length :]
    whole = bytearray(b"".join(parts))
    return torch.frombuffer(whole, dtype=dtype).double() if whole else torch.empty(0, dtype=torch.double)


def _own(tensor: Tensor) -> Tensor:
    """What this rank has of a DTensor; the plain tensor of a subclass that has memory as any other."""
    local = local_of(tensor)
    if local is not None:
        return local
    if type(tensor).__torch_dispatch__ is not _NO_DISPATCH:
        return tensor
    with as_plain(tensor):
        return tensor.detach()


_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


def _content(tensor: Tensor) -> bytes | None:
    if type(tensor) not in PLAIN or not tensor.is_cpu or tensor.layout != torch.strided:
        return None
    if not (tensor.is_contiguous() or _fills_its_memory(tensor)) or tensor.untyped_storage().nbytes() == 0:
        return None
    start, nbytes = tensor.data_ptr(), tensor.numel() * tensor.itemsize
    if nbytes <= RUNS * RUN:
        return string_at(start, nbytes) if start or not nbytes else None
    if not start:
        return None
    runs = _runs(start, nbytes, RUNS, RUN)
    more = all(run[PLACE:] == run[:-PLACE] for run in runs)  # each repeats one value, such as zero or NaN
    return b"".join([*runs, *(_runs(start, nbytes, PLACES, PLACE) if more else ())])


def _runs(start: int, nbytes: int, count: int, length: int) -> list[bytes]:
    step = (nbytes - length) // (count - 1)
    return [string_at(start + i * step, length) for i in range(count)]


def _fills_its_memory(tensor: Tensor) -> bool:
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return extent == tensor.numel()


def owner_of(tensor: Tensor, made_by: str) -> str:
    """A parameter's name in the largest model that holds it. For error messages only: scans all objects."""
    what = f"{made_by or 'a leaf'} of shape {list(tensor.shape)}"
    names = [
        (len(name), f"the parameter {name} of {type(module).__name__}, of shape {list(tensor.shape)},")
        for module in gc.get_objects()
        if issubclass(type(module), torch.nn.Module)  # isinstance would trigger lazy objects
        for name, parameter in module.named_parameters()
        if parameter is tensor
    ]
    return max(names)[1] if names else f"the output of {what}" if made_by else what


class FreedError(RuntimeError):
    """The memory of a tensor that a step reads was freed, as sharding does with weights."""


def check_there(tensor: Tensor, name: str) -> None:
    """Raises if the tensor's memory was freed since the forward pass, as sharding does with weights."""
    if type(tensor) in PLAIN and tensor.numel() and tensor.layout == torch.strided:
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes == 0:
            raise FreedError(
                f"what {name or 'a parameter'} of shape {list(tensor.shape)} held was freed since the"
                " forward pass, as sharding does with weights, and rebuilding a layer's product needs it: use"
                ' leannorm.lean("norm"), which reads no parameter in the backward pass, or shard whole blocks'
            )
