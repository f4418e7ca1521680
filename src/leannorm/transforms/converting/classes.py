"""Tables of the known classes and of the classes that they become.

A class is known by its full name, so no package is imported to recognise its layers. Subclasses of a known
class are not known: they may compute anything (timm's `BatchNormAct2d` is a `BatchNorm2d` that activates).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from leannorm import nn
from leannorm._catalog import OURS, name_of
from leannorm.transforms.converting.norm_act import (
    BatchNorm2dThenAct,
    GroupNormThenAct,
    LayerNormThenAct,
    RMSNormThenAct,
)
from leannorm.transforms.recognizing.recognition import REPLACED


class Entry(NamedTuple):
    """The class that a known layer becomes, and the attributes that are added to it."""

    target: type[Module]
    attributes: Mapping[str, Any] = {}


CHANNELS = {"dim": 1}  # over dim 1 of NCHW; the original permutes to NHWC and back

KNOWN: dict[str, Entry] = {name_of(torchs): Entry(ours) for torchs, ours in OURS.items()} | {
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


def why_not(module: Module) -> str | None:
    """Why a layer of ours would compute something else than this layer of a known class."""
    if "forward" in vars(module):
        return REPLACED
    momentum, eps = getattr(module, "momentum", None), getattr(module, "eps", None)
    if isinstance(momentum, float) and not 0 <= momentum <= 1:
        return f"its momentum is {momentum}, ours takes 0 to 1"
    if eps is not None and (eps < 0 or (eps == 0 and isinstance(module, _BatchNorm))):
        return f"its eps is {eps}, ours must be positive"
    if any(p is not None and p.is_complex() for p in module._parameters.values()):
        return "its parameters are complex"
    if getattr(module, "_fast_norm", False):
        return "timm's fast norm casts under autocast, ours does not; call set_fast_norm(False) before"
    return None


def has_torchs_form(module: Module) -> bool:
    """Whether a layer of ours computes what torch's layer of that name does."""
    values = (getattr(module, name, None) for name in ("dim", "group_size", "weight_offset", "cast"))
    dim, group_size, offset, cast = values
    return dim is None and group_size is None and not offset and cast in (None, "after")
