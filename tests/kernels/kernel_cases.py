"""One table for every backend's kernels: what each is tried on, and how it is compared in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from cases import ACTS, CASES, DTYPES, ChannelCase, make
from torch import Tensor

from leannorm._types import Channels, ChannelTensors, KeptByChannelNorm, Moments
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends import CPU, REFERENCE, Backend
from leannorm.ops.plan import channel_plan, statistics_shape
from leannorm.report.answers import allowed_error, largest_error

needs_kernels = pytest.mark.skipif(bool(CPU.why_not()), reason=" ".join(CPU.why_not()))
# the same backend, told to give a small input what a large one gets
SEVERAL = "triton, several launches"
EVERY = ("cpu", "triton", SEVERAL, "aten")


def tried(names: str, rows: Mapping[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Each backend with its own rows, as the parameters `kernels` and `names`."""
    each = [(backend, row if "," in names else (row,)) for backend, of in rows.items() for row in of]
    params = [pytest.param(b, *row, id="-".join([b, *(str(v) for v in row)])) for b, row in each]
    return pytest.mark.parametrize(f"kernels, {names}", params, indirect=["kernels"])


def alike(backends: Iterable[str], rows: Iterable[Any]) -> dict[str, list[Any]]:
    """The same rows for each of these backends."""
    rows = list(rows)
    return dict.fromkeys(backends, rows)


def on_every(names: str, *rows: Any) -> pytest.MarkDecorator:
    """All of the rows on all backends."""
    return tried(names, alike(EVERY, rows))


class Given(NamedTuple):
    """What the verbs are called with."""

    case: ChannelCase
    dtype: torch.dtype = torch.float32
    act: str = "relu"
    groups: int = 0
    residual: bool = False
    out_given: bool = False

    def __str__(self) -> str:
        words = [str(self.case), str(self.dtype).removeprefix("torch."), self.act]
        words += [f"{self.groups} groups"] * bool(self.groups)
        return "-".join(words + ["residual"] * self.residual + ["out"] * self.out_given)


F32, F64, BF16, F16 = DTYPES[0], DTYPES[3], DTYPES[1], DTYPES[2]
SIZES = (1, 7, 8, 15, 16, 17, 4095, 4097)
LARGE = 9  # samples of the cases that an interpreter takes minutes for
# several tiles to a program, and several programs to a channel, without being told
MANY = [Given(ChannelCase((9, 3, 24, 24))), Given(ChannelCase((9, 3, 24, 24), "channels_last"), F16)]


def _cases(pairs: Iterable[tuple[torch.dtype, Any]], largest: int) -> list[Given]:
    """Every case with these dtypes and groups (-1: as many as channels), but for those of one value."""
    found = []
    for case in CASES:
        for dtype, groups in pairs:
            groups = case.shape[1] if groups < 0 else groups
            values = math.prod(case.shape[1:]) // (groups or 1)
            if case.shape[0] < largest and (groups == 0 or values > 1):
                found.append(Given(case, dtype, groups=groups))
    return found


def _sizes(size: int) -> list[Given]:
    shapes = [(size, 2), (2, size), (2, 3, size), (2, size, 3), (size, 3, 2), (1, 2, size), (1, size, 2)]
    found = [Given(ChannelCase(shape, layout)) for shape in shapes for layout in ("contiguous", "offset")]
    return [*found, Given(ChannelCase((1, size, 2, 2), "channels_last"), BF16)]


_SMALL_SIZES = [Given(ChannelCase(s)) for n in (1, 7, 16, 17) for s in ((n, 2), (2, n, 3), (2, 3, n))]
_GROUPS = [
    Given(ChannelCase((2, 6, 3, 7), layout), F16, "silu", groups, True)
    for groups, layout in ((1, "contiguous"), (3, "contiguous"), (3, "channels_last"), (6, "channels_last"))
]
_ACTS = [
    Given(ChannelCase((3, 5, 5, 7), layout), dtype, act, 0, residual, out_given)
    for act in ACTS
    for dtype in (F32, F64)
    for layout in ("contiguous", "channels_last")
    for residual in (False, True)
    for out_given in (False, True)
]
# an interpreter takes its time: each activation once by one launch, once by several
_PLAIN_ACTS = [Given(ChannelCase((2, 3, 3, 4)), F32, act) for act in ACTS]
_ADDED_ACTS = [Given(ChannelCase((2, 3, 3, 4), "channels_last"), F64, act, 0, True) for act in ACTS]
_TOLD_ACTS = [
    Given(ChannelCase((2, 3, 4, 5), "channels_last"), BF16, act, 0, True, True)
    for act in ACTS
    if ACTIVATIONS[act].from_output is not None
]
_EVERY_PAIR = [(dtype, groups) for dtype in DTYPES for groups in (0, 1, -1) if not groups or dtype != F64]
CHANNEL: dict[str, list[Given]] = {
    "cpu": _cases(_EVERY_PAIR, 100) + MANY + _GROUPS + _ACTS + [g for size in SIZES for g in _sizes(size)],
    "triton": _cases([(F32, 0), (BF16, 1), (F32, -1)], LARGE) + MANY + _GROUPS + _PLAIN_ACTS + _SMALL_SIZES,
    "aten": _cases(_EVERY_PAIR, 100) + _GROUPS + _ACTS + [g for size in SIZES for g in _sizes(size)],
    SEVERAL: _GROUPS + _ADDED_ACTS + _TOLD_ACTS + _SMALL_SIZES,
}


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

    @property
    def tensors(self) -> ChannelTensors:
        return ChannelTensors(self.x, self.weight, self.bias, self.residual)

    @property
    def norm(self) -> Channels:
        return Channels(self.groups, 1e-5, self.act)

    def kept(
        self, mean: Tensor, rstd: Tensor, output: Tensor | None = None, **more: Any
    ) -> KeptByChannelNorm:
        of_norm = self.weight, self.bias, self.residual
        return KeptByChannelNorm(self.x, mean, rstd, *of_norm, output, **{"norm": self.norm} | more)

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
) -> Call:
    """A call on random values of a case."""
    channels = case.shape[1]
    return Call(
        make(case, dtype, mean=0.5, std=2.0),
        make(case, dtype),
        torch.rand(channels) + 0.5,
        torch.randn(channels),
        make(case, dtype) if residual else None,
        act,
        groups,
        out_given,
    )


_TENSORS = ("x", "dy", "weight", "bias", "residual")


def results(backend: Backend, call: Call, statistics: tuple[Tensor, ...] | None = None) -> dict[str, Tensor]:
    """All that the fused and the single verbs return, by name; `statistics` of the forward pass if given."""
    x, dy, groups = call.x, call.dy, call.groups
    y, mean, m2, rstd, _ = backend.channel_forward(call.tensors, call.norm)
    mean_used, rstd_used, out = (mean, rstd, y) if statistics is None else statistics
    kept = call.kept(mean_used, rstd_used, out.to(x.dtype) if call.out_given else None)
    dx, dweight, dbias, dz = backend.channel_backward(dy, kept, True)
    sum_dz, sum_dz_xhat = backend.channel_grad_sums(dy, kept)
    dx_fixed, _ = backend.channel_input_grad(dy, kept)
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
    y = REFERENCE.channel_normalize(call.kept(mean, rstd))
    return {"y": y, "mean": mean, "m2": m2, "rstd": rstd, "moments.mean": mean, "moments.m2": m2}


def assert_close_to_reference(call: Call, backend: Backend = CPU) -> None:
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
    roundings = 16 if call.x.dtype == torch.float64 else 4
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
        plains = largest_error(plain[name], want)
        budget = allowed_error(plains, call.x.dtype, float(scale), roundings)
        worst = largest_error(got, want)
        assert worst <= budget, f"{name}: {worst:.3e} is over {budget:.3e}"
