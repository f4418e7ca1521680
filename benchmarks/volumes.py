"""`lean()` on networks for volumes, of nnU-Net and MONAI: held and peak, of stock's; are gradients equal?

    python -m benchmarks.volumes [NETWORK ...] [--json FILE]

`pip install --no-deps dynamic-network-architectures monai`; "two stages" needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import held
from benchmarks.architectures import import_torchvision


def block(inputs: int, outputs: int, stride: int = 1, p: float = 0.0) -> nn.Module:
    convolution = nn.Conv3d(inputs, outputs, 3, stride, padding=1)
    norm = nn.InstanceNorm3d(outputs, affine=True)
    return nn.Sequential(convolution, nn.Dropout3d(p), norm, nn.LeakyReLU(inplace=True))


class UNet(nn.Module):
    """Two stages, skips, deep supervision; `up`: a transposed convolution or an interpolation."""

    def __init__(self, up: str = "transposed", pool: str | None = None, p: float = 0.0) -> None:
        super().__init__()
        self.fine = nn.Sequential(block(1, 8), block(8, 8, p=p))
        self.coarse = block(8, 16) if pool else block(8, 16, 2)
        self.pool = {"max": nn.MaxPool3d(2), "average": nn.AvgPool3d(2), None: nn.Identity()}[pool]
        self.up = nn.ConvTranspose3d(16, 8, 2, 2) if up == "transposed" else nn.Conv3d(16, 8, 1)
        self.mode, self.last = up, nn.Sequential(block(16, 8), nn.Conv3d(8, 3, 1))
        self.beside = nn.Conv3d(16, 3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.fine(x)
        coarse = self.coarse(self.pool(fine))
        up = self.up(coarse)
        if self.mode != "transposed":
            up = F.interpolate(up, scale_factor=2, mode=self.mode)
        return self.last(torch.cat((up, fine), 1)), self.beside(coarse)


def _of_nnunet(name: str, **settings: Any) -> nn.Module:
    from dynamic_network_architectures.architectures import unet

    how = {"conv_op": nn.Conv3d, "kernel_sizes": 3, "strides": [1, 2, 2, 2], "num_classes": 3}
    how |= {"conv_bias": True, "norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"affine": True}}
    how |= {"nonlin": nn.LeakyReLU, "nonlin_kwargs": {"inplace": True}, "deep_supervision": True}
    features = [8, 16, 32, 64]
    made: nn.Module = getattr(unet, name)(1, n_stages=4, features_per_stage=features, **how, **settings)
    return made


def _of_monai(name: str, **settings: Any) -> nn.Module:
    from monai.networks import nets

    made: nn.Module = getattr(nets, name)(spatial_dims=3, in_channels=1, out_channels=3, **settings)
    return made


_DYN = {"kernel_size": [3] * 4, "strides": [1, 2, 2, 2], "upsample_kernel_size": [2] * 3}
_DYN |= {"filters": [8, 16, 32, 64], "deep_supervision": True, "deep_supr_num": 2}
_UNET = {"channels": (8, 16, 32, 64), "strides": (2, 2, 2), "num_res_units": 2, "dropout": 0.1}
_ENCODER = {"n_blocks_per_stage": [1, 2, 2, 2], "n_conv_per_stage_decoder": 1}
NNUNET, MONAI = "dynamic_network_architectures", "monai"
NETWORKS: dict[str, tuple[str | None, Callable[[], nn.Module]]] = {  # and the package that each is of
    "two stages": (None, lambda: UNet("transposed", "max")),
    "PlainConvUNet": (
        NNUNET,
        lambda: _of_nnunet("PlainConvUNet", n_conv_per_stage=2, n_conv_per_stage_decoder=2),
    ),
    "ResidualEncoderUNet": (NNUNET, lambda: _of_nnunet("ResidualEncoderUNet", **_ENCODER)),
    "UNet": (MONAI, lambda: _of_monai("UNet", **_UNET)),
    "DynUNet": (MONAI, lambda: _of_monai("DynUNet", **_DYN)),
    "SegResNet": (MONAI, lambda: _of_monai("SegResNet", init_filters=8, dropout_prob=0.1)),
}


def lacking(name: str) -> str | None:
    """The package that this network needs, if it is not installed."""
    package = NETWORKS[name][0]
    return package if package is not None and find_spec(package) is None else None


def volumes(name: str) -> tuple[nn.Module, Tensor]:
    """The network, in training, and a volume."""
    import_torchvision()
    torch.manual_seed(0)
    return NETWORKS[name][1]().train(), torch.randn(1, 1, 32, 32, 32)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Of all outputs, for deep supervision, against shifted predictions."""
    outputs = model(x)
    if not isinstance(outputs, (list, tuple)):
        outputs = outputs.unbind(1) if outputs.dim() == 6 else [outputs]
    losses = [F.cross_entropy(y.float(), y.argmax(1).roll(1, 1)) for y in outputs]
    return sum(losses[1:], losses[0])


def measure(name: str) -> Iterator[held.Row]:
    """The rows of one network."""
    model, x = volumes(name)

    def loss() -> Tensor:
        torch.manual_seed(1)  # dropout
        return loss_of(model, x)

    for row in held.rows(model, loss, []):
        yield {"network": name, **row}


def main() -> None:
    options = held.parsed(held.parser_of(__doc__, NETWORKS, "NETWORK"))
    names = options.names or NETWORKS
    for name in names:
        if (needs := lacking(name)) is not None:
            print(f"{name}: needs {needs.replace('_', '-')}, installed with --no-deps")
    found = (row for name in names if lacking(name) is None for row in measure(name))
    held.tell(options, found, "network", "setting")


if __name__ == "__main__":
    main()
