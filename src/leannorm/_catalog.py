"""Which modules are norms, of which kind, and where are their statistics? One table for all packages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import GroupNorm, LayerNorm, Module, RMSNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from leannorm import nn
from leannorm.nn.conv import _ConvBatchNorm

KINDS: tuple[tuple[type[Module], str], ...] = (
    (_BatchNorm, "batch"),
    (_InstanceNorm, "instance"),
    (GroupNorm, "group"),
    (LayerNorm, "layer"),
    (RMSNorm, "rms"),
)
# classes of other packages that derive from none of these, by the end of their name
NAMED = (
    (re.compile(r"FrozenBatchNorm"), "frozen"),
    (re.compile(r"Layer_?Norm(1d|2d|3d|Act|Act2d)?$"), "layer"),
    (re.compile(r"R[Mm][Ss]_?[Nn]orm(1d|2d|3d|Act|Act2d)?$"), "rms"),
)
# leannorm.nn has classes with these names of torch.nn, which compute the same
_SAME = "BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d"
_SAME += " GroupNorm LayerNorm RMSNorm"
OURS: dict[type[Module], type[Module]] = {getattr(torch.nn, n): getattr(nn, n) for n in _SAME.split()}
MODEL = "(model)"  # the name of a norm that is the model itself
TORCHS = {ours: torchs for torchs, ours in OURS.items()}


@dataclass(eq=False)
class Norm:
    """A norm layer: its name in the model, its kind, and its parts under torch's names.

    `foreign`: its class derives from none of torch's, so its formula is not known. `momentum` weighs the new
    batch, as torch's does. `parents` are the modules that contain it, with its name in each.
    """

    name: str
    kind: str
    module: Module
    foreign: bool
    parents: list[tuple[Module, str, str]]

    @property
    def path(self) -> str:
        """Its name; "" where it is the model itself."""
        return "" if self.name == MODEL else self.name

    @property
    def convolution(self) -> _ConvBatchNorm | None:
        """The layer that computes this norm together with its convolution, without calling it."""
        return next((parent for parent, _, _ in self.parents if isinstance(parent, _ConvBatchNorm)), None)

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
        """The factor of the normalized value; None if it is not known."""
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
        """Whether it has running statistics that training updates in its present mode."""
        tracking = getattr(self.module, "track_running_stats", True)
        return self.mean is not None and self.kind != "frozen" and tracking

    @property
    def channels(self) -> int | None:
        """The number of channels with statistics of their own; None where statistics span channels."""
        count = getattr(self.module, "num_features", getattr(self.module, "num_channels", None))
        single = self.kind == "group" and getattr(self.module, "num_groups", None) == count
        if self.kind not in ("batch", "frozen", "instance") and not single:
            return None
        return int(self.mean.numel()) if count is None and self.mean is not None else count

    @property
    def affine(self) -> list[tuple[str, Tensor]]:
        """Gamma and beta, if they are parameters."""
        return [(name, p) for name, p in self.module.named_parameters(recurse=False) if p.is_leaf]

    def _first(self, *names: str) -> Tensor | None:
        for name in names:
            value = getattr(self.module, name, None)
            if isinstance(value, Tensor):
                return value
        return None


def torchs_kind(module: Module) -> str | None:
    """The kind of a norm whose class is one of torch's, or derives from one of them; None for every other
    module.

    >>> torchs_kind(torch.nn.SyncBatchNorm(4)), torchs_kind(torch.nn.Linear(4, 4))
    ('batch', None)
    """
    return next((kind for cls, kind in KINDS if isinstance(module, cls)), None)


def _kind_of(module: Module) -> tuple[str, bool] | None:
    """The kind of a norm, and whether its class is foreign; None for every other module."""
    kind = "batch" if isinstance(module, nn.BatchNormOp) else torchs_kind(module)
    if kind is not None:
        return kind, False
    for pattern, kind in NAMED:
        if pattern.search(type(module).__name__) and isinstance(getattr(module, "weight", None), Tensor):
            return kind, True
    if all(isinstance(module._buffers.get(name), Tensor) for name in ("running_mean", "running_var")):
        return "batch", True
    return None


def norms_of(model: Module) -> list[Norm]:
    """Every norm layer of a model once, in the model's order, under its first name.

    >>> [norm.name for norm in norms_of(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.LayerNorm(4)))]
    ['1']
    """
    norms: dict[Module, Norm] = {}
    for name, module in model.named_modules():
        kind = _kind_of(module)
        if kind is not None:
            norms[module] = Norm(name or MODEL, kind[0], module, kind[1], [])
    for path, parent in model.named_modules():
        for child_name, child in parent._modules.items():
            if child in norms:
                norms[child].parents.append((parent, path, child_name))
    return list(norms.values())


def batch_norms_with_statistics(model: Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Torch's batch norms, leannorm's and subclasses that keep running statistics, by name."""
    for norm in norms_of(model):
        if isinstance(norm.module, _BatchNorm) and norm.tracks:
            yield norm.path or "the model itself", norm.module


def name_of(cls: type) -> str:
    """The full name of a class, by which it is recognized without importing its package."""
    return f"{cls.__module__}.{cls.__qualname__}"
