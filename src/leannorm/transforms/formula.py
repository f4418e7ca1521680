"""What a tensor of a norm's forward pass is, in a small algebra, and which norm of ours the result is.

Four kinds of value: the input's rows on their way to the output, their squares, a moment of each row, a
parameter. `operations.py` says what each operation makes of them. What they cannot express is no norm of ours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LOW = (torch.bfloat16, torch.float16)


class UnknownFormError(BaseException):
    """The formula is none that leannorm has; the message says at what.

    Not an `Exception`, as a layer's own code that handles those is not to handle this one.
    """


class Moment(NamedTuple):
    """A statistic of each row, over axes of the input: (mean or mean of squares + eps) to a power."""

    kind: str
    over: tuple[int, ...]
    dtype: torch.dtype
    eps: float = 0.0
    power: float = 1.0

    def plus(self, eps: float) -> Moment:
        if self.kind == "mean" or self.power != 1 or self.eps != 0:
            raise UnknownFormError("it adds to a statistic, but not eps to a variance under the root")
        return self._replace(eps=float(eps))

    def to(self, power: float) -> Moment:
        return self._replace(power=self.power * power)


class Parameter(NamedTuple):
    """A parameter or buffer of the layer, plus an offset that is added in `dtype`."""

    name: str
    dtype: torch.dtype
    offset: float = 0.0


class Square(NamedTuple):
    """The squares of rows."""

    axes: tuple[int, ...]
    centered: tuple[int, ...]
    dtype: torch.dtype


class Row(NamedTuple):
    """(input - mean) / sqrt(moment + eps) * weight + bias, as far as it is computed.

    `axes` is the input's axis behind each axis; `centered` are the axes of the mean that was subtracted;
    `casts` are the dtypes that it was rounded to; `rounded` and `final`: before it met the weight, after.
    """

    axes: tuple[int, ...]
    dtype: torch.dtype
    centered: tuple[int, ...] = ()
    moment: Moment | None = None
    weight: Parameter | None = None
    weight_over: tuple[int, ...] = ()
    bias: Parameter | None = None
    bias_over: tuple[int, ...] = ()
    casts: tuple[torch.dtype, ...] = ()
    rounded: bool = False
    final: bool = False

    def is_plain(self) -> bool:
        """Is it the input, or the input less its mean?"""
        return self.moment is None and self.weight is None and self.bias is None

    def cast(self, dtype: torch.dtype) -> Row:
        """The same values, rounded where `dtype` has fewer digits."""
        if torch.promote_types(dtype, self.dtype) == dtype:
            return self._replace(dtype=dtype)
        if self.moment is None:
            raise UnknownFormError(f"it computes in {short(dtype)}")
        first = self.weight is None and self.bias is None
        return self._replace(
            dtype=dtype,
            casts=(*self.casts, dtype),
            rounded=self.rounded or first,
            final=self.final or not first,
        )

    def minus(self, mean: Moment, dtype: torch.dtype) -> Row:
        if not self.is_plain() or self.centered or (mean.kind, mean.power) != ("mean", 1):
            raise UnknownFormError("it subtracts something else than the mean of its input")
        only_wide(mean.dtype, dtype)
        return self._replace(centered=mean.over, dtype=dtype)

    def over(self, moment: Moment, dtype: torch.dtype) -> Row:
        """Times (moment + eps) ** -0.5."""
        if self.moment is not None or self.bias is not None or moment.power != -0.5 or moment.kind == "mean":
            raise UnknownFormError("it divides by something else than the root of one moment")
        only_wide(moment.dtype, dtype)
        return self._replace(moment=moment, dtype=dtype)

    def times(self, weight: Parameter, over: tuple[int, ...], dtype: torch.dtype) -> Row:
        if self.weight is not None or self.bias is not None:
            raise UnknownFormError("it has more than one weight, or a weight behind the bias")
        if self.moment is None:
            only_wide(dtype)
        return self._replace(weight=weight, weight_over=over, dtype=dtype, final=dtype in LOW)

    def plus(self, bias: Parameter, over: tuple[int, ...], dtype: torch.dtype) -> Row:
        if self.moment is None or self.bias is not None or bias.offset:
            raise UnknownFormError("it adds something else than one bias behind the norm")
        if self.final or dtype in LOW:
            raise UnknownFormError("it rounds between weight and bias")
        return self._replace(bias=bias, bias_over=over, dtype=dtype)


class Form(NamedTuple):
    """A norm that leannorm has: `kind` is "rms", "layer" or "group" (then `groups` is their number).

    `dim` is the one normalized axis, None for the last `count` ones. The offset is added to the weight in
    `offset_dtype`.
    """

    kind: str
    eps: float
    dim: int | None
    weight: str | None
    bias: str | None
    offset: float
    offset_dtype: torch.dtype | None
    cast: str
    count: int = 1
    groups: int = 0

    def axes(self, rank: int) -> tuple[int, ...]:
        """The axes that are normalized together, in an input of this rank."""
        if self.kind == "group":
            return tuple(range(1, rank))
        return tuple(range(rank - self.count, rank)) if self.dim is None else (self.dim,)


def form_of(row: Row, dtype: torch.dtype) -> Form:
    """The norm that an output is, for input of this dtype."""
    moment, rank = row.moment, len(row.axes)
    if moment is None:
        raise UnknownFormError("its output is no normalized input")
    if row.axes != tuple(range(rank)):
        raise UnknownFormError("its output has other axes than its input")
    before = dtype in LOW and row.rounded and (row.weight is not None or row.bias is not None)
    promoted = torch.promote_types(dtype, row.weight.dtype) if before and row.weight else dtype
    if row.dtype != promoted:
        raise UnknownFormError(f"its output is {short(row.dtype)} for {short(dtype)} input")
    for rounded in row.casts:
        if rounded != dtype:
            raise UnknownFormError(f"it rounds to {short(rounded)}")
    kind = {"mean_square": "rms", "variance": "layer", "group": "group"}[moment.kind]
    if kind != "group" and row.centered != (moment.over if kind == "layer" else ()):
        raise UnknownFormError("it subtracts another mean than its variance does")
    if moment.eps < 0:
        raise UnknownFormError(f"its eps is {moment.eps}")
    over = (1,) if kind == "group" else moment.over
    for used in (row.weight and row.weight_over, row.bias and row.bias_over):
        if used is not None and used != over:
            raise UnknownFormError("its weight or bias lies along other axes than it normalizes")
    weight, bias = row.weight, row.bias
    if before and (kind != "rms" or (weight and weight.offset)):
        raise UnknownFormError(f"it rounds to {short(dtype)} before the weight")
    if kind == "rms" and bias is not None:
        raise UnknownFormError("it is an RMS norm with a bias")
    if kind == "rms" and weight and weight.offset and weight.dtype in LOW:
        raise UnknownFormError(f"it adds to its weight in {short(weight.dtype)}")
    last = over == tuple(range(rank - len(over), rank))
    if not last and len(over) != 1:
        raise UnknownFormError(f"it normalizes the axes {over}")
    return Form(
        kind,
        moment.eps,
        None if last or kind == "group" else over[0],
        weight and weight.name,
        bias and bias.name,
        weight.offset if weight else 0.0,
        weight.dtype if weight and weight.offset else None,
        "before" if before else "after",
        len(over),
        moment.over[0] if kind == "group" else 0,
    )


def only_wide(*dtypes: torch.dtype) -> None:
    """Statistics and normalized values are computed in float32 or float64."""
    for dtype in dtypes:
        if dtype in LOW:
            raise UnknownFormError(f"it computes in {short(dtype)}")


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
