"""Under checkpointing a forward pass runs twice; running statistics move once. torch's move twice."""

import copy

import pytest
import torch
from test_guard import LAYERS
from torch import nn as stock
from torch.utils.checkpoint import checkpoint

LAYERS = {name: make for name, make in LAYERS.items() if name != "InstanceNorm2d"}


def step(layer, reentrant):
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
    y.square().sum().backward()
    return [b.clone() for b in layer.buffers()]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_ours_move_once(name, reentrant, momentum):
    layer = LAYERS[name](momentum=momentum)
    twin = copy.deepcopy(layer)
    for one, other in zip(step(layer, reentrant), step(twin, None), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_move_twice(reentrant):
    layer = stock.BatchNorm2d(3)
    twin = copy.deepcopy(layer)
    mean, var, count = step(layer, reentrant)
    once = step(twin, None)
    assert count == 2
    torch.testing.assert_close(mean, once[0] * 1.9)  # 0.1 + 0.9 * 0.1
    assert not torch.equal(var, once[1])
