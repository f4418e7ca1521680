"""DTensors, of which the log has this rank's local tensor and its spec; and other subclasses of tensors."""

from __future__ import annotations

import copy
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from leannorm.autograd.nodes import NODES

PLAIN = (Tensor, torch.nn.Parameter)  # torch's own classes of tensors


def has_ranks() -> bool:
    """Whether this process belongs to a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _class_of_dtensors() -> Any:
    """The class, if it has been imported; before that, there can be no DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def local_of(tensor: Tensor) -> Tensor | None:
    """The local tensor of a DTensor; None if it is not plain, and for any other tensor."""
    if type(tensor) in PLAIN or type(tensor) is not _class_of_dtensors():
        return None
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    if hasattr(local, "trigger_wait"):  # a collective still runs, and the operation would wait for it too
        local = local.trigger_wait()
    return local if type(local) in PLAIN and local.layout == torch.strided else None


def spec_of(tensor: Tensor) -> Any:
    """How the ranks share this DTensor: mesh, placements, and the shape, strides and dtype of the whole."""
    return tensor._spec  # type: ignore[attr-defined]


def shared_as(local: Tensor, spec: Any) -> Tensor:
    """The DTensor with this local tensor; makes it without communication."""
    made: Tensor = _class_of_dtensors()(local, copy.copy(spec), requires_grad=False)
    return made


def counter_of(tensor: Tensor) -> Tensor | None:
    """A tensor without memory that shares the version counter of a DTensor; None for any other tensor."""
    local = local_of(tensor)
    if local is None:
        return None
    counter: Any = tensor.detach()
    counter._local_tensor = local.new_empty(0)
    return counter  # type: ignore[no-any-return]


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of the tensor on this rank; for a sparse one, of its values and indices."""
    with as_plain(tensor):
        local = local_of(tensor)
        return sum(part.nbytes for part in _parts(tensor if local is None else local))


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """The address of the tensor's storage, and its bytes; for a sparse tensor, that of its values, and the
    bytes of all its parts. The address is 0 if the tensor shows no storage."""
    if tensor.layout != torch.strided:
        *_, values = _parts(tensor)
        return 0 if values is tensor else values.untyped_storage()._cdata, nbytes_of(tensor)
    if NODES is not None:
        place_and_bytes: tuple[int, int] = NODES.storage(tensor)
        return place_and_bytes
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that a sparse tensor consists of; for any other, the tensor itself."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


_AS_IT_IS = nullcontext()


def as_plain(tensor: Tensor) -> AbstractContextManager[object]:
    """Turn off a subclass's `__torch_function__` within the context, as it may change attributes and methods
    or refuse them."""
    return _AS_IT_IS if type(tensor) in PLAIN else torch._C.DisableTorchFunctionSubclass()
