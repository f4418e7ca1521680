"""The tables: which classes are known, what they become, which activations the kernels compute.

A class is known by its full name, so that no package is imported to recognise its layers, and by nothing
else: a subclass may compute anything (timm's `BatchNormAct2d` is a `BatchNorm2d` that also activates).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.nn
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from leannorm import nn
from leannorm.transforms.then_act import (
    BatchNorm2dThenAct,
    GroupNormThenAct,
    LayerNormThenAct,
    RMSNormThenAct,
)


class Entry(NamedTuple):
    """The class that a known layer becomes, and what it is told beyond what it knows already."""

    target: type[Module]
    attributes: Mapping[str, Any] = {}


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# by name, torch.nn's and ours are the same
SAME = (
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "GroupNorm",
    "LayerNorm",
    "RMSNorm",
    "SyncBatchNorm",
)
TO_TORCH: dict[type[Module], type[Module]] = {getattr(nn, n): getattr(torch.nn, n) for n in SAME}
CHANNELS = {"dim": 1}  # over axis 1 of (N, C, H, W), where the original moves it behind and back

KNOWN: dict[str, Entry] = {name_of(stock): Entry(ours) for ours, stock in TO_TORCH.items()} | {
    "timm.layers.norm.GroupNorm": Entry(nn.GroupNorm),
    "timm.layers.norm.GroupNorm1": Entry(nn.GroupNorm),
    "timm.layers.norm.LayerNorm": Entry(nn.LayerNorm),
    "timm.layers.norm.LayerNorm2d": Entry(nn.LayerNorm, CHANNELS),
    "timm.layers.norm.RmsNorm": Entry(nn.RMSNorm),
    "timm.layers.norm.RmsNorm2d": Entry(nn.RMSNorm, CHANNELS),
    "timm.layers.norm_act.BatchNormAct2d": Entry(BatchNorm2dThenAct),
    "timm.layers.norm_act.GroupNormAct": Entry(GroupNormThenAct),
    "timm.layers.norm_act.GroupNorm1Act": Entry(GroupNormThenAct),
    "timm.layers.norm_act.LayerNormAct": Entry(LayerNormThenAct),
    "timm.layers.norm_act.LayerNormAct2d": Entry(LayerNormThenAct, CHANNELS),
    "timm.layers.norm_act.RmsNormAct": Entry(RMSNormThenAct),
    "timm.layers.norm_act.RmsNormAct2d": Entry(RMSNormThenAct, CHANNELS),
    "torchvision.models.convnext.LayerNorm2d": Entry(nn.LayerNorm, CHANNELS),
}

# a batch norm that is followed by an activation, and the layer that does both
WITH_ACT: dict[type[Module], type[Module]] = {
    nn.BatchNorm1d: nn.BatchNormAct1d,
    nn.BatchNorm2d: nn.BatchNormAct2d,
    nn.BatchNorm3d: nn.BatchNormAct3d,
    BatchNorm2dThenAct: nn.BatchNormAct2d,
}

# forwards that have been read: what they do does not change from call to call
CERTAIN_BLOCKS = frozenset(
    {
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

_ACTIVATIONS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "torch.nn.modules.activation.ReLU": ("relu", {}),
    "torch.nn.modules.activation.LeakyReLU": ("leaky_relu", {"negative_slope": 0.01}),
    "torch.nn.modules.activation.SiLU": ("silu", {}),
    "torch.nn.modules.activation.Hardswish": ("hardswish", {}),
    "torch.nn.modules.activation.Hardtanh": ("hardtanh", {"min_val": -1.0, "max_val": 1.0}),
    "torch.nn.modules.activation.ReLU6": ("relu6", {}),
    "torch.nn.modules.activation.ELU": ("elu", {"alpha": 1.0}),
    "torch.nn.modules.activation.Mish": ("mish", {}),
    "torch.nn.modules.linear.Identity": ("identity", {}),
    "timm.layers.activations.GELU": ("gelu", {}),
    "timm.layers.activations.GELUTanh": ("gelu_tanh", {}),
}
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def activation_of(module: Module) -> str | None:
    """The kernels' name for this activation module; None where it is another or has other parameters."""
    if type(module) is torch.nn.GELU:
        return _GELU[module.approximate]
    name, parameters = _ACTIVATIONS.get(name_of(type(module)), (None, {}))
    fits = all(getattr(module, key) == value for key, value in parameters.items())
    return name if fits else None


def why_not(module: Module) -> str | None:
    """Why this layer of a known class would compute something else as one of ours."""
    momentum, eps = getattr(module, "momentum", None), getattr(module, "eps", None)
    if isinstance(momentum, float) and not 0 <= momentum <= 1:
        return f"its momentum is {momentum}, ours takes 0 to 1"
    if eps is not None and (eps < 0 or (eps == 0 and isinstance(module, _BatchNorm))):
        return f"its eps is {eps}, ours must be positive"
    if getattr(module, "_fast_norm", False):
        return "timm's fast norm casts under autocast, ours does not; call set_fast_norm(False) before"
    return None


def is_norm(module: Module) -> bool:
    """Is it of torch's norms, or a subclass?"""
    return isinstance(module, (_NormBase, torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm))
