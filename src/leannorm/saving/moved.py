"""`held=`: held tensors go through other saved-tensor hooks: to the host, to a file, compressed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from leannorm._errors import InputError
from leannorm.saving.evidence import sample_of, version_of
from leannorm.saving.steps import Step
from leannorm.saving.values import Value


class Hooks(NamedTuple):
    """`pack` turns a tensor into any object, and `unpack` turns that object back into the tensor."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]


def hooks_of(held: saved_tensors_hooks | tuple[Any, Any]) -> Hooks:
    """The hooks of a context such as `save_on_cpu()`, or of a pair (pack, unpack)."""
    if isinstance(held, saved_tensors_hooks):
        return Hooks(held.pack_hook, held.unpack_hook)
    if isinstance(held, tuple) and len(held) == 2 and all(map(callable, held)):
        return Hooks(*held)
    raise InputError(
        "held is a context of saved-tensor hooks, such as torch.autograd.graph.save_on_cpu(), or a pair "
        f"(pack, unpack) of functions; got {held!r}"
    )


class _Packed:
    """The object that `pack` returned; compared by identity, since it may be of any type. `memory`: of the
    tensor that it got. `is_other`: did `unpack` return other memory, or was it not called yet?"""

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor], memory: StorageWeakRef) -> None:
        self.packed, self.unpack, self.memory, self.is_other = packed, unpack, memory, True


def _unpacked(packed: _Packed, layout: tuple[Any, ...]) -> Tensor:
    with torch.no_grad():
        core: Tensor = packed.unpack(packed.packed)
        packed.is_other = StorageWeakRef(core.untyped_storage()) != packed.memory
        shape, core_shape, strides = layout
        if strides is not None and core.shape == core_shape and core.stride() != strides:
            core = torch.empty_strided(core_shape, strides, dtype=core.dtype, device=core.device).copy_(core)
        return core if shape == core_shape else core.expand(shape)


@torch.no_grad()
def move(value: Value, tensor: Tensor, hooks: Hooks) -> None:
    """Hold the tensor by the hooks alone: reading the value unpacks it, once for all readers.

    What is expanded is packed once, and the layout is what it was, since kernels add in the order of memory.
    Of a DTensor, the hooks get the local tensor.
    """
    local = tensor if value.spec is None else value.tensor
    assert local is not None
    core = local.detach()
    for dim, stride in enumerate(core.stride()):
        if not stride and core.shape[dim] > 1:
            core = core.narrow(dim, 0, 1)
    dense = torch.ops.aten.is_non_overlapping_and_dense(core)
    layout = local.shape, core.shape, core.stride() if dense else None
    packed = _Packed(hooks.pack(core), hooks.unpack, StorageWeakRef(core.untyped_storage()))
    value.watch, value.sample = version_of(tensor), sample_of(tensor)
    value.shape, value.dtype, value.tensor = local.shape, local.dtype, None
    value.step = Step(_unpacked, (), (), (packed, layout), kind="held")
