"""`convert`: swap a model's norm layers in place, and back.

A layer is swapped by changing its class. It stays the same object, so parameters, buffers, hooks, flags,
optimizers, shared modules and names stay without any doing. What is not undone by the table of classes
is noted on the layer (`_swapped`).
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

from leannorm import _checks
from leannorm._errors import InputError
from leannorm.transforms.fuse import find_fusions, fused_class
from leannorm.transforms.known import KNOWN, TO_TORCH, Entry, is_norm, name_of, why_not

_SWAPPED = "_swapped"


class Swapped(NamedTuple):
    """What a layer was, and the attributes that it was given."""

    cls: type[Module]
    attributes: tuple[str, ...]


def convert(
    model: Module, to: str = "leannorm", process_group: Any = None, fuse: str | None = "certain"
) -> Module:
    """Swap a model's norm layers in place, without a change in what it computes; returns the model.

    Args:
        model: any module; a norm layer by itself too.
        to: `"leannorm"` swaps torch.nn's batch, instance, group, layer and RMS norms, and those of timm and
            torchvision, for leannorm's; `"torch"` undoes it exactly; `"sync"` makes batch norms take
            statistics over a process group.
        process_group: for `to="sync"`, None is the default group.
        fuse: what to join with the batch norm in front of it, for `to="leannorm"`: an activation, or an
            addition and an activation. `"certain"`: neighbours in a `torch.nn.Sequential`, timm's
            `BatchNormAct2d`, and blocks whose code is known (the ResNets, DenseNet, Inception and GoogLeNet
            of torchvision, timm's ResNet); `"trace"`: also in every block that `torch.fx` can trace; None:
            nothing.

    Every layer stays the same object: parameters, buffers, hooks, `training`, `requires_grad`, names and
    state_dict keys are untouched, a layer in two places stays one, optimizers go on. Layers with hooks are
    swapped and not fused. Pickle and deepcopy work after.

    A layer that cannot be swapped without a change in what it computes (a subclass that is not known, a
    momentum outside of [0, 1]) is left alone and named in one `UserWarning`. In float16 and bfloat16 a
    fused layer rounds once where two layers rounded twice.

    Raises: `InputError` for a wrong `to` or `fuse`. After any error the model is as it was.
    Source: the layers' own; `torch.fx` (Reed et al., 2022, arXiv:2112.08429) for tracing.

    >>> import torch, leannorm
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    >>> leannorm.convert(model)[1]
    BatchNormAct2d(8, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True, act=relu)
    >>> leannorm.convert(model, to="torch")[2]
    ReLU()
    """
    _checks.one_of("to", to, ("leannorm", "torch", "sync"))
    if fuse is not None:
        _checks.one_of("fuse", fuse, ("certain", "trace"))
    if process_group is not None and to != "sync":
        raise InputError(f'process_group is for to="sync", got to={to!r}; leave it out')
    left: dict[str, list[str]] = defaultdict(list)
    with _all_or_nothing(model):
        if to == "torch":
            _to_torch(model, left)
        else:
            _to_leannorm(model, left, fuse)
    if left:
        reasons = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in left.items())
        warnings.warn(f"convert left these layers as they are: {reasons}", stacklevel=2)
    return model


def _to_leannorm(model: Module, left: dict[str, list[str]], fuse: str | None) -> None:
    entries: dict[Module, Entry] = {}
    for name, module in model.named_modules():
        entry, reason = KNOWN.get(name_of(type(module))), None
        if entry is not None:
            reason = why_not(module)
        elif is_norm(module) and not _is_ours(module):
            reason = _unknown(module)
        if reason is not None:
            left[reason].append(name or "the model itself")
        elif entry is not None:
            entries[module] = entry
    if fuse is not None:
        targets = {m: entries[m].target if m in entries else type(m) for m in model.modules()}
        fusion = find_fusions(model, targets, everywhere=fuse == "trace")
        entries |= fusion.entries
        for block, source in fusion.forwards.items():
            object.__setattr__(block, "__class__", fused_class(type(block), source))
    for module, entry in entries.items():
        earlier = vars(module).get(_SWAPPED, Swapped(type(module), ()))
        if earlier.cls is not TO_TORCH.get(entry.target):
            vars(module)[_SWAPPED] = Swapped(earlier.cls, (*earlier.attributes, *entry.attributes))
        module.__class__ = entry.target
        vars(module).update(entry.attributes)


def _to_torch(model: Module, left: dict[str, list[str]]) -> None:
    for name, module in model.named_modules():
        while not _is_original(module):
            pass
        if _is_ours(module) and is_norm(module):
            left[f"{type(module).__name__}, torch has no such layer"].append(name or "the model itself")


def _is_original(module: Module) -> bool:
    """Take one swap back; True where there is none."""
    swapped: Swapped | None = vars(module).pop(_SWAPPED, None)
    before = getattr(type(module), "unfused", None)
    if swapped is not None:
        before = swapped.cls
        for attribute in swapped.attributes:
            del vars(module)[attribute]
    elif getattr(module, "dim", None) is None:
        before = before or TO_TORCH.get(type(module))
    if before is None:
        return True
    object.__setattr__(module, "__class__", before)
    return False


def _is_ours(module: Module) -> bool:
    return any(cls.__module__.startswith("leannorm.") for cls in type(module).__mro__)


def _unknown(module: Module) -> str:
    name = name_of(type(module))
    if isinstance(module, LazyModuleMixin):
        return f"{name} without a size yet; run one batch first"
    return f"{name} is not known, a subclass may compute anything"


@contextmanager
def _all_or_nothing(model: Module) -> Iterator[None]:
    """Give every module its class and attributes back where an error comes up."""
    before = [(m, type(m), dict(vars(m))) for m in model.modules()]
    try:
        yield
    except BaseException:
        for module, cls, attributes in before:
            object.__setattr__(module, "__class__", cls)
            vars(module).clear()
            vars(module).update(attributes)
        raise
