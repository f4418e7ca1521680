"""Few rows of many channels, of which the C++ kernels take some neighbouring columns as one set."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, ChannelCase
from kernel_cases import assert_close_to_reference, call_on, needs_kernels, results

from leannorm._types import Channels, ChannelTensors, KeptByChannelNorm
from leannorm.ops.backends import CPU

pytestmark = needs_kernels

# The last set has fewer columns, which end within a vector; blocks of samples; rows that are positions.
FEW = [
    ((64, 1100), 0, "contiguous"), ((128, 600), 0, "contiguous"), ((2, 33000), 0, "contiguous"),
    ((192, 1100), -64, "contiguous"), ((2, 700, 7, 7), 0, "channels_last"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "groups", "layout"), FEW, ids=str)
def test_some_columns_at_a_time(shape, groups, layout, dtype):
    """Means that differ; one channel is constant, and the squares of another leave the range of float16."""
    call = call_on(ChannelCase(shape, layout), dtype, "relu", groups, residual=True)
    x = call.x + torch.randn(shape[1], *[1] * (len(shape) - 2)).to(dtype)
    x[:, 1] = 3
    x[:, -1] *= 1e3
    assert_close_to_reference(call._replace(x=x))


@pytest.mark.parametrize("act", ["relu", "silu"])
@pytest.mark.parametrize(("shape", "groups", "layout"), FEW, ids=str)
def test_threads_change_no_bit(shape, groups, layout, act):
    call = call_on(ChannelCase(shape, layout), torch.float32, act, groups, residual=True)
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.append(results(CPU, call))
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        for name, value in seen[0].items():
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "groups", "layout"), FEW, ids=str)
def test_a_channels_bits_do_not_depend_on_how_many_there_are(shape, groups, layout, dtype):
    """Forward and the input's gradient: of the last channels alone, which are one set, and of all."""
    x, dy, weight, bias, *_ = call_on(ChannelCase(shape, layout), dtype, "relu", groups)
    last = slice(-70, None)

    def both_ways(x, dy, weight, bias):
        norm = Channels(groups, 1e-5, "relu")
        y, mean, m2, rstd, _ = CPU.channel_forward(ChannelTensors(x, weight, bias), norm)
        kept = KeptByChannelNorm(x, mean, rstd, weight, bias, norm=norm)
        return y, mean, m2, rstd, *CPU.channel_backward(dy, kept)[:3]

    def some(t):
        memory = torch.channels_last if t.dim() == 4 else torch.contiguous_format
        return t[..., last].contiguous() if t.dim() == 1 else t[:, last].contiguous(memory_format=memory)

    whole = both_ways(x, dy, weight, bias)
    for part, of in zip(both_ways(*map(some, (x, dy, weight, bias))), whole, strict=True):
        assert torch.equal(part, some(of))
