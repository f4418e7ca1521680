"""Statistics of every so many samples on Triton, interpreted: the reference's numbers, without a copy."""

import pytest
import torch
from kernel_cases import EVERY
from test_launches import counted  # noqa: F401  (a fixture)

from leannorm import nn
from leannorm._types import Channels, ChannelTensors, KeptByChannelNorm
from leannorm.ops.backends import REFERENCE, triton

pytestmark = pytest.mark.skipif(triton._UNAVAILABLE is not None, reason=str(triton._UNAVAILABLE))
F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("kernels", EVERY[1:3], indirect=True)
@pytest.mark.parametrize(
    ("shape", "last"),
    [(s, last) for s in ((6, 5, 4, 3), (8, 16), (6, 3, 40, 1)) for last in {False, len(s) == 4}],
)
def test_the_reference(kernels, shape, last):
    for dtype, act, wanted in ((F32, "silu", True), (BF16, "relu", False)):
        x, dy, residual = (torch.randn(shape).to(dtype) for _ in range(3))
        if last:
            x, dy, residual = (t.to(memory_format=torch.channels_last) for t in (x, dy, residual))
        weight, bias = torch.rand(shape[1]) + 0.5, torch.randn(shape[1])
        found = []
        for backend in (kernels, REFERENCE):
            norm, given = Channels(-2, 1e-5, act), (weight, bias, residual)
            y, mean, m2, rstd, _ = backend.channel_forward(ChannelTensors(x, *given), norm)
            kept = KeptByChannelNorm(x, mean, rstd, *given, norm=norm)
            again = backend.channel_normalize(kept)
            sums = backend.channel_grad_sums(dy, kept)
            grads = backend.channel_backward(dy, kept, wanted)
            alone = backend.channel_moments(x, -2)
            found.append((y, mean, m2, rstd, again, *sums, *grads, alone.mean, alone.m2))
        for got, want in zip(*found, strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                assert got.shape == want.shape
                scale = want.abs().max().item() + 1
                limit = (2 * torch.finfo(got.dtype).eps + 1e-5) * scale
                assert (got.double() - want.double()).abs().max().item() <= limit


def test_it_takes_the_launches_of_batch_norm(counted):  # noqa: F811
    layer, plain = nn.BatchNorm2d(16, group_size=4), nn.BatchNorm2d(16)
    x = torch.empty(16, 16, 64, 64, dtype=BF16, requires_grad=True)
    found = []
    for made in (layer, plain):
        made(x)
        counted.seen.clear()
        made(x)
        found.append([name for name in counted.seen if name.endswith("_kernel") and "move" not in name])
    assert found[0] in (found[1], ["set_forward_kernel"])
