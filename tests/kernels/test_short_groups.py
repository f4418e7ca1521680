"""Short groups, of which the C++ kernels take several as one set; what is kept between two passes."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, ChannelCase
from kernel_cases import assert_close_to_reference, call_on, needs_kernels, results

from leannorm.ops.backends import CPU

pytestmark = needs_kernels

# Sets of several samples, the last of fewer; of one; of a part of its groups, the last of fewer.
SHORT = [
    ((5, 6, 3, 3), 2), ((300, 6, 2, 2), 3), ((70, 7, 3, 3), 7), ((90, 12, 5), 12), ((3, 40, 5, 11), 8),
    ((2, 96, 6, 6), 32), ((2, 256, 7, 7), 64), ((2, 250, 7, 7), 50),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "groups"), SHORT, ids=str)
def test_several_groups_at_a_time(shape, groups, dtype):
    """Samples that differ; one channel is constant, which with a group to itself has no variance."""
    call = call_on(ChannelCase(shape, "contiguous"), dtype, "silu", groups, residual=True)
    x = call.x + torch.randn(*shape[:2], *[1] * (len(shape) - 2)).to(dtype)
    x[1, 1] = 3
    assert_close_to_reference(call._replace(x=x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "groups"), SHORT, ids=str)
def test_a_samples_bits_do_not_depend_on_the_others(shape, groups, dtype):
    """Not even where their squares leave the range, or they hold what is no number, or all the same."""
    call = call_on(ChannelCase(shape, "contiguous"), dtype, "silu", groups, residual=True)
    call.x[0, 0] = 7
    call.x[0, -1, 0] = float("nan")
    call.x[0, 1] *= 3e4 if dtype == torch.float16 else 1e30
    call.x[0, 2, 0] = 3e4
    whole = results(CPU, call)
    for samples in (slice(1, 2), slice(1, None), slice(-1, None)):
        part = {
            name: value[samples].contiguous()
            for name, value in call._asdict().items()
            if isinstance(value, torch.Tensor) and value.dim() > 1
        }
        for name, value in results(CPU, call._replace(**part)).items():
            if name not in ("dweight", "dbias"):  # which are sums over the samples
                assert torch.equal(value, whole[name][samples]), name


KEPT = [  # the last two: written past the caches
    ((3, 24, 9, 7), 4),
    ((2, 6, 133, 5), 2),
    ((6, 50, 17, 17), 0),
    ((40, 8, 101, 71), 2),
    ((20, 260, 31, 33), 0),
]


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("act", ["silu", "gelu", "leaky_relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "groups"), KEPT, ids=str)
def test_what_the_sums_leave_for_the_gradient(shape, groups, dtype, act):
    """In one call it is kept, where a set is small enough; in two calls it is computed anew.

    Large results are written past the caches, from planes that begin anywhere in a line.
    """
    call = call_on(ChannelCase(shape, "contiguous"), dtype, act, groups, residual=True)
    y, mean, _, rstd, _ = CPU.channel_forward(call.tensors, call.norm)
    kept = call.kept(mean, rstd, y if act == "leaky_relu" else None)
    dx, _, _, dz = CPU.channel_backward(call.dy, kept, True)
    values = call.x.numel() // mean.numel()
    scaled = [call.weight * s / values for s in CPU.channel_grad_sums(call.dy, kept)]
    means = tuple(s.unflatten(1, (groups, -1)).sum(2) if groups else s for s in scaled)
    want, want_dz = CPU.channel_input_grad(call.dy, kept, means, True)
    assert torch.equal(dz, want_dz)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(dx, want, rtol=2 * eps, atol=4e-6)
