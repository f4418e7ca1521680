"""N ranks with any split of the batch equal one process on the whole batch, to the output's rounding.

Budget of every result: twice the error that one process makes on the whole batch in the same dtype, against
80-bit arithmetic (the larger of torch's BatchNorm's and ours, as either is zero by luck on a small batch),
and one rounding of the largest value.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch
from ranks import ranks
from statistics_cases import BACKENDS, total_of
from sync_cases import Case, random_cases
from torch import nn as torch_nn

from leannorm import functional, nn
from leannorm._types import Moments
from leannorm.report.answers import allowed_error

CASES = 60  # for each of 4 world sizes


def layer_of(case, cls):
    """Parameters and buffers are float64 for float64 input, else float32."""
    channels = case.shapes[0][1]
    layer = cls(
        channels, momentum=case.momentum, affine=case.affine, track_running_stats=case.track_running_stats
    )
    if case.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 1.5, channels))
            layer.bias.copy_(torch.linspace(-1, 1, channels))
    return layer.to(torch.float64 if case.dtype == torch.float64 else torch.float32).train(case.training)


def results(layer, x, dy):
    x = x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad, **{k: v.clone() for k, v in layer.named_buffers()}}
    return found | {f"d{k}": v.grad for k, v in layer.named_parameters()}


def whole(case, cls):
    """A one-process layer on all ranks' values at once; half precision in float32, as torch computes it."""
    dtype = torch.float32 if case.dtype.itemsize == 2 else case.dtype
    return results(
        layer_of(case, cls), case.flat(case.inputs()).to(dtype), case.flat(case.gradients()).to(dtype)
    )


def exactly(case):
    """The formulas in 80-bit floating point, on (C, L)."""
    layer = layer_of(case, torch_nn.BatchNorm1d)
    x, dy = (
        case.flat(t)[0].double().numpy().astype(np.longdouble) for t in (case.inputs(), case.gradients())
    )
    n, means = x.shape[1], {"axis": 1, "keepdims": True}
    mean, var = x.mean(**means), x.var(**means)
    if not case.training:
        mean, var = np.zeros_like(mean), np.ones_like(var)
    rstd = 1 / np.sqrt(var + np.longdouble(1e-5))
    xhat = (x - mean) * rstd
    gamma = layer.weight.detach().double().numpy()[:, None] if case.affine else 1
    beta = layer.bias.detach().double().numpy()[:, None] if case.affine else 0
    dz = dy * gamma
    dx = rstd * dz
    if case.training:
        dx = rstd * (dz - dz.mean(**means) - xhat * (dz * xhat).mean(**means))
    exact = {"y": (xhat * gamma + beta)[None], "dx": dx[None]}
    if case.affine:
        exact |= {"dweight": (dy * xhat).sum(1), "dbias": dy.sum(1)}
    if case.track_running_stats and case.training:
        m = np.longdouble(1 if case.momentum is None else case.momentum)
        exact |= {"running_mean": m * mean[:, 0], "running_var": 1 - m + m * var[:, 0] * n / (n - 1)}
    return exact


def error(found, exact):
    found = found.double().numpy().astype(np.longdouble)
    return float(np.abs(found - exact).max()) if found.size else 0.0


def over_budget(case, mine):
    """The results past their budget, with error and budget; `mine` has one dictionary per rank."""
    exact, yardsticks = exactly(case), [whole(case, cls) for cls in (torch_nn.BatchNorm1d, nn.BatchNorm1d)]
    over = []
    for name, want in exact.items():
        shares = [share[name] for share in mine]
        found, largest = shares[0], np.abs(want).max()
        if name in ("y", "dx"):
            found = case.flat(shares)
        elif name in ("dweight", "dbias"):  # each rank rounds its share
            found = torch.stack(shares).double().sum(0)
            largest = torch.stack(shares).abs().double().sum(0).max().item()
        elif name == "running_mean":  # a sum that may cancel is rounded at the size of what is added
            largest = case.flat(case.inputs()).abs().double().mean().item()
        roundings = 2.0
        if case.dtype == torch.float64:  # no wider statistics: the mean's own rounding shows, mean/std times
            roundings *= 1 + case.offset
        theirs = max(error(yardstick[name], want) for yardstick in yardsticks)
        budget = allowed_error(theirs, shares[0].dtype, float(largest), roundings)
        if error(found, want) > budget:
            over.append((name, error(found, want), budget))
    return over


def one_rank(rank, case):
    layer, x = layer_of(case, nn.SyncBatchNorm), case.inputs()[rank]
    found = results(layer, x, case.gradients()[rank])
    assert found["y"].dtype == found["dx"].dtype == x.dtype
    assert found["y"].numel() == 0 or not case.channels_last or found["y"].stride() == x.stride()
    return found


def run(rank, cases):
    return [one_rank(rank, case) for case in cases]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_split_equals_one_process(world):
    cases = random_cases(world, CASES)
    for case, *mine in zip(cases, *ranks(world, run, cases), strict=True):
        assert not (over := over_budget(case, mine)), (over, case)
        for share in mine[1:]:
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                assert name not in share or torch.equal(share[name], mine[0][name]), (name, case)


def one_rank_is_batch_norm(rank):
    for cls, shape in (
        (nn.BatchNorm1d, (4, 3)),
        (nn.BatchNorm2d, (4, 3, 5, 5)),
        (nn.BatchNorm3d, (2, 3, 2, 5, 5)),
    ):
        torch.manual_seed(0)
        x = torch.randn(shape)
        ours, theirs = nn.SyncBatchNorm(3), cls(3)
        ys = [layer(x) for layer in (ours, theirs)]
        assert torch.equal(*ys)
        assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))


def test_one_rank_or_none_is_batch_norm_to_the_bit():
    one_rank_is_batch_norm(0)
    ranks(1, one_rank_is_batch_norm)


def many_half_values(rank):
    """More values a channel than float16 can count (65,504), on every rank."""
    torch.manual_seed(rank)
    x = torch.randn(2, 1, 256, 256, dtype=torch.float16) + 1
    layer = nn.SyncBatchNorm(1).half()
    y = layer(x)
    return x, y, layer.running_mean


def test_float16_with_more_values_than_it_can_count():
    shares = ranks(2, many_half_values)
    x = torch.cat([share[0] for share in shares]).double()
    y = torch.cat([share[1] for share in shares]).double()
    exact = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()
    assert bool(((y - exact).abs() <= torch.finfo(torch.float16).eps * exact.abs() + 1e-7).all())


def exact_m2(values):
    values = [Fraction(v) for v in values.tolist()]
    mean = sum(values) / len(values)
    return float(sum((v - mean) ** 2 for v in values))


@pytest.mark.parametrize("sets", [1, 2, 64])
@pytest.mark.parametrize("ratio", [0, 1e2, 1e4, 1e6])
def test_sums_keep_the_variance_of_a_large_mean(sets, ratio):
    """mean/std = ratio: plain float64 sums lose ratio**2 roundings, these 2**11 times fewer."""
    torch.manual_seed(0)
    xs = [torch.randn(20, dtype=torch.float64) + ratio for _ in range(sets)]
    local = [
        Moments(x.mean(0, keepdim=True), torch.tensor([exact_m2(x)], dtype=torch.float64), 20) for x in xs
    ]
    exact = exact_m2(torch.cat(xs))
    # the local means are rounded as well: ratio roundings, whatever the sums do
    bound = torch.finfo(torch.float64).eps * (4 + 2 * ratio + sets**0.5 * ratio**2 / 2**11)
    for backend in BACKENDS:
        _, m2, _, _ = backend.moments_of(total_of(backend, local), 1e-5)
        assert abs(float(m2) - exact) / exact <= bound


def test_the_function_is_the_layer():
    x = torch.randn(4, 3, 5)
    mean, var = torch.zeros(3), torch.ones(3)
    layer = nn.SyncBatchNorm(3)
    y = functional.sync_batch_norm(x, mean, var, layer.weight, layer.bias, training=True)
    assert torch.equal(y, layer(x))
    assert torch.equal(mean, layer.running_mean)
    assert torch.equal(var, layer.running_var)


def test_cases_are_many():
    assert sum(len(random_cases(world, CASES)) for world in (1, 2, 3, 4)) >= 200
    assert isinstance(random_cases(2, 1)[0], Case)
