"""Networks that leave: small ones with every kind of norm, and the published ones of `make conformance`."""

import warnings
from typing import NamedTuple

import torch
from torch import nn as stock

import leannorm
from benchmarks.architectures import Architecture
from leannorm import nn


class Block(stock.Module):
    """A residual block."""

    def __init__(self, channels=8):
        super().__init__()
        self.conv1, self.bn1 = stock.Conv2d(channels, channels, 3, padding=1), stock.BatchNorm2d(channels)
        self.conv2, self.bn2 = stock.Conv2d(channels, channels, 3, padding=1), stock.BatchNorm2d(channels)
        self.relu, self.act = stock.ReLU(inplace=True), stock.SiLU()

    def forward(self, x):
        y = self.act(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


class Joined(stock.Module):
    """A norm that adds and activates in the same call."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = stock.Conv2d(8, 8, 3, padding=1), nn.BatchNormAct2d(8)

    def forward(self, x):
        return self.bn(self.conv(x), x)


def convolutional():
    return stock.Sequential(
        stock.Conv2d(3, 8, 3), stock.BatchNorm2d(8, momentum=None), stock.Hardswish(), Block(), Block()
    )


def grouped():
    return stock.Sequential(
        stock.Conv2d(3, 8, 3), stock.GroupNorm(2, 8), stock.Conv2d(8, 4, 3),
        stock.InstanceNorm2d(4, affine=True), stock.Conv2d(4, 4, 3),
        stock.InstanceNorm2d(4, track_running_stats=True),
    )  # fmt: skip


def rows():
    return stock.Sequential(
        stock.Conv2d(3, 4, 7), stock.Flatten(2), stock.LayerNorm(36), stock.Linear(36, 16), stock.GELU(),
        stock.LayerNorm((4, 16), elementwise_affine=False),
    )  # fmt: skip


def rms():
    """And what else TorchScript's exporter does not know: batch statistics in evaluation."""
    return stock.Sequential(
        stock.Flatten(2), stock.RMSNorm(144), stock.Linear(144, 16),
        stock.BatchNorm1d(3, track_running_stats=False), stock.RMSNorm(16),
    )  # fmt: skip


def own():
    """Layers that only we have: convolution and norm as one, norm and activation as one, any axis."""
    return stock.Sequential(
        nn.ConvBatchNorm2d(3, 8, 3, padding=1, bias=True), nn.BatchNormAct2d(8, act="mish"), Joined(),
        nn.ConvBatchNorm2d(8, 8, 3, padding="same", padding_mode="reflect"), nn.LayerNorm(8, dim=1),
        nn.ConvBatchNorm2d(8, 4, 3, eps_mode="outside"), nn.BatchNormOp(4), nn.SyncBatchNorm(4),
    )  # fmt: skip


def mixed():
    """All that ONNX has a node for."""
    return stock.Sequential(*convolutional()[:4], *grouped()[1:], *rows()[1:])


SMALL = {f.__name__: f for f in (convolutional, grouped, rows, rms, own, mixed)}
IMAGE = (3, 12, 12)


class Case(NamedTuple):
    """A network by name, how it is converted, and whether it is made lean."""

    name: str
    lean: bool = False

    def __str__(self):
        return f"{self.name}{', lean' * self.lean}"

    def build(self, converted=True):
        """In evaluation, with statistics and parameters that change what they meet, and an input."""
        torch.manual_seed(0)
        published = PUBLISHED.get(self.name)
        model, image = (
            (SMALL[self.name](), IMAGE) if published is None else (published.build(), published.image)
        )
        unsettle(model.eval())
        if converted:
            with warnings.catch_warnings():  # of a class that cannot be read, which stays as it is
                warnings.filterwarnings("ignore", "convert left these layers")
                model = leannorm.convert(model)
        return (leannorm.make_lean(model, "norm") if self.lean else model), torch.randn(2, *image)


def unsettle(model):
    """No norm is one that changes nothing."""
    with torch.no_grad():
        for layer in model.modules():
            for name, value in [*layer._parameters.items(), *layer._buffers.items()]:
                if value is None or not value.is_floating_point():
                    continue
                if value.dim() > 1 or name.startswith(("gamma", "layer_scale")):
                    if value.abs().max() < 1e-3:  # a head of zeros, a layer scale of almost none
                        value.normal_(0.0, 0.1)
                    continue
                if name in ("running_var", "estimated_var"):
                    value.uniform_(0.5, 1.5)
                elif name in ("running_mean", "estimated_mean", "bias"):
                    value.add_(torch.randn(value.shape) * 0.1)
                else:
                    value.mul_(torch.empty(value.shape).uniform_(0.75, 1.25))


def state(model):
    """All that leaving may not change: the tensors, in which memory they are, flags, classes, attributes."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        {name: (value.data_ptr(), value.requires_grad, value.grad is None, value.flatten().tolist())
         for name, value in tensors.items()},
        [(name, type(m), m.training, sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
         for name, m in model.named_modules()],
    )  # fmt: skip


def error_of(y, expected):
    """The largest difference, in units of the largest value."""
    return ((y.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


_TORCHVISION = """
vgg11_bn resnet18 resnext50_32x4d densenet121 mobilenet_v2 mobilenet_v3_small mnasnet0_5
shufflenet_v2_x0_5 efficientnet_b0 regnet_y_400mf convnext_tiny swin_t
"""
_TIMM = """
resnet26d resnet50_gn seresnext26d_32x4d res2net50_26w_4s resnetv2_50 efficientnet_lite0 mobilenetv3_small_050
mobilenetv4_conv_small repvgg_a0 ghostnet_050 hardcorenas_a mixnet_s cspdarknet53 ese_vovnet19b_dw
edgenext_xx_small convnext_atto mobilevit_xxs poolformer_s12 rexnet_100
"""
LARGER = ("test_vit", "test_vit2", "test_vit4")
PUBLISHED = {
    architecture.name: architecture
    for architecture in (
        *(Architecture(f"torchvision:{name}") for name in _TORCHVISION.split()),
        Architecture("torchvision:vit_b_32", (3, 64, 64), {"image_size": 64}),
        *(Architecture(f"timm:{name}") for name in _TIMM.split()),
        Architecture("timm:levit_128s", (3, 64, 64), {"img_size": 64}),
        Architecture("timm:mixer_s32_224", (3, 64, 64), {"img_size": 64}),
        *(Architecture(f"timm:test_{name}") for name in ("resnet", "convnext", "efficientnet_gn")),
        *(Architecture(f"timm:{name}", (3, 160, 160)) for name in LARGER),
    )
}
