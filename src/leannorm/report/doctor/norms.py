"""Which modules of a model are norms, and what each of them has, whoever wrote its class."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import GroupNorm, LayerNorm, Module, RMSNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from leannorm import nn

KINDS: tuple[tuple[type[Module], str], ...] = (
    (_BatchNorm, "batch"),
    (nn.BatchNormOp, "batch"),
    (_InstanceNorm, "instance"),
    (GroupNorm, "group"),
    (LayerNorm, "layer"),
    (RMSNorm, "rms"),
)
# classes of other packages that derive from none of these: by the end of their name
NAMED = (
    (re.compile(r"FrozenBatchNorm"), "frozen"),
    (re.compile(r"Layer_?Norm(1d|2d|3d|Act|Act2d)?$"), "layer"),
    (re.compile(r"R[Mm][Ss]_?[Nn]orm(1d|2d|3d|Act|Act2d)?$"), "rms"),
)


@dataclass(eq=False)
class Norm:
    """A norm layer: its name in the model, its kind, and its parts under torch's names.

    `foreign`: its class derives from none of torch's, so its formula is not known. `momentum` weighs the new
    batch, as torch's does. `parents` are the modules that hold it, with its name in each.
    """

    name: str
    kind: str
    module: Module
    foreign: bool
    parents: list[tuple[Module, str, str]]

    @property
    def mean(self) -> Tensor | None:
        return self._first("running_mean", "estimated_mean")

    @property
    def var(self) -> Tensor | None:
        return self._first("running_var", "estimated_var")

    @property
    def batches(self) -> Tensor | None:
        return self._first("num_batches_tracked", "batch_id")

    @property
    def weight(self) -> Tensor | None:
        return self._first("weight", "scale")

    @property
    def bias(self) -> Tensor | None:
        return self._first("bias")

    @property
    def gamma(self) -> Tensor | None:
        """What the normalized value is multiplied by; None where that is not known."""
        if self.foreign or self.weight is None:
            return None
        return self.weight.detach() + getattr(self.module, "weight_offset", 0.0)

    @property
    def eps(self) -> float | None:
        for name in ("eps", "epsilon", "variance_epsilon"):
            value = getattr(self.module, name, None)
            if isinstance(value, float):
                return value
        return None

    @property
    def momentum(self) -> float | None:
        value = getattr(self.module, "momentum", None)
        if not isinstance(value, (int, float)) or self.kind == "frozen":
            return None
        return 1.0 - value if isinstance(self.module, nn.BatchNormOp) else float(value)

    @property
    def tracks(self) -> bool:
        """Has it running statistics that training moves, in the mode that it is in?"""
        tracking = getattr(self.module, "track_running_stats", True)
        return self.mean is not None and self.kind != "frozen" and tracking

    @property
    def channels(self) -> int | None:
        """The number of channels with statistics of their own; None where statistics span channels."""
        spans = self.kind in ("batch", "frozen", "instance")
        if not spans and not (self.kind == "group" and _groups(self.module) == _channels(self.module)):
            return None
        count = _channels(self.module)
        return int(self.mean.numel()) if count is None and self.mean is not None else count

    @property
    def affine(self) -> list[tuple[str, Tensor]]:
        """Gamma and beta, where it has them as parameters."""
        return [(name, p) for name, p in self.module.named_parameters(recurse=False) if p.is_leaf]

    def _first(self, *names: str) -> Tensor | None:
        for name in names:
            value = getattr(self.module, name, None)
            if isinstance(value, Tensor):
                return value
        return None


def _groups(module: Module) -> Any:
    return getattr(module, "num_groups", None)


def _channels(module: Module) -> Any:
    return getattr(module, "num_features", getattr(module, "num_channels", None))


def kind_of(module: Module) -> tuple[str, bool] | None:
    """The kind of a norm, and whether its class is none of torch's; None for every other module.

    >>> kind_of(torch.nn.SyncBatchNorm(4)), kind_of(torch.nn.Linear(4, 4))
    (('batch', False), None)
    """
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return None
    for cls, kind in KINDS:
        if isinstance(module, cls):
            return kind, False
    for pattern, kind in NAMED:
        if pattern.search(type(module).__name__) and isinstance(getattr(module, "weight", None), Tensor):
            return kind, True
    if all(isinstance(module._buffers.get(name), Tensor) for name in ("running_mean", "running_var")):
        return "batch", True
    return None


def norms_of(model: Module) -> list[Norm]:
    """Every norm layer of a model once, in the model's order, by its first name.

    >>> [norm.name for norm in norms_of(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.LayerNorm(4)))]
    ['1']
    """
    norms: dict[Module, Norm] = {}
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None:
            norms[module] = Norm(name or "(model)", kind[0], module, kind[1], [])
    for path, parent in model.named_modules():
        for child_name, child in parent._modules.items():
            if child in norms:
                norms[child].parents.append((parent, path, child_name))
    return list(norms.values())


def values_of(tensor: Tensor) -> Tensor | None:
    """A tensor's values on this rank, detached; None where there are none to read (meta, fake)."""
    local = tensor.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()
    if local.is_meta or isinstance(local, torch._subclasses.FakeTensor) or local.numel() == 0:
        return None
    return local


def initial(norm: Norm) -> bool:
    """Are its running statistics those that it was made with: mean 0, variance 1, no batch counted?"""
    mean, var = (None if t is None else values_of(t) for t in (norm.mean, norm.var))
    if mean is None or var is None:
        return False
    counted = None if norm.batches is None else values_of(norm.batches)
    if counted is not None and bool(counted != 0):
        return False
    return bool((mean == 0).all()) and bool((var == 1).all())


def learned(norm: Norm) -> bool:
    """Has it been trained: has its beta, or gamma where there is none, two different values?

    Not gamma beside beta: some models begin with gamma at random.
    """
    part = norm.weight if norm.bias is None else norm.bias
    values = None if part is None else values_of(part)
    return values is not None and bool((values != values.flatten()[0]).any())


def child_of(norm: Norm) -> str:
    """The child of the model that it stands in; nothing for a norm of the model itself."""
    return norm.name.split(".")[0] if "." in norm.name else ""
