"""Which blocks pass a norm's output straight to an activation, and the class that each of them gets.

No layer changes: a norm stays a norm and an activation an activation, for every other caller, for hooks and
for code that replaces them. Only the block that calls both becomes an instance of a subclass of its class,
whose methods make the two calls as steps (`steps.py`, `rewrite.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch.nn
from torch.nn import Module

from leannorm._catalog import name_of
from leannorm.transforms.fusing.expressions import Roles
from leannorm.transforms.fusing.rewrite import inside, rewritten
from leannorm.transforms.fusing.row_steps import is_row_norm
from leannorm.transforms.fusing.steps import (
    FUSABLE,
    activation_of,
    runs_in_order,
    sequential_forward,
)
from leannorm.transforms.fusing.text import read

# blocks in which `fuse="certain"` fuses calls; their source is read from the installed package
CERTAIN_BLOCKS = frozenset(
    {
        "diffusers.models.normalization.AdaGroupNorm",
        "diffusers.models.normalization.AdaLayerNorm",
        "diffusers.models.normalization.AdaLayerNormContinuous",
        "diffusers.models.normalization.AdaLayerNormZero",
        "diffusers.models.normalization.AdaLayerNormZeroSingle",
        "diffusers.models.normalization.CogVideoXLayerNormZero",
        "diffusers.models.normalization.LuminaLayerNormContinuous",
        "diffusers.models.normalization.LuminaRMSNormZero",
        "diffusers.models.normalization.SD35AdaLayerNormZeroX",
        "diffusers.models.resnet.ResnetBlock2D",
        "timm.models.resnet.BasicBlock",
        "timm.models.resnet.Bottleneck",
        "timm.models.resnet.ResNet",
        "torchvision.models.densenet._DenseLayer",
        "torchvision.models.googlenet.BasicConv2d",
        "torchvision.models.inception.BasicConv2d",
        "torchvision.models.resnet.BasicBlock",
        "torchvision.models.resnet.Bottleneck",
        "torchvision.models.resnet.ResNet",
    }
)
_CHECKPOINTED = "transformers.modeling_layers.GradientCheckpointingLayer"  # it expects subclasses
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


class Fusions(NamedTuple):
    """The blocks to change with their new classes, and the blocks with norms whose source cannot be read."""

    classes: dict[Module, type[Module]]
    unread: list[Module]


def find_fusions(model: Module, targets: Mapping[Module, type[Module]], everywhere: bool) -> Fusions:
    """The blocks of a model to change; `targets` maps layers to the classes that they become.

    With `everywhere`, blocks of unknown classes are read, too.
    """

    def is_norm(module: Module) -> bool:
        if runs_in_order(module) and module._modules:
            return is_norm(list(module.children())[-1])
        return targets.get(module, type(module)) in FUSABLE

    found, unread = dict[Module, type[Module]](), list[Module]()
    for block in model.modules():
        if not _can_be_subclassed(type(block)) or "forward" in vars(block):
            continue
        if runs_in_order(block):
            if _has_norm_before_act(list(block.children()), is_norm):
                found[block] = fused_class(type(block), None)
        elif everywhere or name_of(type(block)) in CERTAIN_BLOCKS:
            below = dict(_below(block))
            roles = Roles(
                frozenset(name for name, m in below.items() if is_norm(m)),
                frozenset(name for name, m in below.items() if activation_of(m)),
                frozenset(name for name, m in below.items() if type(m) is torch.nn.Identity),
                frozenset(name for name, m in below.items() if is_row_norm(targets.get(m, type(m)))),
            )
            norms = roles.norms | roles.rows
            stays = targets.get(block, type(block)) is type(block)
            fusable = bool(norms) or (stays and _calls_group_norm(type(block)))
            fused = fused_class(type(block), roles) if fusable else type(block)
            if fused is not type(block):
                found[block] = fused
            elif roles.norms and not _is_readable(block):
                unread.append(block)
    return Fusions(found, unread)


def _below(block: Module, prefix: str = "") -> Iterator[tuple[str, Module]]:
    """The modules that the block's source may call: its children, and those in its containers."""
    for name, child in block.named_children():
        yield prefix + name, child
        if isinstance(child, _CONTAINERS):
            yield from _below(child, f"{prefix}{name}.")


def _calls_group_norm(cls: type[Module]) -> bool:
    """Do its methods name torch's function? Then it may be called with a modulation behind it."""
    own = (vars(base).values() for base in cls.__mro__ if not base.__module__.startswith("torch."))
    functions = (f for values in own for f in values if isinstance(f, FunctionType))
    return any("group_norm" in function.__code__.co_names for function in functions)


def _is_readable(block: Module) -> bool:
    forward: Any = type(block).forward
    return forward is Module.forward or (
        isinstance(forward, FunctionType) and read(inside(forward)) is not None
    )


def _has_norm_before_act(layers: list[Module], is_norm: Any) -> bool:
    """Is one of the layers a norm, with an activation as the next one, identities aside?"""
    layers = [layer for layer in layers if type(layer) is not torch.nn.Identity]
    return any(is_norm(a) and activation_of(b) is not None for a, b in itertools.pairwise(layers))


def _can_be_subclassed(cls: type[Module]) -> bool:
    """Can instances get a subclass without side effects (no metaclass, no own pickling, not leannorm's)?"""
    plain = (object, Module)
    own = {
        n for base in cls.__mro__ if base not in plain for n in vars(base) if name_of(base) != _CHECKPOINTED
    }
    return (
        type(cls) is type
        and not own & {"unfused", "__init_subclass__", "__reduce__", "__reduce_ex__", "__call__"}
        and not cls.__module__.startswith("leannorm.")
    )


_FUSED_CLASSES: dict[tuple[type[Module], Roles | None], type[Module]] = {}


def fused_class(cls: type[Module], roles: Roles | None) -> type[Module]:
    """A subclass of `cls` that calls steps, with `unfused = cls`; `cls` itself if there is nothing to fuse.

    `roles` is None for a Sequential.
    """
    if (cls, roles) not in _FUSED_CLASSES:
        new: Mapping[str, Any] = {"forward": sequential_forward} if roles is None else rewritten(cls, roles)
        body = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__reduce_ex__": _reduce,
            "unfused": cls,
            "roles": roles,
            **new,
        }
        _FUSED_CLASSES[cls, roles] = type(cls.__name__, (cls,), body) if new else cls
    return _FUSED_CLASSES[cls, roles]


def unfused(model: Module) -> Module:
    """The model, with every fused block of the class that it had before."""
    for block in model.modules():
        before = getattr(type(block), "unfused", None)
        if before is not None:
            object.__setattr__(block, "__class__", before)
    return model


def _reduce(block: Any, protocol: int) -> tuple[Any, ...]:
    parts: Any = object.__reduce_ex__(block, max(protocol, 2))
    roles = None if block.roles is None else tuple(tuple(sorted(names)) for names in block.roles)
    return _rebuild, (block.unfused, roles), *parts[2:]


def _rebuild(cls: type[Module], roles: tuple[tuple[str, ...], ...] | None) -> Module:
    fused = fused_class(cls, None if roles is None else Roles(*map(frozenset, roles)))
    return fused.__new__(fused)
