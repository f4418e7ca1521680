"""`lean()` on networks for volumes, from nnU-Net and MONAI: kept activations, peak memory and step time.

    python -m benchmarks.volumes [NETWORK ...] [--json FILE]
    python -m benchmarks.volumes --time [NETWORK ...]

All numbers are relative to plain PyTorch, on two cubes of 64 per side and one thread. The settings alternate,
and gradients are compared. `--time` instead prints the speed-up of `convert` in CPU time, of a step of each
network, and of an instance norm with its LeakyReLU.
`pip install --no-deps dynamic-network-architectures monai einops` brings the networks; "two stages" needs
none of these packages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from statistics import median
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import held
from benchmarks.architectures import import_torchvision, in_layout
from leannorm import convert


def block(inputs: int, outputs: int, stride: int = 1, p: float = 0.0) -> nn.Module:
    convolution = nn.Conv3d(inputs, outputs, 3, stride, padding=1)
    norm = nn.InstanceNorm3d(outputs, affine=True)
    return nn.Sequential(convolution, nn.Dropout3d(p), norm, nn.LeakyReLU(inplace=True))


class UNet(nn.Module):
    """Two stages, skips and deep supervision; `up` is "transposed" or a mode of interpolation."""

    def __init__(self, up: str = "transposed", pool: str | None = None, p: float = 0.0) -> None:
        super().__init__()
        self.fine = nn.Sequential(block(1, 8), block(8, 8, p=p))
        self.coarse = block(8, 16) if pool else block(8, 16, 2)
        self.pool = {"max": nn.MaxPool3d(2), "average": nn.AvgPool3d(2), None: nn.Identity()}[pool]
        self.up = nn.ConvTranspose3d(16, 8, 2, 2) if up == "transposed" else nn.Conv3d(16, 8, 1)
        self.mode, self.last = up, nn.Sequential(block(16, 8), nn.Conv3d(8, 3, 1))
        self.deep = nn.Conv3d(16, 3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.fine(x)
        coarse = self.coarse(self.pool(fine))
        up = self.up(coarse)
        if self.mode != "transposed":
            up = F.interpolate(up, scale_factor=2, mode=self.mode)
        return self.last(torch.cat((up, fine), 1)), self.deep(coarse)


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


_DYN: dict[str, Any] = {"kernel_size": [3] * 4, "strides": [1, 2, 2, 2], "upsample_kernel_size": [2] * 3}
_DYN |= {"filters": [8, 16, 32, 64], "deep_supervision": True, "deep_supr_num": 2}
_UNET = {"channels": (8, 16, 32, 64), "strides": (2, 2, 2), "num_res_units": 2, "dropout": 0.1}
_ENCODER = {"n_blocks_per_stage": [1, 2, 2, 2], "n_conv_per_stage_decoder": 1}
NNUNET, MONAI, EINOPS = ("dynamic_network_architectures",), ("monai",), ("monai", "einops")
NETWORKS: dict[str, tuple[tuple[str, ...], Callable[[], nn.Module]]] = {  # and the packages that each needs
    "two stages": ((), lambda: UNet("transposed", "max")),
    "PlainConvUNet": (
        NNUNET,
        lambda: _of_nnunet("PlainConvUNet", n_conv_per_stage=2, n_conv_per_stage_decoder=2),
    ),
    "ResidualEncoderUNet": (NNUNET, lambda: _of_nnunet("ResidualEncoderUNet", **_ENCODER)),
    "UNet": (MONAI, lambda: _of_monai("UNet", **_UNET)),
    "DynUNet": (MONAI, lambda: _of_monai("DynUNet", **_DYN)),
    "SegResNet": (MONAI, lambda: _of_monai("SegResNet", init_filters=8, dropout_prob=0.1)),
    "SwinUNETR": (EINOPS, lambda: _of_monai("SwinUNETR", feature_size=12)),
}
_SIDE = {"SwinUNETR": 64}  # it halves the sides five times


def lacking(name: str) -> str | None:
    """A package that this network needs and that is not installed."""
    return next((package for package in NETWORKS[name][0] if find_spec(package) is None), None)


def volumes(name: str, count: int = 1, side: int = 32) -> tuple[nn.Module, Tensor]:
    """The network in training mode, and this many cubes."""
    import_torchvision()
    torch.manual_seed(0)
    return NETWORKS[name][1]().train(), torch.randn(count, 1, *[_SIDE.get(name, side)] * 3)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of all outputs, as in deep supervision, with shifted predictions as targets."""
    outputs = model(x)
    if not isinstance(outputs, (list, tuple)):
        outputs = outputs.unbind(1) if outputs.dim() == 6 else [outputs]
    losses = [F.cross_entropy(y.float(), y.argmax(1).roll(1, 1)) for y in outputs]
    return sum(losses[1:], losses[0])


def measure(name: str, count: int = 1, side: int = 32, turns: int = 0) -> Iterator[held.Row]:
    """Yield the rows of one network."""
    model, x = volumes(name, count, side)

    def loss() -> Tensor:
        torch.manual_seed(1)  # dropout
        return loss_of(model, x)

    for row in held.rows(model, loss, [], turns=turns):
        yield {"network": name, **row}


_FORMS = torch.contiguous_format, torch.channels_last_3d
_SIZES = (2, 32, 64, 64, 64), (2, 64, 32, 32, 32), (2, 128, 16, 16, 16), (2, 320, 8, 8, 8)


def _ratio(model: nn.Module, x: Tensor, forward: Callable[[nn.Module, Tensor], Tensor], turns: int) -> float:
    """The model's median step time divided by that of its converted copy. Outputs are compared first."""
    models = model, convert(copy.deepcopy(model))
    outputs = [forward(m, x).detach() for m in models]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    gradient = torch.randn_like(outputs[1])  # in the layout of the output
    spent: list[list[float]] = [[], []]
    for _ in range(turns):
        for m, times in zip(models, spent, strict=True):
            m.zero_grad()
            x.grad = None
            start = process_time()
            forward(m, x).backward(gradient)
            times.append(process_time() - start)
    return median(spent[0]) / median(spent[1])


def tell_times(names: Iterable[str], turns: int = 9) -> None:
    """Print the speed-ups, contiguous and channels_last_3d."""

    def told(name: str, ratios: Iterable[float]) -> None:
        print(f"{name:48}", *(f"{ratio:5.2f}" for ratio in ratios), flush=True)

    for size in _SIZES:
        block = nn.Sequential(nn.InstanceNorm3d(size[1], affine=True), nn.LeakyReLU(inplace=True))
        xs = [torch.randn(size).contiguous(memory_format=form).requires_grad_() for form in _FORMS]
        told(f"InstanceNorm3d, LeakyReLU {size}", [_ratio(block, x, lambda m, x: m(x), turns) for x in xs])
    for name in names:
        model, x = volumes(name)
        told(name, [_ratio(in_layout(model, form), x, loss_of, turns) for form in _FORMS])


def main() -> None:
    parser = held.parser_of(__doc__, NETWORKS, "NETWORK")
    parser.add_argument("--time", action="store_true", help="print the speed-up of convert instead")
    options = held.parsed(parser)
    names = options.names or NETWORKS
    for name in names:
        if (needs := lacking(name)) is not None:
            print(f"{name} needs {needs.replace('_', '-')}: pip install --no-deps")
    if options.time:
        return tell_times(name for name in names if lacking(name) is None)
    found = (row for name in names if lacking(name) is None for row in measure(name, 2, 64, turns=5))
    held.tell(options, found, "network", "setting")


if __name__ == "__main__":
    main()
