"""What a layer of ours is to those who know torch's layers by their class: FX quantization, TorchScript."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import fx

from leannorm._errors import InputError

_TAKES_BACK: list[Callable[[torch.nn.Module], bool]] = []


def takes_back(function: Callable[[torch.nn.Module], bool]) -> Callable[[torch.nn.Module], bool]:
    """`function` undoes the last swap of a layer; it returns False where there is none."""
    _TAKES_BACK.append(function)
    return function


class Leaving:
    """What all layers share that has to do with leaving."""

    __jit_unused_properties__ = ("as_torch",)

    @property
    def as_torch(self) -> Any:
        """The layer as `convert(to="torch")` would leave it, on the same parameters and buffers."""
        twin: Any = copy.copy(self)
        for one in _TAKES_BACK:
            while one(twin):
                pass
        return twin

    def __prepare_scriptable__(self) -> NoReturn:
        raise InputError(
            f"torch.jit.script cannot compile {type(self).__name__}, a layer of leannorm; call "
            'leannorm.convert(model, to="torch") first, or take torch.jit.trace or torch.export'
        )


def quantizing(input: Any) -> bool:
    """Is this torch.fx's proxy, and does FX quantization trace?"""
    return type(input) is fx.Proxy and any(
        cls.__module__.startswith("torch.ao.") for cls in type(input.tracer).__mro__
    )


def quantized(layer: Any, input: Any) -> Any:
    """What FX quantization sees of a layer: torch's own; None where torch has no such layer.

    It looks for layers by their class, in the graph and behind the graph's names. So the name is that of
    an attribute which is torch's layer.
    """
    twin, tracer = layer.as_torch, input.tracer
    if isinstance(twin, Leaving):
        return None
    path = tracer.path_of_module(layer)
    if not tracer.is_leaf_module(twin, path):
        return twin.forward(input)
    return tracer.create_proxy("call_module", f"{path}.as_torch".lstrip("."), (input,), {})
