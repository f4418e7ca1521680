"""The gradient of a log-softmax, some rows at a time: its rebuilt output never exists as a whole.

At the loss of a language model the output of the log-softmax, the gradient that comes in and the one that
goes out are the largest tensors of a step, and together its peak. Two of them can be avoided. The node gets a
stand-in (unbuilt.py). The operator that reads it rebuilds some rows, and writes their gradient over the
incoming one if nothing else refers to that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from math import prod
from time import perf_counter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from leannorm.ops.modes import capturing, in_no_mode
from leannorm.saving import unbuilt
from leannorm.saving.evidence import layout, same_bits
from leannorm.saving.flags import Flags, without_autocast
from leannorm.saving.unbuilt import Source, Unbuilt, reads

_aten = torch.ops.aten
_GRADIENT = _aten._log_softmax_backward_data.default
_OF_LOSS = _aten.nll_loss_backward.default

_ELEMENTS, _ON_DEVICE = 1 << 16, 1 << 24  # in a part: on a CPU it stays in the cache
_ROWS = 16  # a part has a multiple of this many rows, so that its memory is aligned as the whole is
_FEWEST = 4  # parts; with fewer, little is saved

# Functions of torch that are not public: if one is missing, log-softmaxes are rebuilt as a whole
_SUPPORTED = hasattr(Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")
_SEEN: dict[Hashable, bool] = {}
_MAX_SEEN = 1 << 10


def _parts(shape: torch.Size, device: torch.device) -> Iterator[tuple[int, int]]:
    rows, most = prod(shape[:-1]), _ELEMENTS if device.type == "cpu" else _ON_DEVICE
    step = max(most // shape[-1] // _ROWS, 1) * _ROWS
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def fits(tensor: Tensor, flags: Flags) -> bool:
    """Whether the gradient of such a log-softmax may read it some rows at a time."""
    try:
        return _fits(tensor, flags)
    except Exception:  # then it is rebuilt as a whole
        return False


def _fits(tensor: Tensor, flags: Flags) -> bool:
    """Whether such a log-softmax over its last dim has the same bits in parts. Tried once per layout."""
    if not (_SUPPORTED and unbuilt.SUPPORTED) or type(tensor) is not Tensor or not tensor.is_contiguous():
        return False
    if not tensor.numel() or len(list(_parts(tensor.shape, tensor.device))) < _FEWEST:
        return False
    key = layout(tensor), tensor.device, flags
    if key not in _SEEN:
        if capturing(tensor):
            return False
        if len(_SEEN) >= _MAX_SEEN:
            _SEEN.clear()
        _SEEN[key] = _try(tensor.detach())
    return _SEEN[key]


@torch.no_grad()
def _try(tensor: Tensor) -> bool:
    """Whether parts have the bits of the whole, and the loss reads no value of the tensor that it saved.

    The trial computes the log-softmax of the log-softmax, and a gradient, with the kernels of the pass.
    """
    with without_autocast():
        flat = tensor.reshape(-1, tensor.shape[-1])
        return _in_parts(flat, _log_softmax) and _in_parts(flat, _gradient) and _reads_no_value(flat[:_ROWS])


def _log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, 1)


def _gradient(x: Tensor) -> Tensor:
    made: Tensor = _GRADIENT(x, x, 1, x.dtype)
    return made


def _in_parts(flat: Tensor, function: Callable[[Tensor], Tensor]) -> bool:
    whole = function(flat)
    parts = _parts(flat.shape, flat.device)
    return all(same_bits(whole[start:stop], function(flat[start:stop])) for start, stop in parts)


def _reads_no_value(some: Tensor) -> bool:
    target = torch.zeros(len(some), dtype=torch.int64, device=some.device)
    gradient = some.new_ones(len(some))  # one per row
    settings = None, 0, -100, some.new_tensor(float(len(some)))  # no weights, no reduction, nothing ignored
    a, b = (_OF_LOSS(gradient, x, target, *settings) for x in (some, _without_values(some)))
    return layout(a) == layout(b) and same_bits(a, b)


def _without_values(like: Tensor) -> Tensor:
    """A tensor of this shape, whose elements all show one NaN."""
    return torch.full((), float("nan"), dtype=like.dtype, device=like.device).expand(like.shape)


@reads(_OF_LOSS)
def _of_loss(args: tuple[Any, ...]) -> Any:
    if type(args[0]) is not Tensor or type(args[1]) is not Unbuilt:
        return NotImplemented
    args[1].value.skip()
    return _OF_LOSS(args[0], _without_values(args[1]), *args[2:])


@reads(_GRADIENT)
def _of_rows(args: tuple[Any, ...]) -> Any:
    if type(args[0]) is not Tensor or len(args) != 4:
        return NotImplemented
    owners = _owners(args)  # before anything else refers to the gradient
    return _gradient_of(args[1], args[0], args[3], owners)


def _owners(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """How many references the first tensor has: its Python object, the tensor in C++, and its memory."""
    counted = args[0]
    memory = torch._C._storage_Use_Count(counted.untyped_storage()._cdata)
    return sys.getrefcount(counted), counted._use_count(), memory


class _Probe(Unbuilt):
    """Counts the references to a gradient that only autograd has."""

    owners: ClassVar[tuple[int, int, int]] = (0, 0, 0)  # no tensor has these

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is _GRADIENT:
            _Probe.owners = _owners(args)
        if function is _aten.detach.default:
            return cls._of(args[0])
        return torch.zeros(args[1].shape)

    @classmethod
    def run(cls) -> None:
        x = torch.zeros(2, 2, requires_grad=True)
        with saved_tensors_hooks(lambda t: t.detach(), cls._of):
            y = torch.log_softmax(x, 1)
        y.neg().backward(torch.ones(2, 2))

    @staticmethod
    def _of(x: Tensor) -> Tensor:
        return _Probe(cast(Source, None), x.shape, x.stride(), x.dtype, x.device)


@lru_cache
def _owners_when_alone() -> tuple[int, int, int]:
    """What `_owners` counts for a gradient that only autograd's engine has, as it passes it to a node."""
    in_no_mode(_Probe.run)
    return _Probe.owners


@torch.no_grad()
def _gradient_of(output: Unbuilt, gradient: Tensor, dtype: torch.dtype, owners: tuple[int, int, int]) -> Any:
    """The gradient of the log-softmax's input, in the memory of the incoming one if only autograd has that.

    NotImplemented if it must be computed as a whole.
    """
    if dtype is not output.dtype or gradient.dtype is not dtype or not gradient.is_contiguous():
        return NotImplemented
    alone = gradient._base is None and owners == _owners_when_alone() and unbuilt.is_of_torch(gradient)
    width = output.shape[-1]
    with without_autocast():
        source, casts, spent = output.value.source_of_rows()
        out = gradient if alone else torch.empty_like(gradient)
        x, g, made = (t.reshape(-1, width) for t in (source, gradient, out))
        seconds = 0.0
        for start, stop in _parts(output.shape, output.device):
            began = perf_counter()
            part = x[start:stop]
            for to in casts:
                part = part.to(to)
            part = torch.log_softmax(part, 1)
            seconds += perf_counter() - began
            made[start:stop] = _GRADIENT(g[start:stop], part, 1, dtype)
            del part  # before the next one is made
        if spent is not None:
            spent.rebuilding += seconds
    return out
