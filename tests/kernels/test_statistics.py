"""What happens to statistics between two kernels: as one call, and as the plain formulas say."""

import pytest
import torch
from statistics_cases import total_of

from leannorm._types import Channels, ChannelTensors, Moments, Running
from leannorm.ops.backends import REFERENCE

CHANNELS = (0, 1, 7, 33)
F64 = torch.float64


def moments(channels, count=12, scale=1.0):
    return Moments(torch.randn(channels, dtype=F64) * scale, torch.rand(channels, dtype=F64) * count, count)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e8])
def test_sums_are_the_plain_ones(kernels, channels, scale):
    sets = [moments(channels, n, scale) for n in (1, 12, 0, 1000)]
    for one in sets:
        torch.testing.assert_close(kernels.sums_of(one), REFERENCE.sums_of(one), rtol=1e-15, atol=0)
    total = total_of(REFERENCE, sets)
    found, plain = kernels.moments_of(total, 1e-5), REFERENCE.moments_of(total, 1e-5)
    for got, want in zip(found, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-7 * scale**2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("count", [0.0, 24.0])
@pytest.mark.parametrize("channels", CHANNELS)
def test_means_are_the_plain_ones(kernels, dtype, count, channels):
    total = torch.randn(1 + 2 * channels, dtype=F64)
    weight = None if dtype is None else torch.randn(channels).to(dtype)
    given = total, weight, torch.tensor(count, dtype=F64)
    for got, want in zip(kernels.means_of(*given), REFERENCE.means_of(*given), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("count", [0, 1, 12, 2**31, 2**40 + 1])
@pytest.mark.parametrize("channels", CHANNELS)
def test_messages_are_the_plain_ones(kernels, channels, count):
    one, other = torch.randn(4 * channels, dtype=F64), torch.randn(channels, dtype=F64)
    for sums in ([], [one], [one, other], [one, other, one]):
        given = sums, (0xFFFF, 0xFFFE), 1024, count, 512, one.device
        assert torch.equal(kernels.message_of(*given), REFERENCE.message_of(*given))
    found = kernels.message_of([one], (3, 0xFFFF), 0, count, 512, one.device)
    assert found[:7].tolist() == [1, 3, 9, 0xFFFF, 0xFFFF**2, 0, count]
    assert torch.equal(found[7 : 7 + len(one)], one)
    assert found.shape == (512,)
    assert not found[7 + len(one) :].any()


def test_nan_and_nothing(kernels):
    total = torch.zeros(9, dtype=F64)
    total[2] = torch.nan
    for backend in (kernels, REFERENCE):
        mean, m2, rstd, count = backend.moments_of(total, 1.0)
        assert count == 0
        assert mean[0] == m2[0] == 0
        assert rstd[0] == 1
        assert all(v[1].isnan() for v in (mean, m2, rstd))


MOVES = [
    pytest.param(dtype, momentum, count, tracked, id=f"{dtype}-{momentum}-{count}-{tracked}")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    for momentum in (0.1, 0.5, 0.75, 1.0, 0, None)
    for count in (0, 1, 24, torch.tensor(0.0, dtype=F64), torch.tensor(24.0, dtype=F64))
    for tracked in (True, False)
]


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize(("dtype", "momentum", "count", "tracked"), MOVES)
def test_running_statistics_move_as_by_the_plain_formula(kernels, dtype, momentum, count, tracked):
    mean, m2 = torch.randn(33, dtype=F64), torch.rand(33, dtype=F64)
    start = torch.randn(66).to(dtype)[::2], torch.rand(33).to(dtype)
    count = count.to(mean.device) if isinstance(count, torch.Tensor) else count
    ends = []
    for backend in (kernels, REFERENCE):
        buffers = start[0].clone(), start[1].clone(), torch.tensor(3) if tracked else None
        backend.move_running(Running(*buffers, momentum), Moments(mean, m2, count))
        ends.append(buffers)
    assert ends[0][2] == ends[1][2] == ((4 if count > 0 else 3) if tracked else None)
    for got, want in zip(*[end[:2] for end in ends], strict=True):
        # a fused multiply and add, or not: one rounding
        torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps / 4)


TRACKED = [(torch.float32, 0.1), (torch.bfloat16, None), (torch.float64, 1.0)]


@pytest.mark.parametrize(("dtype", "momentum"), TRACKED, ids=str)
@pytest.mark.parametrize("shape", [(6, 5, 3, 3), (4, 5), (0, 5, 2)], ids=str)
def test_a_forward_pass_that_tracks_is_two_calls_in_one(kernels, dtype, momentum, shape):
    x, weight, bias = torch.randn(shape), torch.rand(5), torch.rand(5)
    tensors = ChannelTensors(x, weight, bias, torch.randn(shape))
    norm = Channels(0, 1e-5, "relu", momentum=momentum)
    together, apart = ((torch.randn(5).to(dtype), torch.rand(5).to(dtype), torch.tensor(3)) for _ in range(2))
    for one, other in zip(together, apart, strict=True):
        other.copy_(one)
    *found, _ = kernels.channel_forward(ChannelTensors(*tensors[:4], *together), norm)
    *want, _ = kernels.channel_forward(tensors, norm)
    kernels.move_running(Running(*apart, momentum), Moments(want[1], want[2], x[:, 0].numel()))
    for one, other in zip((*found, *together), (*want, *apart), strict=True):
        assert torch.equal(one, other)


def test_a_buffer_that_does_not_fit_leaves_all_as_they_were(kernels):
    mean, var, batches = torch.zeros(5), torch.ones(4), torch.tensor(3)
    tensors = ChannelTensors(torch.randn(2, 5, 3), None, None, None, mean, var, batches)
    with pytest.raises(RuntimeError, match="one value a channel"):
        kernels.channel_forward(tensors, Channels(0, 1e-5, momentum=0.1))
    assert mean.eq(0).all()
    assert var.eq(1).all()
    assert batches == 3


def test_a_strided_buffer_is_moved_in_place(kernels):
    pair = torch.zeros(5, 2)
    ones = torch.ones(5, dtype=F64)
    kernels.move_running(Running(pair[:, 0], pair[:, 1], None, 1.0), Moments(ones, ones, 2))
    assert torch.equal(pair, torch.ones(5, 2))


@pytest.mark.parametrize("fused", [False, True])
def test_autograd_notices_that_a_buffer_has_moved(kernels, fused):
    mean, var = torch.ones(3), torch.ones(3)
    weight = torch.ones(3, requires_grad=True)
    y = weight * mean
    running, zeros = Running(mean, var, None, 0.1), torch.zeros(3, dtype=F64)
    if fused:
        tensors = ChannelTensors(torch.randn(2, 3), mean=mean, var=var)
        kernels.channel_forward(tensors, Channels(0, 1e-5, momentum=0.1))
    else:
        kernels.move_running(running, Moments(zeros, zeros, 2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_buffers_of_inference_mode_move(kernels):
    with torch.inference_mode():
        mean, var, batches = torch.zeros(3), torch.ones(3), torch.tensor(0)
        zeros = torch.zeros(3, dtype=F64)
        running = Running(mean, var, batches, 0.5)
        kernels.move_running(running, Moments(zeros + 1, zeros, 2))
        assert torch.equal(mean, torch.full((3,), 0.5))
        assert batches == 1
        tensors = ChannelTensors(torch.ones(2, 3), None, None, None, mean, var, batches)
        kernels.channel_forward(tensors, Channels(0, 1e-5, momentum=0.5))
        assert torch.equal(mean, torch.full((3,), 0.75))
        assert batches == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_constants_are_the_plain_ones_and_copies(kernels, dtype):
    mean, var = torch.randn(66).to(dtype)[::2], torch.rand(33).to(dtype)
    found, plain = kernels.constants_of(mean, var, 1e-5), REFERENCE.constants_of(mean, var, 1e-5)
    mean.zero_()
    for got, want in zip(found, plain, strict=True):
        assert torch.equal(got, want)
