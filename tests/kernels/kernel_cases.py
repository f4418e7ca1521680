"""What the compiled kernels are tried on, and how a call is compared with the reference in float64."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from cases import ChannelCase, make
from torch import Tensor

from leannorm._types import Moments
from leannorm.ops.backends import CPU, REFERENCE
from leannorm.ops.plan import channel_plan, statistics_shape

needs_kernels = pytest.mark.skipif(bool(CPU.why_not()), reason=" ".join(CPU.why_not()))


class Call(NamedTuple):
    """One normalization: its tensors and settings, as every channel verb takes them."""

    x: Tensor
    dy: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    act: str
    groups: int
    out_given: bool

    def double(self) -> Call:
        return self._replace(
            **{k: None if t is None else t.double() for k, t in self._asdict().items() if k in _TENSORS}
        )


def call_on(
    case: ChannelCase,
    dtype: torch.dtype,
    act: str = "relu",
    groups: int = 0,
    residual: bool = False,
    out_given: bool = False,
    mean: float = 0.5,
    affine: bool = True,
) -> Call:
    """A call on random values of a case."""
    channels = case.shape[1]
    return Call(
        make(case, dtype, mean=mean, std=2.0),
        make(case, dtype),
        torch.rand(channels) + 0.5 if affine else None,
        torch.randn(channels) if affine else None,
        make(case, dtype) if residual else None,
        act,
        groups,
        out_given,
    )


_TENSORS = ("x", "dy", "weight", "bias", "residual")


def results(backend: Any, call: Call, statistics: tuple[Tensor, ...] | None = None) -> dict[str, Tensor]:
    """All that the fused and the single verbs return, by name; `statistics` of the forward pass if given."""
    x, dy, weight, bias, residual, act, groups, out_given = call
    y, mean, m2, rstd = backend.channel_forward(x, weight, bias, residual, 1e-5, act, groups)
    mean_used, rstd_used, out = (mean, rstd, y) if statistics is None else statistics
    saved = (x, mean_used, rstd_used, weight, bias, residual, out.to(x.dtype) if out_given else None)
    dx, dweight, dbias, dz = backend.channel_backward(dy, *saved, act, groups, True)
    sum_dz, sum_dz_xhat = backend.channel_grad_sums(dy, *saved, act)
    dx_fixed, _ = backend.channel_input_grad(dy, *saved, None, None, act, False)
    moments = backend.channel_moments(x, groups)
    return {
        "y": y, "mean": mean, "m2": m2, "rstd": rstd, "dx": dx, "dweight": dweight, "dbias": dbias, "dz": dz,
        "sum_dz": sum_dz, "sum_dz_xhat": sum_dz_xhat, "dx_fixed": dx_fixed,
        "moments.mean": moments.mean, "moments.m2": moments.m2,
    }  # fmt: skip


def exact_forward(call: Call) -> dict[str, Tensor]:
    """What the forward pass returns, from sums that are exact: no type is wider than float64 everywhere.

    A deviation from a rounded mean has an error of its own size, not of the mean's, and the deviations' sum
    mends the mean's rounding; `math.fsum` rounds once, so both are right to some 1e-16 at any mean.
    """
    call = call.double()
    plan, means, m2s = channel_plan(call.x.shape, call.groups), [], []
    count = max(plan.outer * plan.inner, 1)
    for values in call.x.reshape(plan).movedim(1, 0).flatten(1).tolist():
        mean = math.fsum(values) / count
        deviations = [v - mean for v in values]
        rest = math.fsum(deviations) / count
        means.append(mean + rest)
        m2s.append(math.fsum([d * d for d in deviations] + [-rest * rest * count]))
    shape = statistics_shape(call.x.shape, call.groups)
    mean, m2 = (call.x.new_tensor(v).reshape(shape) for v in (means, m2s))
    rstd = REFERENCE.rstd_of(Moments(mean, m2, count), 1e-5)
    y = REFERENCE.channel_normalize(call.x, mean, rstd, call.weight, call.bias, call.residual, call.act)
    return {"y": y, "mean": mean, "m2": m2, "rstd": rstd, "moments.mean": mean, "moments.m2": m2}


def assert_close_to_reference(call: Call, backend: Any = CPU) -> None:
    """Each result within twice the reference's own error in this dtype and a rounding of the largest."""
    ours = results(backend, call)
    # the oracle goes back from the same statistics and output: the forward pass's error is its own
    statistics = ours["mean"], ours["rstd"], ours["y"].double()
    exact = results(REFERENCE, call.double(), statistics) | exact_forward(call)
    plain = results(REFERENCE, call, (ours["mean"], ours["rstd"], ours["y"]))
    # what a gradient is made of before its terms cancel
    terms = call.dy.double().abs().amax() * exact["rstd"].amax() if call.dy.numel() else torch.zeros(())
    largest_weight = 1.0 if call.weight is None else call.weight.double().abs().amax()
    # for float64 the oracle of what is not a statistic is no wider, and as far off as ours may be
    eps = torch.finfo(call.x.dtype).eps * (4 if call.x.dtype == torch.float64 else 1)
    samples, channels = call.x.shape[:2]
    values = max(call.x.numel() // max(channels, 1), 1)  # to a gradient's sum
    of_statistic = max(call.x.numel() // max(samples * call.groups, 1), 1) if call.groups else values
    for name, want in exact.items():
        got = ours[name]
        assert got.shape == want.shape, name
        if want.numel() == 0:
            continue
        scale = want.abs().amax()
        if name.endswith("mean"):  # both signs cancel: what is rounded is the values' size
            scale = call.x.double().abs().amax()
        if name in ("dx", "dx_fixed"):
            scale = scale + terms * largest_weight
        if name == "y" and call.x.dtype == torch.float64 and call.x.numel():  # so is its mean's own rounding
            scale = scale + call.x.abs().amax() * exact["rstd"].amax() * largest_weight
        if name.endswith("m2") and call.x.dtype == torch.float64:  # added up in nothing wider
            scale = scale * of_statistic**0.5
        if name.startswith(("sum", "dw", "db")):
            scale = scale + call.dy.double().abs().amax() * values**0.5
        budget = 2 * (plain[name].double() - want).abs().amax() + 2 * eps * scale
        worst = (got.double() - want).abs().amax()
        assert worst <= budget, f"{name}: {worst:.3e} is over {budget:.3e}"
