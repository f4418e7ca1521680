"""`held=`: tensors that are kept go through other saved-tensor hooks: to the host, to a file, compressed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from leannorm._errors import InputError


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
        "held must be a context of saved-tensor hooks, such as torch.autograd.graph.save_on_cpu(), or a pair "
        f"(pack, unpack) of functions; got {held!r}"
    )
