"""The schema and the fake of every operator that has kernels; the backends register the kernels.

`groups` is 0 for statistics of the batch, G of each sample's G groups of channels, -B of every B samples.
`mask` of a per-channel norm is bool (samples, positions), contiguous: positions that are False are not read,
and get zeros; groups of samples take none. `count`, float64 () or (samples, 1), is the number of values that
it leaves to each statistic.

The verbs are defined by `ops/backends/reference.py`. Per-channel statistics (mean, m2, rstd, sums and means
of gradients) are float64; per-row statistics have the compute dtype. An output keeps its input's dtype and,
if that is dense, its layout. `act` is a name of `ops/activation.py`; `out` is the forward pass's output,
given if the derivative is computed from it. With `constant` no gradient goes through the statistics, as in
evaluation. Results that were not requested are None: `count` without a mask, `dz` (the residual's gradient);
`total` (input plus residual) is empty without a residual. `dweight` and `dbias` have the dtypes of
`gradient_dtype` and `row_gradient_dtype`; for row norms they are empty if not requested. `valid` of a row
norm is bool, contiguous, with an entry for each row in the order of the statistics: rows that are False are
not read, and get zeros.

The weight and the bias of a row norm are one row, or lines (groups, row), each for as many consecutive rows,
of the compute dtype; so is `gate`, a factor of the residual. A line per row may have the dtype of x. The
gradient of lines is lines of their dtype; of one line per row `dbias` would be dy, and is empty. Rows of a
call with lines or a gate are contiguous. `residual` of a backward pass is given if `dgate` is requested.

Callers pass tensors that are contiguous or
channels_last, all of one layout, except to `ANY_LAYOUT`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from leannorm.ops.plan import row_statistics_shape, statistics_shape
from leannorm.ops.precision import compute_dtype, gradient_dtype, row_gradient_dtype, statistics_dtype

LIBRARY = torch.library.Library("leannorm", "DEF")

# x to out are the first fields of `KeptByChannelNorm`, in their order
_SCHEMAS = (
    "channel_moments(Tensor x, int groups, Tensor? mask=None) -> (Tensor mean, Tensor m2, Tensor count)",
    "channel_normalize(Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor? residual,"
    " str act, Tensor? mask=None) -> Tensor",
    "channel_grad_sums(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " Tensor? residual, Tensor? out, str act, Tensor? mask=None) -> (Tensor sum_dz, Tensor sum_dz_xhat)",
    "channel_input_grad(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " Tensor? residual, Tensor? out, Tensor? mean_dz, Tensor? mean_dz_xhat, str act, bool want_dz,"
    " Tensor? mask=None) -> (Tensor dx, Tensor dz)",
    "channel_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, str act,"
    " int groups, Tensor? mask=None) -> (Tensor y, Tensor mean, Tensor m2, Tensor rstd, Tensor count)",
    "channel_forward_tracked_(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, str act,"
    " Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!)? num_batches, float? momentum)"
    " -> (Tensor y, Tensor mean, Tensor m2, Tensor rstd)",
    "channel_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " Tensor? residual, Tensor? out, str act, int groups, bool want_dz, bool constant=False,"
    " Tensor? mask=None, Tensor? count=None) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dz)",
    "channel_backward_(Tensor dy, Tensor(a!) x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " Tensor? residual, Tensor? out, str act, int groups, bool want_dz)"
    " -> (Tensor dweight, Tensor dbias, Tensor dz)",
    "row_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int start, int stop, float eps,"
    " bool rms, float weight_offset=0.0, bool cast_before=False, Tensor? valid=None, Tensor? gate=None)"
    " -> (Tensor y, Tensor total, Tensor mean, Tensor rstd)",
    "row_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, int start,"
    " int stop, bool rms, bool want_affine, bool want_bias, float weight_offset=0.0, Tensor? valid=None,"
    " Tensor? gate=None, Tensor? residual=None)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual, Tensor dgate)",
    # of (rows, kept), each row contiguous
    "row_gated_forward(Tensor x, Tensor gate, Tensor weight, float eps, str act, bool norm_before_gate,"
    " bool cast_before) -> (Tensor y, Tensor rstd)",
    "row_gated_backward(Tensor dy, Tensor x, Tensor gate, Tensor rstd, Tensor weight, str act,"
    " bool norm_before_gate, bool want_affine) -> (Tensor dx, Tensor dgate, Tensor dweight)",
)

# these take any layout, so that a compiler may choose it
ANY_LAYOUT = ("channel_moments",)
OPERATORS = tuple(
    LIBRARY.define(
        _schema, tags=(torch.Tag.flexible_layout,) if _schema.partition("(")[0] in ANY_LAYOUT else ()
    )
    for _schema in _SCHEMAS
)

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


def _several(x: Tensor, number: int, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(_statistics(x, shape) for _ in range(number))


def _dz(x: Tensor, wanted: bool) -> Tensor | None:
    return torch.empty_like(x) if wanted else None


Fake = TypeVar("Fake", bound=Callable[..., object])


def _fake(name: str) -> Callable[[Fake], Fake]:
    return cast(Callable[[Fake], Fake], torch.library.register_fake(f"leannorm::{name}", lib=LIBRARY))


def _count(x: Tensor, groups: int, mask: Tensor | None) -> Tensor | None:
    return None if mask is None else _statistics(x, (x.shape[0], 1) if groups else ())


@_fake("channel_moments")
def _(x: Tensor, groups: int, mask: Tensor | None = None) -> tuple[Tensor | None, ...]:
    return *_several(x, 2, statistics_shape(x.shape, groups)), _count(x, groups, mask)


@_fake("channel_normalize")
def _(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


@_fake("channel_grad_sums")
def _(dy: Tensor, x: Tensor, mean: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _several(x, 2, (*mean.shape[:-1], x.shape[1]))


@_fake("channel_input_grad")
def _(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
    return torch.empty_like(x), _dz(x, rest[9])


@_fake("channel_forward")
def _(x: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    groups, mask = (*rest, None)[5:7]
    statistics = _several(x, 3, statistics_shape(x.shape, groups))
    return torch.empty_like(x), *statistics, _count(x, groups, mask)


@_fake("channel_forward_tracked_")
def _(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(x), *_several(x, 3, (x.shape[1],))


@_fake("channel_backward")
def _(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    return torch.empty_like(x), *_in_place(dy, x, *rest)


@_fake("channel_backward_")
def _in_place(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    weight, want_dz = rest[2], rest[8]
    dweight, dbias = (x.new_empty(x.shape[1], dtype=gradient_dtype(x, weight)) for _ in range(2))
    return dweight, dbias, _dz(x, want_dz)


@_fake("row_forward")
def _(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, start, stop, *_ = rest
    shape = row_statistics_shape(x.shape, start, stop)
    mean, rstd = (x.new_empty(shape, dtype=compute_dtype(x)) for _ in range(2))
    return torch.empty_like(x), x.new_empty(0) if residual is None else torch.empty_like(x), mean, rstd


@_fake("row_backward")
def _(dy: Tensor, dtotal: Tensor | None, x: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    weight, start, stop, _, want_affine, want_bias = rest[2:8]
    gate, residual = (*rest[10:], None, None)[:2]
    shape, dtype, own = x.shape[start:stop], row_gradient_dtype(x, weight), False
    if weight is not None and weight.numel() != prod(shape):  # lines
        shape, dtype, own = weight.shape, weight.dtype, weight.numel() == x.numel()

    def affine(wanted: bool) -> Tensor:
        return x.new_empty(shape if wanted else 0, dtype=dtype)

    dresidual = None if gate is None else torch.empty_like(x)
    dgate = None if gate is None or residual is None else gate.new_empty(gate.shape)
    affines = affine(want_affine), affine(want_affine and want_bias and not own)
    return torch.empty_like(x), *affines, dresidual, dgate


@_fake("row_gated_forward")
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=compute_dtype(x))


@_fake("row_gated_backward")
def _(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dweight = x.new_empty(1 if rest[-1] else 0, x.shape[1], dtype=compute_dtype(x))
    return x.new_empty(x.shape), x.new_empty(x.shape), dweight


_fake("move_running_")(lambda *arguments: None)
_fake("constants_of")(lambda mean, var, eps: _several(mean, 2, mean.shape))
_fake("sums_of")(lambda mean, m2, count: _statistics(mean, (4 * mean.numel(),)))
_fake("moments_of")(lambda total, eps: (*_several(total, 3, (total.numel() // 4,)), _statistics(total, ())))
_fake("means_of")(lambda total, weight, count: _several(total, 2, (total.numel() // 2,)))
