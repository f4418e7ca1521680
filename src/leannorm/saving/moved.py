"""`held=`: moves kept tensors to the host, or passes them to other hooks: to a file, compressed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from leannorm._errors import InputError


class Hooks(NamedTuple):
    """`pack` turns a tensor into any object, and `unpack` turns that object back into the tensor."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]


def hooks_of(held: saved_tensors_hooks | tuple[Any, Any] | str) -> Hooks | Literal["host"]:
    """The hooks of a context such as `save_on_cpu()`, or of a pair (pack, unpack); "host" has its own."""
    if isinstance(held, str) and held == "host":
        return "host"
    if isinstance(held, saved_tensors_hooks):
        return Hooks(held.pack_hook, held.unpack_hook)
    if isinstance(held, tuple) and len(held) == 2 and all(map(callable, held)):
        return Hooks(*held)
    raise InputError(
        'held is "host", a context of saved-tensor hooks, such as torch.autograd.graph.save_on_cpu(), or a'
        f" pair (pack, unpack) of functions; got {held!r}"
    )
