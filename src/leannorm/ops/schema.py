"""The schema and the fake of every operator that has kernels; the backends register the kernels.

`groups` is 0 for statistics of the batch, G of each sample's G groups of channels, -B of every B samples.

The verbs mean what `ops/backends/reference.py` computes. Per-channel statistics (mean, m2, rstd, sums,
p, q) are float64; per-row statistics have the compute dtype. An output keeps its input's dtype and, where
that is dense, its layout. `act` is a name of `ops/activation.py`; `out` is the forward pass's output,
given where the derivative is computed from it. `dz` (the residual's gradient) and `total` (input plus
residual) are empty tensors where there is no residual, since an op may not return its own input. `dweight`
and `dbias` have the dtypes of `gradient_dtype` and `row_gradient_dtype`; of a row they are empty where they
are not wanted, and `dbias` of RMS norm always is.
Callers hand in tensors that are contiguous or channels_last, all of one layout.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from leannorm.ops.plan import row_statistics_shape, statistics_shape
from leannorm.ops.precision import compute_dtype, gradient_dtype, row_gradient_dtype, statistics_dtype

LIBRARY = torch.library.Library("leannorm", "DEF")

_SCHEMAS = (
    "channel_moments(Tensor x, int groups) -> (Tensor mean, Tensor m2)",
    "channel_normalize(Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor? residual,"
    " str act) -> Tensor",
    "channel_grad_sums(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " Tensor? residual, Tensor? out, str act) -> (Tensor sum_dz, Tensor sum_dz_xhat)",
    "channel_input_grad(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " Tensor? residual, Tensor? out, Tensor? p, Tensor? q, str act, bool want_dz) -> (Tensor dx, Tensor dz)",
    "channel_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, str act,"
    " int groups) -> (Tensor y, Tensor mean, Tensor m2, Tensor rstd)",
    "channel_forward_tracked_(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, str act,"
    " Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!)? num_batches, float? momentum)"
    " -> (Tensor y, Tensor mean, Tensor m2, Tensor rstd)",
    "channel_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " Tensor? residual, Tensor? out, str act, int groups, bool want_dz)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dz)",
    "channel_backward_(Tensor dy, Tensor(a!) x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " Tensor? residual, Tensor? out, str act, int groups, bool want_dz)"
    " -> (Tensor dweight, Tensor dbias, Tensor dz)",
    "row_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int start, int stop, float eps,"
    " bool rms) -> (Tensor y, Tensor total, Tensor mean, Tensor rstd)",
    "row_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, int start,"
    " int stop, bool rms, bool want_affine) -> (Tensor dx, Tensor dweight, Tensor dbias)",
)

OPERATORS = tuple(LIBRARY.define(_schema) for _schema in _SCHEMAS)

# steps on statistics between two kernels (ops/sums.py, ops/running.py), one operator each
_BETWEEN = (
    "move_running_(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!)? num_batches, float? momentum,"
    " Tensor mean, Tensor m2, int count, Tensor? total_count) -> ()",
    "constants_of(Tensor running_mean, Tensor running_var, float eps) -> (Tensor mean, Tensor rstd)",
    "sums_of(Tensor mean, Tensor m2, int count) -> Tensor",
    "moments_of(Tensor total, float eps) -> (Tensor mean, Tensor m2, Tensor rstd, Tensor count)",
    "means_of(Tensor total, Tensor? weight, Tensor count) -> (Tensor p, Tensor q)",
)
BETWEEN = tuple(LIBRARY.define(_schema) for _schema in _BETWEEN)
SCHEMAS = _SCHEMAS + _BETWEEN
# the operators by name; looking up the overload at every call would cost time
OPS = SimpleNamespace(**{name: getattr(torch.ops.leannorm, name).default for name in (*OPERATORS, *BETWEEN)})


def _statistics(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.new_empty(shape, dtype=statistics_dtype(x))


def _none(x: Tensor) -> Tensor:
    return x.new_empty(0)


def _dz(x: Tensor, wanted: bool) -> Tensor:
    return torch.empty_like(x) if wanted else _none(x)


Fake = TypeVar("Fake", bound=Callable[..., object])


def _fake(name: str) -> Callable[[Fake], Fake]:
    return cast(Callable[[Fake], Fake], torch.library.register_fake(f"leannorm::{name}", lib=LIBRARY))


@_fake("channel_moments")
def _(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    shape = statistics_shape(x.shape, groups)
    return _statistics(x, shape), _statistics(x, shape)


@_fake("channel_normalize")
def _(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


@_fake("channel_grad_sums")
def _(dy: Tensor, x: Tensor, mean: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = (x.shape[1],) if mean.dim() == 1 else (mean.shape[0], x.shape[1])
    return _statistics(x, shape), _statistics(x, shape)


@_fake("channel_input_grad")
def _(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, want_dz = rest
    return torch.empty_like(x), _dz(x, want_dz)


@_fake("channel_forward")
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, groups = rest
    mean, m2, rstd = (_statistics(x, statistics_shape(x.shape, groups)) for _ in range(3))
    return torch.empty_like(x), mean, m2, rstd


@_fake("channel_forward_tracked_")
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, m2, rstd = (_statistics(x, (x.shape[1],)) for _ in range(3))
    return torch.empty_like(x), mean, m2, rstd


@_fake("channel_backward")
def _(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(x), *_in_place(dy, x, *rest)


@_fake("channel_backward_")
def _in_place(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, weight, *_, want_dz = rest
    dweight, dbias = (x.new_empty(x.shape[1], dtype=gradient_dtype(x, weight)) for _ in range(2))
    return dweight, dbias, _dz(x, want_dz)


@_fake("row_forward")
def _(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, start, stop, *_ = rest
    shape = row_statistics_shape(x.shape, start, stop)
    mean, rstd = (x.new_empty(shape, dtype=compute_dtype(x)) for _ in range(2))
    return torch.empty_like(x), _none(x) if residual is None else torch.empty_like(x), mean, rstd


@_fake("row_backward")
def _(dy: Tensor, dtotal: Tensor | None, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, weight, start, stop, rms, want_affine = rest

    def affine(wanted: bool) -> Tensor:
        return x.new_empty(x.shape[start:stop] if wanted else 0, dtype=row_gradient_dtype(x, weight))

    return torch.empty_like(x), affine(want_affine), affine(want_affine and not rms)


@_fake("move_running_")
def _(*given: Any) -> None:
    return None


@_fake("constants_of")
def _(running_mean: Tensor, running_var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    mean, rstd = (_statistics(running_mean, tuple(running_mean.shape)) for _ in range(2))
    return mean, rstd


@_fake("sums_of")
def _(mean: Tensor, m2: Tensor, count: int) -> Tensor:
    return mean.new_empty(4 * mean.numel())


@_fake("moments_of")
def _(total: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, m2, rstd = (total.new_empty(total.numel() // 4) for _ in range(3))
    return mean, m2, rstd, total.new_empty(())


@_fake("means_of")
def _(total: Tensor, weight: Tensor | None, count: Tensor) -> tuple[Tensor, Tensor]:
    p, q = (total.new_empty(total.numel() // 2) for _ in range(2))
    return p, q
