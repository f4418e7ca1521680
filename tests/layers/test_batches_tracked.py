"""`num_batches_tracked` of any dtype, as in a cast or averaged copy of all buffers, counts as torch's."""

import copy

import pytest
import torch
from torch import nn as stock

from leannorm import nn

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8)
LAYERS = {
    "BatchNorm1d": (lambda m: nn.BatchNorm1d(4, momentum=m), stock.BatchNorm1d, (6, 4)),
    "BatchNorm2d": (lambda m: nn.BatchNorm2d(4, momentum=m), stock.BatchNorm2d, (6, 4, 3, 5)),
    "BatchNormAct2d": (lambda m: nn.BatchNormAct2d(4, momentum=m), stock.BatchNorm2d, (6, 4, 3, 5)),
    "SyncBatchNorm": (lambda m: nn.SyncBatchNorm(4, momentum=m), stock.BatchNorm2d, (6, 4, 3, 5)),
    "ConvBatchNorm2d": (
        lambda m: nn.ConvBatchNorm2d(3, 4, 1, momentum=m),
        stock.BatchNorm2d,
        (6, 3, 3, 5),
    ),
}
# from 256 on bfloat16 does not count, and float16 does not from 2048 on
STARTS = (0, 3, 255, 256, 2048)


def train(layer, norm, count, x):
    norm.num_batches_tracked = count.clone()
    layer(x)
    return norm


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", LAYERS)
def test_the_count_is_torchs(name, dtype, momentum):
    make, theirs, shape = LAYERS[name]
    for start in STARTS:
        count = torch.tensor(start).to(dtype)
        if count + 2 <= count and not dtype.is_floating_point:
            continue  # past what the dtype holds
        ours, torchs, x = make(momentum), theirs(4, momentum=momentum), torch.randn(shape)
        norm = train(ours, getattr(ours, "bn", ours), count, x)
        train(torchs, torchs, count, ours.conv(x) if hasattr(ours, "conv") else x)
        assert norm.num_batches_tracked.dtype == dtype
        assert torch.equal(norm.num_batches_tracked, torchs.num_batches_tracked)
        torch.testing.assert_close(norm.running_mean, torchs.running_mean)
        torch.testing.assert_close(norm.running_var, torchs.running_var)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_an_average_of_all_buffers_trains_on(momentum):
    models = [layer(4, momentum=momentum) for layer in (nn.BatchNorm2d, stock.BatchNorm2d)]
    batches = [torch.randn(6, 4, 3, 5) for _ in range(3)]
    for model in models:
        earlier = copy.deepcopy(model)
        model(batches[0])
        for name, buffer in model.named_buffers():
            setattr(model, name, (buffer + getattr(earlier, name)) / 2)
        for x in batches[1:]:
            model(x)
    assert models[0].num_batches_tracked == models[1].num_batches_tracked == 2.5
    for ours, theirs in zip(models[0].buffers(), models[1].buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_it_compiles():
    layer, twin = nn.BatchNorm2d(4, momentum=None), nn.BatchNorm2d(4, momentum=None)
    for norm in (layer, twin):
        norm.num_batches_tracked = torch.tensor(3.0)
    x = torch.randn(6, 4, 3, 5)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x), twin(x))
    for a, b in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(a, b)
