"""The equalities that the layers promise, measured on this machine, each against its error budget.

The budget is twice the error of torch's operation in the same dtype against float64, plus one rounding of the
result. Where two paths of leannorm must agree bit for bit, it is 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leannorm import functional, nn
from leannorm.ops.select import picks_aten
from leannorm.report.answers import error_of, largest_error, with_gradients

# The step of the central differences in float64, and their relative budget; their own error is about 1e-9.
_GRADCHECK_STEP = 1e-6


class OursAndTorchs(NamedTuple):
    """A norm of (x, weight, bias), twice."""

    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]


BATCH_NORM = OursAndTorchs(
    lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
    lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
)
LAYER_NORM = OursAndTorchs(
    lambda x, w, b: functional.layer_norm(x, w.shape, w, b), lambda x, w, b: F.layer_norm(x, w.shape, w, b)
)


class Check(NamedTuple):
    """One equality: the largest error measured, what is allowed, and what it was measured against.

    `detail` says what is wrong, if more is known than the error.
    """

    name: str
    error: float
    budget: float
    against: str
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.budget


def run_checks(seed: int = 0) -> Iterator[Check]:
    """Run all checks, one after the other; torch's random state is restored.

    >>> all(check.passed for check in run_checks())
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield from _three_ways(
            "batch norm",
            BATCH_NORM,
            lambda x, w, b: _normalized(x, (0, 2, 3)) * _per_channel(w) + _per_channel(b),
            (8, 3, 20, 20),
            features=3,
        )
        for momentum in (0.1, None):
            yield from _running_statistics(momentum)
        yield _untracked()
        yield from _three_ways(
            "layer norm", LAYER_NORM, lambda x, w, b: _normalized(x, (-1,)) * w + b, (32, 10, 64), features=64
        )
        for eps_mode in ("inside", "outside"):
            layer = nn.ConvBatchNorm2d(2, 3, 3, padding=1, eps=1e-3, eps_mode=eps_mode, dtype=torch.float64)
            yield _gradcheck(f"conv-BN gradcheck, eps {eps_mode}", layer, torch.rand(2, 2, 4, 4).double())
        yield from _fused_against_unfused()


def _within(name: str, ours: Tensor, torchs: Tensor, exact: Tensor) -> Check:
    error = error_of(ours.detach(), exact.detach(), largest_error(torchs, exact))
    return Check(name, error.largest, error.allowed, "float64")


def largest_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[float, float]:
    """The largest |a - b| over pairs of tensors, and the largest over max |b| of the same pair.

    NaN anywhere gives NaN, which is within no budget.

    >>> largest_difference([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 4.0])])
    (2.0, 0.5)
    """
    absolute, relative = [torch.zeros((), dtype=torch.float64)], [torch.zeros((), dtype=torch.float64)]
    for a, b in zip(ours, theirs, strict=True):
        if a.numel():
            off = (a.detach().double() - b.detach().double()).abs().max()
            absolute.append(off)
            relative.append(off if off == 0 else off / b.detach().double().abs().max())
    return float(torch.stack(absolute).max()), float(torch.stack(relative).max())


def _three_ways(
    name: str, both: OursAndTorchs, formula: Callable[..., Tensor], shape: tuple[int, ...], features: int
) -> Iterator[Check]:
    """Check output and gradients of (x, weight, bias), ours and torch's, against the formula in float64."""
    inputs = torch.randn(shape), torch.rand(features) + 0.5, torch.randn(features)
    dy = torch.randn_like(inputs[0])
    leaves = [v.requires_grad_() for v in inputs]
    exact = with_gradients(formula, [v.detach().double().requires_grad_() for v in inputs], dy)
    parts = ("forward", "gradient of the input", "gradient of weight", "gradient of bias")
    measured = zip(*(with_gradients(run, leaves, dy) for run in both), exact, strict=True)
    for part, results in zip(parts, measured, strict=True):
        yield _within(f"{name}, {part}", *results)


def _normalized(x: Tensor, dims: Sequence[int], eps: float = 1e-5) -> Tensor:
    variance, mean = torch.var_mean(x, tuple(dims), correction=0, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps)


def _per_channel(v: Tensor) -> Tensor:
    return v[:, None, None]


def _running_statistics(momentum: float | None) -> Iterator[Check]:
    """Running statistics after ten batches, and evaluation by them."""
    ours, torchs = nn.BatchNorm2d(3, momentum=momentum), torch.nn.BatchNorm2d(3, momentum=momentum)
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for batch in range(1, 11):
        x = torch.randn(8, 3, 20, 20) * 2 + 1
        ours(x)
        torchs(x)
        factor = 1 / batch if momentum is None else momentum
        batch_var, batch_mean = torch.var_mean(x.double(), (0, 2, 3), correction=1)
        mean, var = mean + factor * (batch_mean - mean), var + factor * (batch_var - var)
    label = f"10 batches, momentum {momentum}"
    for name, exact in (("running_mean", mean), ("running_var", var)):
        yield _within(f"{name} after {label}", getattr(ours, name), getattr(torchs, name), exact)
    x = torch.randn(8, 3, 20, 20)
    exact = (x.double() - _per_channel(mean)) / torch.sqrt(_per_channel(var) + 1e-5)
    yield _within(f"evaluation after {label}", ours.eval()(x), torchs.eval()(x), exact)


def _untracked() -> Check:
    """Evaluation without running statistics normalizes by the batch's statistics."""
    x = torch.randn(8, 3, 20, 20) * 2 + 1
    ours = nn.BatchNorm2d(3, track_running_stats=False).eval()(x)
    torchs = torch.nn.BatchNorm2d(3, track_running_stats=False).eval()(x)
    exact = _normalized(x.double(), (0, 2, 3))
    return _within("evaluation, track_running_stats=False", ours, torchs, exact)


def _gradcheck(name: str, layer: torch.nn.Module, x: Tensor) -> Check:
    """Central differences of a random projection of the output, for the input and every parameter."""
    x.requires_grad_()
    leaves = [x, *layer.parameters()]
    projection = torch.randn_like(layer(x))
    analytic = torch.autograd.grad((layer(x) * projection).sum(), leaves)
    numeric = [_central_differences(lambda: float((layer(x) * projection).sum()), leaf) for leaf in leaves]
    budget = _GRADCHECK_STEP * max(float(n.abs().max()) for n in numeric)
    return Check(name, largest_difference(analytic, numeric)[0], budget, "central differences")


@torch.no_grad()
def _central_differences(value: Callable[[], float], leaf: Tensor) -> Tensor:
    numeric, flat = torch.empty_like(leaf).flatten(), leaf.view(-1)
    for i in range(leaf.numel()):
        before = float(flat[i])
        flat[i] = before + _GRADCHECK_STEP
        above = value()
        flat[i] = before - _GRADCHECK_STEP
        numeric[i] = (above - value()) / (2 * _GRADCHECK_STEP)
        flat[i] = before
    return numeric.view_as(leaf)


def _fused_against_unfused() -> Iterator[Check]:
    """Bit for bit; where torch's own operator computes the unfused norm, as exact as that."""
    fused = nn.ConvBatchNorm2d(8, 16, 3)
    conv, norm = torch.nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16)
    conv.weight.data.copy_(fused.conv.weight.detach())
    x, dy = torch.randn(4, 8, 14, 14), torch.randn(4, 16, 12, 12)
    exact = copy.deepcopy(conv).double(), copy.deepcopy(norm).double()
    made = [_of_conv_norm(fused, fused.conv, fused.bn, x, dy)]
    for pair in ((conv, norm), exact):
        of = pair[0].weight.dtype
        made.append(_of_conv_norm(torch.nn.Sequential(*pair), *pair, x.to(of), dy.to(of)))
    names = "output", "gradient of the input", "gradient of the filters", "gradient of weight", "running_var"
    for name, ours, unfused, in_float64 in zip(names, *made, strict=True):
        if picks_aten(x):
            yield _within(f"conv-BN fused, {name}", ours, unfused, in_float64)
        else:
            yield Check(f"conv-BN fused, {name}", largest_error(ours, unfused), 0.0, "unfused")


def _of_conv_norm(run: torch.nn.Module, conv: Any, norm: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The output, the gradients of x, filters and the norm's weight, and the running variance."""
    y, *gradients = with_gradients(lambda x, *_: run(x), [x.requires_grad_(), conv.weight, norm.weight], dy)
    return [y, *gradients, norm.running_var]
