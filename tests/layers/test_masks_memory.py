"""A masked norm's step takes the memory of the unmasked one: no copy, no product with the mask."""

import pytest
import torch

from leannorm import nn
from leannorm.ops.backends import CPU
from leannorm.report.memory import measure_step

LAYERS = {
    "batch": (lambda: nn.BatchNorm2d(16), (16, 16, 24, 24)),
    "batch, act": (lambda: nn.BatchNormAct2d(16, act="silu"), (16, 16, 24, 24)),
    "batch of sequences": (lambda: nn.BatchNorm1d(64), (16, 64, 200)),
    "sync": (lambda: nn.SyncBatchNorm(16), (16, 16, 24, 24)),
    "group": (lambda: nn.GroupNorm(4, 16), (16, 16, 24, 24)),
    "instance": (lambda: nn.InstanceNorm2d(16), (16, 16, 24, 24)),
    "layer": (lambda: nn.LayerNorm(64), (16, 200, 64)),
    "rms": (lambda: nn.RMSNorm(64), (16, 200, 64)),
}


def masks_of(name, shape):
    """Of a general mask and of lengths, as the layer takes them."""
    places = shape[:-1] if name in ("layer", "rms") else (shape[0], *shape[2:])
    lengths = torch.linspace(places[1] // 2, places[1], places[0]).long()
    return {"mask": torch.rand(places) > 0.3}, {"lengths": lengths}


@pytest.mark.sampled(of=4)
@pytest.mark.skipif(bool(CPU.why_not()), reason="the reference multiplies in plain torch")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_bytes_are_those_without_a_mask(name, last):
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    if last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    x.requires_grad_()
    bare, *masked = [
        measure_step(lambda given=given: layer(x, **given).sum()) for given in ({}, *masks_of(name, shape))
    ]
    extra = x.nbytes // 8  # the mask, its bytes, and statistics
    for memory in masked:
        assert memory.held <= bare.held + extra
        assert memory.peak <= bare.peak + extra
