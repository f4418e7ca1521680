"""Which Sequentials pass a norm's output straight to an activation, and the class that each of them gets.

No layer changes: a norm stays a norm and an activation an activation, for every other caller, for hooks and
for code that replaces them. Only the Sequential that calls both becomes an instance of a subclass of its
class, whose forward makes the two calls as steps (`steps.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch.nn
from torch.nn import Module

from leannorm.transforms.derived import covered, one_a_class, reduced
from leannorm.transforms.fusing.steps import FUSABLE, activation_of, runs_in_order, sequential_forward


def find_fusions(model: Module, targets: Mapping[Module, type[Module]]) -> dict[Module, type[Module]]:
    """The Sequentials of a model to change, and their new classes; `targets` are those that layers get."""

    def is_norm(module: Module) -> bool:
        if runs_in_order(module) and module._modules:
            return is_norm(list(module.children())[-1])
        return targets.get(module, type(module)) in FUSABLE

    return {
        block: fused_class(type(block))
        for block in model.modules()
        if runs_in_order(block)
        and _can_be_subclassed(type(block))
        and _has_norm_before_act(list(block.children()), is_norm)
    }


def _has_norm_before_act(layers: list[Module], is_norm: Callable[[Module], bool]) -> bool:
    """Whether one of the layers is a norm that is followed by an activation, apart from identities."""
    layers = [layer for layer in layers if type(layer) is not torch.nn.Identity]
    return any(is_norm(a) and activation_of(b) is not None for a, b in itertools.pairwise(layers))


def _can_be_subclassed(cls: type[Module]) -> bool:
    """Whether instances can get a subclass without side effects (no metaclass, no pickling of its own, not
    leannorm's)."""
    own = {name for base in cls.__mro__ if base not in (object, Module) for name in vars(base)}
    return (
        type(cls) is type
        and not own & {"unfused", "__init_subclass__", "__reduce__", "__reduce_ex__", "__call__"}
        and not cls.__module__.startswith("leannorm.")
    )


@one_a_class
def fused_class(cls: type[Module]) -> type[Module]:
    """A subclass of `cls` that calls steps, with `unfused = cls`."""
    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": lambda block, protocol: reduced(fused_class, cls, block),
        "forward": sequential_forward,
        "unfused": cls,
    }
    if hasattr(cls, "_orig_cls_mro_index"):  # where FSDP2 finds the class of a slice
        body["_orig_cls_mro_index"] = cls._orig_cls_mro_index + 1
    return type(cls.__name__, (cls,), body)


def unfused(model: Module) -> Module:
    """The model, with the original class of every fused Sequential."""
    for block in model.modules():
        before = getattr(type(block), "unfused", None)
        if before is not None:
            object.__setattr__(block, "__class__", covered(type(block), before))
    return model
