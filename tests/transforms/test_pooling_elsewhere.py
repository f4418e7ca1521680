"""`accumulate_stats` beside a real GradScaler, and `recalibrate` beside what others do."""

import pytest
import torch

import leannorm
from leannorm import nn

LAYERS = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(3),
    "BatchNormAct2d": lambda: nn.BatchNormAct2d(3, act="silu"),
    "ConvBatchNorm2d": lambda: nn.ConvBatchNorm2d(3, 4, 3),
}


def state(layer):
    tensors = layer.named_parameters(), layer.named_buffers()
    return [{name: t.detach().clone() for name, t in of} for of in tensors]


@pytest.mark.parametrize("name", LAYERS)
def test_steps_that_a_grad_scaler_skips(name):
    """One micro-batch is not finite: the step is skipped, and statistics and counter stay."""
    layer, good = LAYERS[name](), torch.randn(16, 3, 6, 5) * 3 + 100
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def step(batches):
        before = state(layer)
        optimizer.zero_grad()
        with leannorm.accumulate_stats(layer):
            for x in batches:
                with torch.autocast("cpu", torch.float16):
                    loss = layer(x).float().square().mean() / len(batches)
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after = state(layer)
        return [
            any(not torch.equal(one[name], other[name]) for name in one)
            for one, other in zip(before, after, strict=True)
        ]

    bad = good.clone()
    bad[1, 0, 0, 0] = torch.inf
    assert step([good, good]) == [True, True]
    assert scaler.get_scale() == 64
    assert step([good, bad, good]) == [False, False]
    assert scaler.get_scale() == 32
    assert step([good]) == [True, True]
    assert int(next(b for n, b in layer.named_buffers() if n.endswith("num_batches_tracked"))) == 2


def test_the_comparison_with_others():
    """What the documentation's table says: means of batches are off, the pooled statistics are not."""
    from benchmarks.recalibrate import by_leannorm, by_torch, digits, errors

    by_class, shuffled = digits()
    sorted_by_class, uneven = list(by_class.split(100)), [*shuffled[:300].split(100), shuffled[300:303]]
    for batches, least in ((sorted_by_class, (1e-3, 1.0)), (uneven, (0.2, 0.4))):
        assert all(off < 1e-6 for off in errors(by_leannorm, batches))
        assert all(off > by for off, by in zip(errors(by_torch, batches), least, strict=True))
