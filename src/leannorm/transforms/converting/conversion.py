"""`convert`: swap a model's norm layers in place, and back.

A layer is swapped by changing its class. It stays the same object, so parameters, buffers, hooks, flags,
names, optimizers and modules that share it stay as they are. Where the table of classes is not enough to
swap back, the original class is stored on the layer (`_swapped`).
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from leannorm import _checks
from leannorm._catalog import TORCHS, name_of, norms_of, torchs_kind
from leannorm._errors import InputError
from leannorm._report import Line, Part, Report
from leannorm._untouched import left_alone, untouched
from leannorm.nn._layer import takes_back
from leannorm.nn._statistics import HasStatistics
from leannorm.nn.sync import SHARING, Synchronized
from leannorm.transforms.converting.classes import KNOWN, Entry, has_torchs_form, why_not
from leannorm.transforms.converting.sync import synchronized_class, why_not_sync
from leannorm.transforms.derived import beneath, covered
from leannorm.transforms.fusing.fuse import find_fusions
from leannorm.transforms.recognizing.form import UnknownFormError
from leannorm.transforms.recognizing.formula_norm import FormulaNorm, formula_class
from leannorm.transforms.recognizing.recognition import (
    formula_of,
    looks_like_norm,
    may_be_norm,
    why_not_by_formula,
)

_SWAPPED = "_swapped"


class Swapped(NamedTuple):
    """A layer's original class, and the attributes that were added to it."""

    cls: type[Module]
    attributes: tuple[str, ...]


def convert(
    model: Module,
    to: str = "leannorm",
    process_group: dist.ProcessGroup | str | None = None,
    fuse: bool = True,
    *,
    stats_dtype: torch.dtype | None = None,
) -> Module:
    """Replace a model's norm layers in place, without changing what it computes; returns the model.

    Args:
        model: any module; a norm layer by itself too.
        to: `"leannorm"` replaces torch.nn's batch, instance, group, layer and RMS norms, those of timm and
            torchvision, and every other layer whose forward computes such a norm (such as `LlamaRMSNorm`)
            with leannorm's; `"torch"` undoes it exactly; `"sync"` makes only batch norms, and subclasses
            whose forward calls `super().forward`, take statistics over a process group; `"leannorm"` ends
            that.
        process_group: for `to="sync"`, None is the default group.
        fuse: for `to="leannorm"`: whether a batch or group norm and the activation after it, neighbours in a
            `torch.nn.Sequential`, are computed in one pass.
        stats_dtype: the dtype of running statistics, now and after `model.half()` and the like, of leannorm's
            layers; None leaves it as it is. Set it before DistributedDataParallel or an optimizer has the
            layers. `to="torch"` ends this; the statistics then keep their present dtype.

    Every layer stays the same object: parameters, buffers, hooks, `training`, `requires_grad`, names and
    state_dict keys do not change, a layer in two places stays one layer, optimizers keep working. A fused
    norm stays a norm and its activation an activation for all code except the Sequential that calls one after
    the other. Each call checks that both can be fused (no hooks, no replaced layers); otherwise it calls them
    one by one. Pickle and deepcopy keep working.

    A layer that cannot be replaced without changing what it computes (another formula, a momentum outside of
    [0, 1]) is left alone and named in one `UserWarning`; so is a model without norms. In float16 and bfloat16
    a fused pair rounds once, two layers round twice.

    Raises: `InputError` for anything that is not a module, and for a wrong `to` or `fuse`. After any error
    the model is unchanged.
    Source: the layers' own.

    >>> import torch, leannorm
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    >>> type(leannorm.convert(model)[1])
    <class 'leannorm.nn.batch.BatchNorm2d'>
    >>> type(leannorm.convert(model, to="torch")[1])
    <class 'torch.nn.modules.batchnorm.BatchNorm2d'>
    """
    _checks.module(model, "convert")
    _checks.one_of("to", to, ("leannorm", "torch", "sync"))
    if not isinstance(fuse, bool):
        raise InputError(f"fuse is True or False, got {fuse!r}; in Sequentials is where calls are fused")
    if process_group is not None and to != "sync":
        raise InputError(f'process_group is for to="sync", got to={to!r}; leave it out')
    if stats_dtype is not None and to == "torch":
        raise InputError('stats_dtype is for layers of leannorm, got to="torch"; leave it out')
    _checks.stats_dtype(stats_dtype)
    left: dict[str, list[str]] = defaultdict(list)
    with untouched(model, left_alone) as undo:
        _swap(model, to, process_group, fuse, left)
        undo.pop_all()
    converted = any(_is_ours(m) or hasattr(type(m), "unfused") for m in model.modules())
    if to == "leannorm" and not left and not converted:
        warnings.warn(
            f"convert found no norm layer in {type(model).__name__} and left it as it is", stacklevel=2
        )
    if stats_dtype is not None:
        for module in model.modules():
            if isinstance(module, HasStatistics):
                module.keep_statistics_in(stats_dtype)
    if left:
        reasons = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in left.items())
        warnings.warn(f"convert left these layers as they are: {reasons}", stacklevel=2)
    return model


@dataclass(frozen=True, repr=False)
class Preview(Report):
    """What `convert` would do: `swapped` has class names before and after, `left` the reasons, by layer."""

    swapped: dict[str, tuple[str, str]]
    left: dict[str, str]

    def summary(self) -> str:
        return f"{len(self.swapped)} swapped, {len(self.left)} left"

    def parts(self) -> Iterator[Part]:
        yield from (Line(f"{name}: {was} -> {becomes}") for name, (was, becomes) in self.swapped.items())
        yield from (Line(f"{name}: left, {reason}") for name, reason in self.left.items())


def preview(
    model: Module,
    to: str = "leannorm",
    process_group: dist.ProcessGroup | str | None = None,
    fuse: bool = True,
) -> Preview:
    """What `convert` would do to the model with the same arguments; the model is not changed.

    Raises: as `convert`.

    >>> import torch
    >>> from leannorm.transforms import preview
    >>> print(preview(torch.nn.Sequential(torch.nn.BatchNorm2d(8), torch.nn.LayerNorm(8)), to="sync"))
    0: BatchNorm2d -> SyncBatchNorm2d
    """
    _checks.module(model, "preview")
    left: dict[str, list[str]] = defaultdict(list)
    names = {name or "the model itself": module for name, module in model.named_modules()}
    before, swapped = {name: type(module) for name, module in names.items()}, {}
    with untouched(model, left_alone):
        _swap(model, to, process_group, fuse, left)
        for name, module in names.items():
            if type(module) is not before[name]:
                after = type(module).__name__
                if getattr(type(module), "unfused", None) is before[name]:
                    after += " with fused calls"
                elif isinstance(module, FormulaNorm):
                    after += f" by {module.function}"
                elif after == before[name].__name__:
                    after = f"{beneath(type(module)).__module__.split('.')[0]}.nn.{after}"
                swapped[name] = before[name].__name__, after
    return Preview(swapped, {name: reason for reason, names in left.items() for name in names})


def _swap(
    model: Module,
    to: str,
    process_group: dist.ProcessGroup | str | None,
    fuse: bool,
    left: dict[str, list[str]],
) -> None:
    if to == "torch":
        _to_torch(model, left)
    elif to == "sync":
        _to_sync(model, process_group, left)
    else:
        _to_leannorm(model, left, fuse)


def _to_sync(
    model: Module, process_group: dist.ProcessGroup | str | None, left: dict[str, list[str]]
) -> None:
    """Swap batch norms only. Each gets its path as a name, for the error messages of other ranks."""
    joined = {norm.module: norm.convolution for norm in norms_of(model)}
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        cls, layer = beneath(type(module)), joined[module]
        entry = KNOWN.get(name_of(cls))
        reason = why_not(module)
        if layer is not None:
            reason = f"{type(layer).__name__} computes it with its convolution; take it apart with to_pair()"
        if reason is None and entry is None:
            reason = why_not_sync(cls)
        if reason is not None:
            left[reason].append(name or "the model itself")
            continue
        entry = Entry(cls) if entry is None else entry
        own, shares = set(vars(module)), issubclass(cls, Synchronized)
        if not shares:
            vars(module).setdefault(_SWAPPED, Swapped(cls, ()))
            _become(module, Entry(synchronized_class(entry.target), entry.attributes))
        group = getattr(module, "process_group", None) if process_group is None else process_group
        module.share(group, name=name or "the model itself")  # type: ignore[operator]
        if not shares:
            _note(module, tuple(key for key in SHARING if key not in own))


def _to_leannorm(model: Module, left: dict[str, list[str]], fuse: bool) -> None:
    entries: dict[Module, Entry] = {}
    for name, module in model.named_modules():
        if "unsynced" in vars(beneath(type(module))):
            _stop_sharing(module)
        entry, reason = KNOWN.get(name_of(beneath(type(module)))), None
        if entry is not None:
            reason = why_not(module)
        elif isinstance(module, FormulaNorm):
            module.read_again()  # it may have been changed since
        elif not _is_ours(module):
            entry, reason = _by_formula(module)
        if reason is not None:
            left[reason].append(name or "the model itself")
        elif entry is not None:
            entries[module] = entry
    if fuse:
        targets = {m: entries[m].target if m in entries else type(m) for m in model.modules()}
        for block, fused in find_fusions(model, targets).items():
            object.__setattr__(block, "__class__", fused)
    for module, entry in entries.items():
        _become(module, entry)


def _by_formula(module: Module) -> tuple[Entry | None, str | None]:
    """What a layer of an unknown class becomes, or why it stays although it looks like a norm."""
    named = torchs_kind(module) is not None or looks_like_norm(module)
    if not named and not may_be_norm(module):
        return None, None
    if isinstance(module, LazyModuleMixin):
        return None, f"{name_of(type(module))} without a size yet; run one batch first"
    reason = why_not_by_formula(module)
    if reason is None:
        try:
            formula = formula_of(module, type(module))
            return Entry(formula_class(type(module)), {"_formula": formula}), None
        except UnknownFormError as error:
            reason = f"{name_of(type(module))} is not known, {error}"
    return None, reason if named else None


def _become(module: Module, entry: Entry) -> None:
    earlier = vars(module).get(_SWAPPED, Swapped(beneath(type(module)), ()))
    if earlier.cls is not TORCHS.get(entry.target):
        vars(module)[_SWAPPED] = earlier
        _note(module, tuple(entry.attributes))
    module.__class__ = covered(type(module), entry.target)
    vars(module).update(entry.attributes)


def _note(module: Module, attributes: tuple[str, ...]) -> None:
    """Record added attributes, which are deleted when the swap is undone."""
    earlier: Swapped = vars(module)[_SWAPPED]
    new = (name for name in attributes if name not in earlier.attributes)
    vars(module)[_SWAPPED] = Swapped(earlier.cls, (*earlier.attributes, *new))


def _stop_sharing(module: Module) -> None:
    """Undo `to="sync"` for one layer, and keep the record of an earlier swap."""
    cls = beneath(type(module)).unsynced  # type: ignore[attr-defined]
    module.__class__ = covered(type(module), cls)
    for name in SHARING:
        vars(module).pop(name, None)
    earlier: Swapped = vars(module).pop(_SWAPPED)
    kept = tuple(name for name in earlier.attributes if name not in SHARING)
    if earlier.cls not in (cls, TORCHS.get(cls)):
        vars(module)[_SWAPPED] = Swapped(earlier.cls, kept)


def _to_torch(model: Module, left: dict[str, list[str]]) -> None:
    for name, module in model.named_modules():
        while _undo_swap(module):
            pass
        if _is_ours(module) and torchs_kind(module) is not None:
            left[f"{type(module).__name__}, torch has no such layer"].append(name or "the model itself")


@takes_back
def _undo_swap(module: Module) -> bool:
    """Undo the layer's last swap; False if there is none."""
    cls = beneath(type(module))
    swapped: Swapped | None = vars(module).pop(_SWAPPED, None)
    before = getattr(cls, "unfused", None)
    if swapped is not None:
        before = swapped.cls
        if issubclass(before, LazyModuleMixin) and "_initialize_hook" not in vars(module):
            before = before.cls_to_become  # a lazy layer that has been materialized since
        for attribute in swapped.attributes:
            del vars(module)[attribute]
    elif has_torchs_form(module):
        before = before or TORCHS.get(cast(type[Module], cls))
    if before is None:
        return False
    if not issubclass(before, HasStatistics):
        vars(module).pop("stats_dtype", None)
    object.__setattr__(module, "__class__", covered(type(module), before))
    return True


def _is_ours(module: Module) -> bool:
    """Whether its class, or a base of it, is leannorm's."""
    return any(cls.__module__.startswith("leannorm.") for cls in type(module).__mro__)
