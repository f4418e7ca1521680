"""Networks for volumes: what nnU-Net's and MONAI's are made of, and these themselves where installed.

`pip install --no-deps dynamic-network-architectures monai einops`; with `-m conformance`.
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch

from benchmarks import held, record, trainers
from benchmarks.volumes import UNet, lacking, loss_of, measure, volumes
from leannorm import lean
from leannorm.saving import recorded_pass

SETTINGS = [{}, {"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.3}]


def gradients(model, x, saving):
    for p in model.parameters():
        p.grad = None
    torch.manual_seed(1)
    with saving:
        loss = loss_of(model, x)
    loss.backward()
    return [p.grad for p in model.parameters()]


def equal(a, b):
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.sampled(of=5)
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
    cats = [record for record in saving.records if record.node == "aten::cat"]
    assert cats
    assert all(record.rebuilt for record in cats)
    held = [r for r in saving.records if not r.rebuilt and r.node == "aten::convolution" and r.bytes]
    of_cat = [r for r in held if r.shape == (2, 8, 16, 16, 16)]
    of_cat.pop()  # the next convolution's output has its shape, too
    assert not of_cat, "the decoder's half of the cat"


def test_a_volume_too_small_for_its_stages():
    """As stock, with stock's error, and nothing left behind."""
    model, found, before = UNet("transposed", "max"), [], recorded_pass.LOG.alive()
    for saving in (nullcontext(), lean("conv")):
        with pytest.raises(Exception) as raised:  # noqa: PT011
            gradients(model, torch.randn(2, 1, 1, 1, 1), saving)
        found.append((raised.type, str(raised.value)))
        del raised  # its frames hold the pass
    assert found[0] == found[1]
    assert recorded_pass.LOG.alive() == before
    x = torch.randn(2, 1, 16, 16, 16)
    assert equal(gradients(model, x, saving), gradients(model, x, nullcontext()))


# the most that "norm" and "conv" hold of what the network saves; labels, which are views, stay whole
MOST = {
    "PlainConvUNet": (0.53, 0.35),
    "ResidualEncoderUNet": (0.64, 0.4),
    "UNet": (0.45, 0.3),
    "DynUNet": (0.55, 0.35),
    "SegResNet": (0.6, 0.45),
    "SwinUNETR": (0.95, 0.55),  # half of its softmaxes stand behind a mask that is added
}


@pytest.mark.conformance
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("network", MOST)
def test_of_a_package(network):
    of_norm, of_conv = MOST[network]
    if (needs := lacking(network)) is not None:
        pytest.skip(f"needs {needs}, installed with --no-deps")
    model, x = volumes(network)
    stock = gradients(model, x, nullcontext())
    for setting, most in (
        ({"recompute": "norm"}, of_norm),
        ({"recompute": "conv"}, of_conv),
        ({"budget": 0.25}, of_conv),
    ):
        saving = lean(**setting)
        for _ in range(2):
            assert equal(gradients(model, x, saving), stock), setting
        held = sum(r.bytes for r in saving.records if not r.rebuilt and r.dtype is not torch.int64)
        assert held / (held + saving.rebuilt_bytes) <= most


@pytest.mark.conformance
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainer", trainers.TRAINERS)
def test_in_a_trainer(trainer, monkeypatch):
    """Others' trainers, as docs/recipes/trainers.md says: losses and weights are stock's."""
    if find_spec(package := trainers.TRAINERS[trainer][0]) is None:
        pytest.skip(f"needs {package}")
    for name in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        monkeypatch.setenv(name, "")  # set there, and as before afterwards
    rows = {row["setting"]: row for row in trainers.of_trainer(trainer)}
    assert all(row["equal"] for row in rows.values())
    assert rows['lean("conv")']["held"] < 0.5
    assert rows['lean("norm")']["held"] < 0.7


@pytest.mark.filterwarnings("ignore")
@pytest.mark.conformance
def test_the_table_has_what_each_setting_holds(tmp_path, capsys):
    out = tmp_path / "volumes.json"
    held.tell(Namespace(json=out), measure("two stages"), "network", "setting")
    rows = {row["setting"]: row for row in record.read(out)}
    assert rows["stock"]["held"] == rows["stock"]["peak"] == 1
    assert rows['lean("conv")']["held"] < rows['lean("norm")']["held"] < 0.6
    assert all(row["equal"] and row["network"] == "two stages" for row in rows.values())
    assert rows["stock"]["about"]["processor"] == record.processor()
    assert "GRADIENTS DIFFER" not in (told := capsys.readouterr().out)
    assert told.count("kept 1.00") == 1
    wrong = [{"network": "a", "setting": "stock", "held": 1.0, "equal": False}]
    held.tell(Namespace(json=None), wrong, "network", "setting")
    assert "GRADIENTS DIFFER" in capsys.readouterr().out
