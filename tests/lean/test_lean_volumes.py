"""Networks for volumes: what nnU-Net's and MONAI's are made of, and these themselves where installed.

`pip install --no-deps dynamic-network-architectures monai`; with `-m conformance`.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.architectures import import_torchvision
from leannorm import lean
from leannorm.saving import small

SETTINGS = [{}, {"recompute": "conv"}, {"budget": 0.3}]


@pytest.fixture(autouse=True)
def no_small_passes(monkeypatch):
    monkeypatch.setattr(small, "SMALL", -1)


def block(inputs, outputs, stride=1, p=0.0):
    convolution = nn.Conv3d(inputs, outputs, 3, stride, padding=1)
    norm = nn.InstanceNorm3d(outputs, affine=True)
    return nn.Sequential(convolution, nn.Dropout3d(p), norm, nn.LeakyReLU(inplace=True))


class UNet(nn.Module):
    """Two stages, skips, deep supervision; `up`: a transposed convolution or an interpolation."""

    def __init__(self, up="transposed", pool=None, p=0.0):
        super().__init__()
        self.fine = nn.Sequential(block(1, 8), block(8, 8, p=p))
        self.coarse = block(8, 16) if pool else block(8, 16, 2)
        self.pool = {"max": nn.MaxPool3d(2), "average": nn.AvgPool3d(2), None: nn.Identity()}[pool]
        self.up = nn.ConvTranspose3d(16, 8, 2, 2) if up == "transposed" else nn.Conv3d(16, 8, 1)
        self.mode, self.last = up, nn.Sequential(block(16, 8), nn.Conv3d(8, 3, 1))
        self.beside = nn.Conv3d(16, 3, 1)

    def forward(self, x):
        fine = self.fine(x)
        coarse = self.coarse(self.pool(fine))
        up = self.up(coarse)
        if self.mode != "transposed":
            up = F.interpolate(up, scale_factor=2, mode=self.mode)
        return self.last(torch.cat((up, fine), 1)), self.beside(coarse)


def gradients(model, x, saving):
    for p in model.parameters():
        p.grad = None
    torch.manual_seed(1)
    with saving:
        outputs = model(x)
        if not isinstance(outputs, (list, tuple)):
            outputs = outputs.unbind(1) if outputs.dim() == 6 else [outputs]
        loss = sum(F.cross_entropy(y.float(), y.argmax(1).roll(1, 1)) for y in outputs)
    loss.backward()
    return [p.grad for p in model.parameters()]


def equal(a, b):
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize("up", ["transposed", "nearest", "trilinear"])
@pytest.mark.parametrize("pool", ["max", "average", None])
def test_of_two_stages(up, pool, form, dtype):
    if pool == "average" and dtype is torch.bfloat16:
        pytest.skip("torch has no such pooling of volumes on a CPU")
    torch.manual_seed(0)
    model = UNet(up, pool, p=0.2).to(dtype).to(memory_format=form)
    x = torch.randn(2, 1, 16, 16, 16).to(dtype).contiguous(memory_format=form)
    stock = gradients(model, x, nullcontext())
    for setting in SETTINGS:
        saving = lean(**setting)
        for _ in range(2):
            assert equal(gradients(model, x, saving), stock), setting
        assert saving.rebuilt_bytes > (0.4 if dtype is torch.float32 else 0.25) * saving.kept_bytes


def test_what_a_setting_rebuilds():
    """A transposed convolution counts by the operations that each of its inputs takes part in."""
    torch.manual_seed(0)
    saving = lean("conv")
    gradients(UNet("transposed"), torch.randn(2, 1, 16, 16, 16), saving)
    cats = [record for record in saving.records if record.node == "CatBackward0"]
    assert cats
    assert all(record.rebuilt for record in cats)
    held = [r for r in saving.records if not r.rebuilt and r.node == "ConvolutionBackward0" and r.bytes]
    assert not [r for r in held if r.shape == (2, 8, 16, 16, 16)], "the decoder's half of the cat"


def test_a_volume_too_small_for_its_stages():
    """As stock, with stock's error, and nothing left behind."""
    model, found = UNet("transposed", "max"), []
    for saving in (nullcontext(), lean("conv")):
        with pytest.raises(Exception) as raised:  # noqa: PT011
            gradients(model, torch.randn(2, 1, 1, 1, 1), saving)
        found.append((raised.type, str(raised.value)))
        del raised  # its frames hold the pass
    assert found[0] == found[1]
    assert not [r for r in saving._ledger.references if r() is not None]
    x = torch.randn(2, 1, 16, 16, 16)
    assert equal(gradients(model, x, saving), gradients(model, x, nullcontext()))


def of_nnunet(name, **settings):
    from dynamic_network_architectures.architectures import unet

    how = {"conv_op": nn.Conv3d, "kernel_sizes": 3, "strides": [1, 2, 2, 2], "num_classes": 3}
    how |= {"conv_bias": True, "norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"affine": True}}
    how |= {"nonlin": nn.LeakyReLU, "nonlin_kwargs": {"inplace": True}, "deep_supervision": True}
    features = [8, 16, 32, 64]
    return getattr(unet, name)(1, n_stages=4, features_per_stage=features, **how, **settings)


def of_monai(name, **settings):
    from monai.networks import nets

    return getattr(nets, name)(spatial_dims=3, in_channels=1, out_channels=3, **settings)


_DYN = {"kernel_size": [3] * 4, "strides": [1, 2, 2, 2], "upsample_kernel_size": [2] * 3}
_DYN |= {"filters": [8, 16, 32, 64], "deep_supervision": True, "deep_supr_num": 2}
_UNET = {"channels": (8, 16, 32, 64), "strides": (2, 2, 2), "num_res_units": 2, "dropout": 0.1}
NETWORKS = {  # and the most that lean() and lean("conv") hold
    "PlainConvUNet": (
        lambda: of_nnunet("PlainConvUNet", n_conv_per_stage=2, n_conv_per_stage_decoder=2),
        0.53,
        0.35,
    ),
    "ResidualEncoderUNet": (
        lambda: of_nnunet("ResidualEncoderUNet", n_blocks_per_stage=[1, 2, 2, 2], n_conv_per_stage_decoder=1),
        0.64,
        0.4,
    ),
    "UNet": (lambda: of_monai("UNet", **_UNET), 0.45, 0.3),
    "DynUNet": (lambda: of_monai("DynUNet", **_DYN), 0.55, 0.35),
    "SegResNet": (lambda: of_monai("SegResNet", init_filters=8, dropout_prob=0.1), 0.6, 0.45),
}


@pytest.mark.conformance
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("network", NETWORKS)
def test_of_a_package(network):
    make, of_norm, of_conv = NETWORKS[network]
    needs = "dynamic_network_architectures" if "Conv" in network or "Encoder" in network else "monai"
    if find_spec(needs) is None:
        pytest.skip(f"needs {needs}, installed with --no-deps")
    import_torchvision()
    torch.manual_seed(0)
    model, x = make().train(), torch.randn(1, 1, 32, 32, 32)
    stock = gradients(model, x, nullcontext())
    for setting, most in (({}, of_norm), ({"recompute": "conv"}, of_conv), ({"budget": 0.25}, of_conv)):
        saving = lean(**setting)
        for _ in range(2):
            assert equal(gradients(model, x, saving), stock), setting
        assert saving.kept_bytes / (saving.kept_bytes + saving.rebuilt_bytes) <= most
