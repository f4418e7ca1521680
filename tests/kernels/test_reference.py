"""The verbs by themselves: plans, moments and their merge, activations and their derivatives."""

import pytest
import torch
from cases import ACTS, EMPTY
from statistics_cases import BACKENDS, total_of

from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends import REFERENCE
from leannorm.ops.plan import channel_plan, row_plan, row_statistics_shape, statistics_shape

PLANS = [
    (channel_plan((8, 3, 4, 5)), (8, 3, 20)),
    (channel_plan((8, 3)), (8, 3, 1)),
    (channel_plan((8, 6, 4, 5), groups=2), (1, 16, 60)),
    (channel_plan((8, 6, 4), groups=6), (1, 48, 4)),
    (row_plan((8, 3, 4, 5), 1, 2), (8, 3, 20)),
    (row_plan((8, 3, 4, 5), 2, 4), (24, 20, 1)),
    (statistics_shape((8, 6, 4)), (6,)),
    (statistics_shape((8, 6, 4), groups=2), (8, 2)),
    (row_statistics_shape((8, 3, 4, 5), 1, 2), (8, 1, 4, 5)),
]


@pytest.mark.parametrize(("plan", "want"), PLANS)
def test_plans(plan, want):
    assert tuple(plan) == want


@pytest.mark.parametrize("groups", [0, 1, 2, 6])
@pytest.mark.parametrize(
    ("dtype", "mean"), [(torch.float32, 0.0), (torch.float32, 1e4), (torch.float64, 0.0)]
)
def test_moments_are_the_definition(groups, mean, dtype):
    x = (torch.randn(5, 6, 7, 8, dtype=torch.float64) + mean).to(dtype)
    got = REFERENCE.channel_moments(x, groups)
    folded = x.double().reshape(channel_plan(x.shape, groups))
    var, want = torch.var_mean(folded, (0, 2), correction=0)
    # the oracle is no wider than float64 and rounds its own large mean
    tolerance = 4 * torch.finfo(dtype).eps * (max(mean, 1.0) if dtype == torch.float64 else 1.0)
    assert got.mean.dtype == torch.float64
    # the mean is exact to the rounding of one deviation, however far from zero it lies
    torch.testing.assert_close(got.mean.flatten(), want, rtol=0, atol=tolerance)
    torch.testing.assert_close(got.m2.flatten() / got.count, var, rtol=tolerance, atol=0)


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_moments_of_nothing_are_zero(shape):
    got = REFERENCE.channel_moments(torch.ones(shape))
    assert got.count == 0
    assert torch.equal(got.mean, torch.zeros(shape[1], dtype=torch.float64))
    assert torch.equal(got.m2, got.mean)


@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_merge_of_parts_is_the_whole(mean):
    x = torch.randn(30, 4, 5) + mean
    parts = [REFERENCE.channel_moments(part) for part in x.split([1, 9, 0, 20])]
    want = REFERENCE.channel_moments(x)
    for backend in BACKENDS:
        got_mean, m2, _, count = backend.moments_of(total_of(backend, parts), 1e-5)
        assert count == 150
        torch.testing.assert_close(got_mean, want.mean, rtol=1e-10, atol=1e-7)
        torch.testing.assert_close(m2, want.m2, rtol=1e-6, atol=0)


KINKS = (-3.0, -1.0, 0.0, 1.0, 3.0, 6.0)


@pytest.mark.parametrize("act", ACTS)
def test_derivatives_are_autograds_at_kinks_too(act):
    forward, grad, from_output, *_ = ACTIVATIONS[act]
    z = torch.cat((torch.randn(200, dtype=torch.float64) * 4, torch.tensor(KINKS, dtype=torch.float64)))
    z.requires_grad_()
    y = forward(z)
    (want,) = torch.autograd.grad(y.sum(), z)
    torch.testing.assert_close(grad(z).detach(), want)
    if from_output is not None:
        torch.testing.assert_close(from_output(y).detach(), want)


@pytest.mark.parametrize("act", ACTS)
def test_derivatives_can_be_differentiated(act):
    z = torch.randn(20, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(ACTIVATIONS[act].grad, z)


def test_fresh_memory_is_poisoned():
    """Else no test would see an output that a kernel forgot to write."""
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.ones(2, 3, dtype=torch.bfloat16)).isnan().all()
