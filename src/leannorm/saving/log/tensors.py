"""How tensors show their memory, and samples of a few bytes that reveal edits."""

from __future__ import annotations

from ctypes import string_at
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

_C: Any = torch._C


class Geometry(NamedTuple):
    """How a tensor shows its memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize

    @property
    def extent(self) -> int:
        """Bytes of the memory from its start to the end of the last element."""
        if 0 in self.sizes:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize

    def fills(self, nbytes: int) -> bool:
        """Whether it shows each element of a memory of `nbytes` bytes once."""
        return not self.offset and self.nbytes == nbytes == self.extent and 0 not in self.strides


def geometry_of(tensor: Tensor) -> Geometry:
    return Geometry(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.device)


# ---------------------------------------------------------------- calls that the program does not see

_K, _Keys = _C.DispatchKey, _C.DispatchKeySet


def _keys(*names: str) -> Any:
    keys = _Keys.from_raw_repr(0)
    for name in names:
        keys = keys | _Keys(getattr(_K, name))
    return keys


_MODES = _keys("Python", "PythonTLSSnapshot", *(name for name in dir(_K) if name.startswith("Autocast")))
_INCLUDED, _EXCLUDED = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set() | _MODES
_BELOW = _EXCLUDED | _keys("AutogradFunctionality", "ADInplaceOrView")


def beside() -> Any:
    """Hide calls from modes within the context; aliases made in it share their version counter."""
    return _C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED)


def below() -> Any:
    """Hide calls from modes and from autograd within the context."""
    return _C._ForceDispatchKeyGuard(_INCLUDED, _BELOW)


_PLAIN: dict[int, bool] = {}
_VIEWS_OF_BITS = _keys("Conjugate", "Negative")


def is_plain(tensor: Tensor, in_any_bits: bool = False) -> bool:
    """Whether the log can read and rebuild it. Subclasses and tensors of transforms compute with other memory
    than they show. `in_any_bits`: allow conjugate and negative views too, whose memory a call may write."""
    keys = _C._dispatch_keys(tensor)
    if in_any_bits:
        keys = keys - _VIEWS_OF_BITS
    known = keys.raw_repr()
    if known not in _PLAIN:
        _PLAIN[known] = _has_keys(tensor, known)
    return _PLAIN[known] and _C.TensorBase.layout.__get__(tensor) is torch.strided


def _has_keys(tensor: Tensor, keys: int) -> bool:
    with _C.DisableTorchFunctionSubclass(), beside():
        device = tensor.device
        if device.type == "meta":
            return False
        return bool(_C._dispatch_keys(torch.empty(0, device=device)).raw_repr() == keys)


_EMPTY: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def counter_of(tensor: Tensor) -> Tensor:
    """A tensor without memory that shares the version counter. Call it within `beside()`."""
    kind = tensor.device, tensor.dtype
    if kind not in _EMPTY:
        _EMPTY[kind] = torch.empty(0, device=kind[0], dtype=kind[1])
    counter = tensor.detach()
    counter.data = _EMPTY[kind]  # replaces the memory and keeps the version counter
    return counter


def alias_of(tensor: Tensor) -> Tensor:
    """A tensor with the same memory and version counter, without the graph, which may lead back to the node
    that saves it."""
    with beside():
        return tensor.detach()


def empty_as(shape: Geometry) -> Tensor:
    return torch.empty_strided(shape.sizes, shape.strides, dtype=shape.dtype, device=shape.device)


def over(storage: torch.UntypedStorage, shape: Geometry) -> Tensor:
    with beside(), torch.no_grad():
        return torch.empty(0, dtype=shape.dtype, device=shape.device).set_(
            storage, shape.offset, shape.sizes, shape.strides
        )


def copy_of(tensor: Tensor, shape: Geometry) -> Tensor:
    """A copy that has all of the storage, so that views keep their places."""
    with beside(), torch.no_grad():
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=shape.device)
        return over(flat.set_(storage, 0, (storage.nbytes(),), (1,)).clone().untyped_storage(), shape)


def shown(tensor: Tensor, shape: Geometry) -> Tensor:
    if shape.extent > tensor.untyped_storage().nbytes():
        raise RuntimeError(
            "leannorm.lean() has to rebuild a tensor from one whose memory was freed or resized after the"
            " forward pass. Keep that memory until backward(), or leave lean() out of this part"
        )
    if geometry_of(tensor) == shape:
        return tensor
    if tensor.dtype != shape.dtype:
        return over(tensor.untyped_storage(), shape)
    with below():
        return tensor.as_strided(shape.sizes, shape.strides, shape.offset)


def stream_of(device: torch.device) -> Any:
    """The stream of a GPU that runs now; None elsewhere."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def share(tensor: Tensor, on: Any) -> None:
    """Let the stream that runs now read what another one has made."""
    now = None if on is None else stream_of(tensor.device)
    if now is not None and now != on:
        now.wait_stream(on)
        tensor.record_stream(now)


FEW, MANY = 12, 48  # words of a sample; many of a weight, which an optimizer may change in few places


def is_dense(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    with below():
        return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def sample_of(tensor: Tensor, words: int = FEW) -> bytes | None:
    """Some bytes of a dense tensor on a CPU, which reveal an edit that no dispatcher has seen; else None."""
    n = tensor.nbytes
    if not n or tensor.device.type != "cpu" or not is_dense(tensor):
        return None
    at, width = tensor.data_ptr(), min(n, 8)
    item = min(tensor.itemsize, width)
    if not at:
        return None
    return b"".join(
        [string_at(at + (n - width) * i // (words - 1) // item * item, width) for i in range(words)]
    )


def matches(sample: bytes | None, tensor: Tensor) -> bool:
    other = None if sample is None else sample_of(tensor, max(len(sample) // min(tensor.nbytes, 8), 2))
    return sample is None or other is None or sample == other or _are_nan(sample, other, tensor.dtype)


def _are_nan(sample: bytes, other: bytes, dtype: torch.dtype) -> bool:
    """Whether only NaNs differ: which bits of a NaN a kernel makes may depend on where its memory is."""
    real = dtype.to_real() if dtype.is_complex else dtype
    if not real.is_floating_point:
        return False
    with below():
        ours, theirs = (torch.frombuffer(bytearray(words), dtype=real) for words in (sample, other))
        return bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())


def is_of_several(sample: bytes | None) -> bool:
    """Whether the sampled values differ from one another."""
    return sample is not None and sample != sample[: len(sample) // FEW] * FEW
