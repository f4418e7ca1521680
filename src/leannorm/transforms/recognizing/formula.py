"""What a tensor of a norm's forward pass is, in a small algebra, and which norm of ours the result is.

The kinds of value: the input's rows on their way to the output, their squares, a moment of each row, the
gate, a parameter, and what is made of running statistics. `operations.py` says what each operation makes of
them. What they cannot express is no norm of ours.
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
    gated: bool = False

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


class Gate(NamedTuple):
    """The second input, through an activation."""

    axes: tuple[int, ...]
    dtype: torch.dtype
    act: str = "identity"


class Running(NamedTuple):
    """What a frozen batch norm makes of its buffers: (bias - mean *) weight / sqrt(var + eps), by names."""

    var: str
    eps: float
    dtype: torch.dtype
    weight: str | None = None
    mean: str | None = None
    bias: str | None = None

    def times(self, name: str) -> Running:
        if self.bias is not None or self.mean is not None:
            raise UnknownFormError("it computes something else of its buffers than a batch norm does")
        return self._replace(weight=name) if self.weight is None else self._replace(mean=name)

    def scale(self) -> Running:
        """The part that the input is multiplied by."""
        return self._replace(mean=None, bias=None)

    def below(self, name: str) -> Running:
        """The bias of this name, less this."""
        if self.bias is not None or self.weight is None:
            raise UnknownFormError("it computes something else of its buffers than a batch norm does")
        if self.mean is None:  # there is no weight, and what was taken for one is the mean
            return self._replace(bias=name, mean=self.weight, weight=None)
        return self._replace(bias=name)


class Square(NamedTuple):
    """The squares of rows."""

    axes: tuple[int, ...]
    centered: tuple[int, ...]
    dtype: torch.dtype
    gated: bool


class Row(NamedTuple):
    """(input - mean) / sqrt(moment + eps) * weight + bias, as far as it is computed.

    `axes` is the input's axis behind each axis; `centered` are the axes of the mean that was subtracted;
    `casts` are the dtypes that it was rounded to; `rounded` and `final`: before it met the weight, after.
    With a `gate`, times that; `split` is the number of groups that the last axis was split into, while
    `is_split`.
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
    gate: str | None = None
    gate_first: bool = False
    split: int = 0
    is_split: bool = False
    running: Running | None = None

    def is_plain(self) -> bool:
        """Is it the input, or the input less its mean?"""
        return self.moment is None and self.weight is None and self.bias is None

    def cast(self, dtype: torch.dtype) -> Row:
        """The same values, rounded where `dtype` has fewer digits."""
        if torch.promote_types(dtype, self.dtype) == dtype:
            return self._replace(dtype=dtype)
        if self.moment is None:
            raise UnknownFormError(f"it computes in {short(dtype)}")
        first = self.weight is None and self.bias is None and (self.gate is None or self.gate_first)
        return self._replace(
            dtype=dtype,
            casts=(*self.casts, dtype),
            rounded=self.rounded or first,
            final=self.final or not first,
        )

    def minus(self, mean: Moment, dtype: torch.dtype) -> Row:
        if not self.is_plain() or self.centered or self.gate or (mean.kind, mean.power) != ("mean", 1):
            raise UnknownFormError("it subtracts something else than the mean of its input")
        only_wide(mean.dtype, dtype)
        return self._replace(centered=mean.over, dtype=dtype)

    def over(self, moment: Moment, dtype: torch.dtype) -> Row:
        """Times (moment + eps) ** -0.5."""
        if self.moment is not None or self.bias is not None or moment.power != -0.5 or moment.kind == "mean":
            raise UnknownFormError("it divides by something else than the root of one moment")
        if moment.gated != self.gate_first:
            raise UnknownFormError("it divides by a moment of something else")
        only_wide(moment.dtype, dtype)
        return self._replace(moment=moment, dtype=dtype)

    def gated(self, gate: Gate, dtype: torch.dtype) -> Row:
        if self.gate or self.bias or self.centered or gate.axes != self.axes:
            raise UnknownFormError("it is gated where no norm of leannorm is")
        if self.moment is None and self.weight is not None:
            raise UnknownFormError("it has a weight before the gate")
        if self.final and not self.rounded:
            raise UnknownFormError("it rounds between weight and gate")
        only_wide(gate.dtype, dtype)
        return self._replace(gate=gate.act, gate_first=self.moment is None, dtype=dtype, final=False)

    def scaled(self, running: Running, over: tuple[int, ...], dtype: torch.dtype) -> Row:
        """Times weight / sqrt(var + eps)."""
        if not self.is_plain() or self.centered or self.gate or running.mean:
            raise UnknownFormError("it computes something else of its buffers than a batch norm does")
        only_wide(running.dtype, dtype)
        moment = Moment("running", over, running.dtype, running.eps, -0.5)
        return self._replace(moment=moment, running=running, dtype=dtype)

    def shifted(self, running: Running, dtype: torch.dtype) -> Row:
        """Plus bias - mean * weight / sqrt(var + eps)."""
        if self.running is None or self.running != running.scale():
            raise UnknownFormError("it computes something else of its buffers than a batch norm does")
        only_wide(dtype)
        return self._replace(running=running, dtype=dtype)

    def times(self, weight: Parameter, over: tuple[int, ...], dtype: torch.dtype) -> Row:
        if self.weight is not None or self.bias is not None or self.running is not None:
            raise UnknownFormError("it has more than one weight, or a weight behind the bias")
        if self.gate and not self.gate_first:
            raise UnknownFormError("it has a weight behind the gate")
        if self.moment is None:
            only_wide(dtype)
        return self._replace(weight=weight, weight_over=over, dtype=dtype, final=dtype in LOW)

    def plus(self, bias: Parameter, over: tuple[int, ...], dtype: torch.dtype) -> Row:
        if self.moment is None or self.bias is not None or bias.offset or self.gate or self.running:
            raise UnknownFormError("it adds something else than one bias behind the norm")
        if self.final or dtype in LOW:
            raise UnknownFormError("it rounds between weight and bias")
        return self._replace(bias=bias, bias_over=over, dtype=dtype)


class Form(NamedTuple):
    """A norm that leannorm has: `kind` is "rms", "layer", "group" or "running" (a frozen batch norm).

    `dim` is the one normalized axis, None for the `last` last ones. The offset is added to the weight in
    `offset_dtype`. `groups` is their number, of a group norm or of an RMS norm of parts of its rows.
    """

    kind: str
    eps: float
    dim: int | None = None
    weight: str | None = None
    bias: str | None = None
    offset: float = 0.0
    offset_dtype: torch.dtype | None = None
    cast: str = "after"
    last: int = 1
    groups: int = 1
    gate: str | None = None
    gate_first: bool = False
    mean: str | None = None
    var: str | None = None

    @property
    def function(self) -> str:
        """The name of the function of ours that computes it."""
        gated = "gated_" if self.gate and self.gate != "sigmoid" else ""
        return {"running": "batch_norm"}.get(self.kind, f"{gated}{self.kind}_norm")

    def axes(self, rank: int) -> tuple[int, ...]:
        """The axes that are normalized together, in an input of this rank."""
        if self.kind in ("group", "running"):
            return tuple(range(1, rank))
        return tuple(range(rank - self.last, rank)) if self.dim is None else (self.dim,)


_KINDS = {"mean_square": "rms", "variance": "layer", "group": "group", "running": "running"}


def form_of(row: Row, dtype: torch.dtype, rank: int) -> Form:
    """The norm that an output is, for input of this dtype and rank."""
    moment = row.moment
    if moment is None:
        raise UnknownFormError("its output is no normalized input")
    if row.axes != tuple(range(rank)):
        raise UnknownFormError("its output has other axes than its input")
    if moment.eps < 0:
        raise UnknownFormError(f"its eps is {moment.eps}")
    kind, cast = _KINDS[moment.kind], _cast(row, dtype)
    if kind == "running":
        return _running_form(row)
    if kind == "group":
        weight, bias = _names(row, (1,), kind, cast, dtype)
        return Form(kind, moment.eps, weight=weight, bias=bias, groups=moment.over[0])
    if row.centered != (moment.over if kind == "layer" else ()):
        raise UnknownFormError("it subtracts another mean than its variance does")
    over, groups = moment.over, 1
    if row.split:
        if over != (rank,) or kind != "rms" or (row.split > 1 and cast == "after" and dtype in LOW):
            raise UnknownFormError("it normalizes parts of its rows as no norm of leannorm does")
        over, groups = (rank - 1,), row.split
    weight, bias = _names(row, over, kind, cast, dtype)
    last = over == tuple(range(rank - len(over), rank))
    if not last and (len(over) != 1 or row.gate):
        raise UnknownFormError(f"it normalizes the axes {over}")
    if row.gate == "sigmoid" and (row.gate_first or cast == "before"):
        raise UnknownFormError("it is gated by a sigmoid before its weight")
    offset = row.weight.offset if row.weight else 0.0
    if offset and (row.gate or groups > 1):
        raise UnknownFormError("it adds to the weight of a gated norm, or of one of parts of rows")
    return Form(
        kind,
        moment.eps,
        None if last else over[0],
        weight,
        bias,
        offset,
        row.weight.dtype if row.weight and offset else None,
        cast,
        len(over),
        groups,
        row.gate,
        row.gate_first,
    )


def _cast(row: Row, dtype: torch.dtype) -> str:
    """Where the normalized value is rounded; the output's dtype must be what ours has then."""
    for rounded in row.casts:
        if rounded != dtype:
            raise UnknownFormError(f"it rounds to {short(rounded)}")
    before = dtype in LOW and row.rounded and row.weight is not None
    behind = row.gate is not None and not row.gate_first
    promoted = torch.promote_types(dtype, row.weight.dtype) if before and row.weight else dtype
    if row.dtype != (dtype if behind else promoted):
        raise UnknownFormError(f"its output is {short(row.dtype)} for {short(dtype)} input")
    return "before" if before else "after"


def _names(
    row: Row, over: tuple[int, ...], kind: str, cast: str, dtype: torch.dtype
) -> tuple[str | None, str | None]:
    """The names of weight and bias, if they lie along the normalized axes and are added to as ours are."""
    weight, bias = row.weight, row.bias
    for used in (weight and row.weight_over, bias and row.bias_over):
        if used is not None and used != over:
            raise UnknownFormError("its weight or bias lies along other axes than it normalizes")
    if cast == "before" and (kind != "rms" or (weight and weight.offset)):
        raise UnknownFormError(f"it rounds to {short(dtype)} before the weight")
    if kind == "rms" and bias is not None:
        raise UnknownFormError("it is an RMS norm with a bias")
    if kind == "rms" and weight and weight.offset and weight.dtype in LOW:
        raise UnknownFormError(f"it adds to its weight in {short(weight.dtype)}")
    if kind == "group" and weight and weight.offset:
        raise UnknownFormError("it adds to the weight of a group norm")
    return weight and weight.name, bias and bias.name


def _running_form(row: Row) -> Form:
    running = row.running
    assert running is not None
    assert row.moment is not None
    if row.moment.over != (1,) or running.bias is None or running.eps <= 0:
        raise UnknownFormError("it computes something else of its buffers than a batch norm does")
    return Form(
        "running", running.eps, weight=running.weight, bias=running.bias, mean=running.mean, var=running.var
    )


def only_wide(*dtypes: torch.dtype) -> None:
    """Statistics and normalized values are computed in float32 or float64."""
    for dtype in dtypes:
        if dtype in LOW:
            raise UnknownFormError(f"it computes in {short(dtype)}")


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
