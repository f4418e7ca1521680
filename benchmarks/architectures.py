"""Published networks for whole-model checks, with images small enough to train on a laptop in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from leannorm.report.fitting import import_torchvision


def in_layout(model: nn.Module, layout: torch.memory_format) -> nn.Module:
    """Convert the parameters to a memory format, which the type hints of `Module.to` do not accept."""
    how: dict[str, Any] = {"memory_format": layout}
    return model.to(**how)


class Architecture(NamedTuple):
    """The name of a network, and the size of an image that it accepts."""

    name: str
    image: tuple[int, ...] = (3, 64, 64)
    options: dict[str, object] = {}  # noqa: RUF012 (never changed)

    def build(self) -> torch.nn.Module:
        library, _, name = self.name.partition(":")
        import_torchvision()  # timm needs it too
        torch.manual_seed(0)
        return BUILDERS[library](name, **self.options)


def _timm(name: str, **options: object) -> torch.nn.Module:
    import timm

    model: torch.nn.Module = timm.create_model(name, num_classes=10, **options)
    return model


def _torchvision(name: str, **options: object) -> torch.nn.Module:
    import torchvision

    model: torch.nn.Module = torchvision.models.get_model(name, weights=None, num_classes=10, **options)
    return model


BUILDERS: dict[str, Callable[..., torch.nn.Module]] = {"timm": _timm, "torchvision": _torchvision}

_TORCHVISION = """
alexnet vgg11_bn resnet18 resnet50 resnext50_32x4d densenet121 mobilenet_v2 mobilenet_v3_small
mobilenet_v3_large mnasnet0_5 shufflenet_v2_x0_5 squeezenet1_1 efficientnet_b0 efficientnet_v2_s
regnet_x_400mf regnet_y_400mf convnext_tiny swin_t
"""
_TIMM = """
resnet18 resnet26d resnet50_gn seresnext26d_32x4d skresnet18 res2net50_26w_4s resnest14d resnetv2_50
efficientnet_b0 efficientnet_lite0 tf_efficientnetv2_b0 mobilenetv2_050 mobilenetv3_small_050
mobilenetv4_conv_small regnetx_002 regnety_002 repvgg_a0 mobileone_s0 ghostnet_050 repghostnet_050
tinynet_e lcnet_050 hardcorenas_a fbnetc_100 spnasnet_100 semnasnet_075 mixnet_s dla34 dpn48b
densenet121 cspresnet50 cspdarknet53 darknet53 ese_vovnet19b_dw hrnet_w18_small vgg11_bn xception41
selecsls42 edgenext_xx_small convnext_atto mobilevit_xxs poolformer_s12 eca_resnext26ts gernet_s
rexnet_100 hgnetv2_b0 inception_next_atto
"""

ARCHITECTURES = (
    *(Architecture(f"torchvision:{n}") for n in _TORCHVISION.split()),
    Architecture("torchvision:googlenet", (3, 96, 96), {"init_weights": False}),
    Architecture("torchvision:inception_v3", (3, 299, 299), {"init_weights": False}),
    Architecture("torchvision:vit_b_32", (3, 64, 64), {"image_size": 64}),
    Architecture("torchvision:r3d_18", (3, 4, 32, 32)),
    *(Architecture(f"timm:{n}") for n in _TIMM.split()),
    Architecture("timm:vit_tiny_patch16_224", (3, 64, 64), {"img_size": 64, "drop_rate": 0.1}),
    Architecture("timm:levit_128s", (3, 64, 64), {"img_size": 64}),
    Architecture("timm:mixer_s32_224", (3, 64, 64), {"img_size": 64, "drop_rate": 0.1}),
)
SMALL = tuple(Architecture(f"timm:test_{n}") for n in ("resnet", "byobnet", "efficientnet"))
