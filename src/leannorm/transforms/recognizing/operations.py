"""What each of torch's operations makes of the values of a norm's forward pass (`formula.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from leannorm.transforms.recognizing.formula import (
    LOW,
    Gate,
    Moment,
    Parameter,
    Row,
    Running,
    Square,
    UnknownFormError,
    only_wide,
    short,
)

Value = Row | Square | Moment | Parameter | Gate | Running


class Operation:
    """One call: its arguments, the values of those that are tensors, and its output."""

    def __init__(self, args: Sequence[Any], named: dict[str, Any], out: Any, values: Values) -> None:
        self.args, self.named, self.out, self.values = args, named, out, values

    def get(self, at: int, name: str, default: Any = None) -> Any:
        return self.args[at] if len(self.args) > at else self.named.get(name, default)

    def pair(self) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """The two operands, each with its value (a number is its own); rows come first."""
        a, b = ((t, self.values.of(t) if isinstance(t, Tensor) else t) for t in self.args[:2])
        return (b, a) if _rank_of(b[1]) > _rank_of(a[1]) else (a, b)


def _rank_of(value: Any) -> int:
    return 2 if isinstance(value, Row) else 1 if isinstance(value, Running) else 0


class Values:
    """The value of each tensor of a run. A tensor without one is a constant."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Tensor, Value]] = {}
        self.leaves: set[int] = set()

    def leaf(self, tensor: Tensor, value: Value) -> None:
        self.set(tensor, value)
        self.leaves.add(tensor.untyped_storage().data_ptr())

    def set(self, tensor: Tensor, value: Value) -> None:
        self._of[id(tensor)] = tensor, value  # with the tensor, whose id would be used again

    def find(self, tensor: Any) -> Value | None:
        return self._of[id(tensor)][1] if id(tensor) in self._of else None

    def of(self, tensor: Tensor) -> Value:
        value = self.find(tensor)
        if value is None:
            raise UnknownFormError("it reads a tensor that is neither its input nor its own")
        return value

    def may_write(self, tensor: Tensor) -> bool:
        """Is it new memory that no other tensor of the run sees?"""
        memory = tensor.untyped_storage().data_ptr()
        seen = sum(t.untyped_storage().data_ptr() == memory for t, _ in self._of.values())
        return memory not in self.leaves and seen == 1

    def interpret(self, name: str, args: Sequence[Any], named: dict[str, Any], out: Any) -> None:
        """Give the output of an operation its value."""
        inputs = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a])]
        if not any(isinstance(t, Tensor) and self.find(t) is not None for t in inputs):
            return
        function = OPERATIONS.get(name.removesuffix("_"))
        if function is None or (name.endswith("_") and not self.may_write(args[0])):
            raise UnknownFormError(f"it calls torch's {name}, as no norm of leannorm does")
        value = function(Operation(args, named, out, self))
        first = out[0] if isinstance(out, (list, tuple)) else out
        self.set(first, value)


OPERATIONS: dict[str, Callable[[Operation], Value]] = {}


def operation(*names: str) -> Callable[[Callable[[Operation], Value]], Callable[[Operation], Value]]:
    def register(function: Callable[[Operation], Value]) -> Callable[[Operation], Value]:
        OPERATIONS.update(dict.fromkeys(names, function))
        return function

    return register


@operation("mul")
def _mul(call: Operation) -> Value:
    (t, a), (u, b) = call.pair()
    dtype = call.out.dtype
    if isinstance(a, Row) and isinstance(b, Row):
        return _squared(a, dtype) if t is u or (a == b and a.is_plain()) else _unknown("a product")
    if isinstance(a, Row) and isinstance(b, Moment):
        _same_rows(a, b, t, u)
        return a.over(b, dtype)
    if isinstance(a, Row) and isinstance(b, Parameter):
        return a.times(b, _over(a, t, u), dtype)
    if isinstance(a, Row) and isinstance(b, Gate):
        return a.gated(b, dtype)
    if isinstance(a, Gate) and isinstance(b, Gate) and {a.act, b.act} == {"identity", "sigmoid"}:
        only_wide(dtype)
        return a._replace(act="silu")
    if isinstance(a, Row) and isinstance(b, Running):
        return a.scaled(b, _over(a, t, u), dtype)
    if isinstance(a, Running) and isinstance(b, Parameter) and not b.offset:
        only_wide(dtype)
        return a.times(b.name)
    return _unknown("a product")


@operation("div")
def _div(call: Operation) -> Value:
    (t, a), (u, b) = call.pair()
    if isinstance(a, Row) and isinstance(b, Moment) and t is call.args[0]:
        if call.named.get("rounding_mode"):
            return _unknown("a quotient")
        _same_rows(a, b, t, u)
        return a.over(b.to(-1), call.out.dtype)
    return _unknown("a quotient")


@operation("add")
def _add(call: Operation) -> Value:
    (t, a), (u, b) = call.pair()
    if call.named.get("alpha", 1) != 1:
        return _unknown("a sum")
    if isinstance(a, (int, float)):  # a number goes second
        (t, a), (u, b) = (u, b), (t, a)
    dtype = call.out.dtype
    if isinstance(a, Row) and isinstance(b, Parameter):
        return a.plus(b, _over(a, t, u), dtype)
    if isinstance(a, Row) and isinstance(b, Running) and _over(a, t, u) == (1,):
        return a.shifted(b, dtype)
    if isinstance(a, Moment) and isinstance(b, (int, float)):
        return a.plus(b)
    if isinstance(a, Parameter) and isinstance(b, (int, float)) and not a.offset:
        return a._replace(offset=float(b))
    return _unknown("a sum")


@operation("sub")
def _sub(call: Operation) -> Value:
    (t, a), (u, b) = call.pair()
    if isinstance(a, Running) and isinstance(b, Parameter) and t is call.args[1]:
        return a.below(b.name)
    if isinstance(a, Row) and isinstance(b, Moment) and t is call.args[0] and call.named.get("alpha", 1) == 1:
        _same_rows(a, b, t, u)
        return a.minus(b, call.out.dtype)
    return _unknown("a difference")


@operation("addcmul")
def _addcmul(call: Operation) -> Value:
    bias, *factors = call.args[:3]
    if call.named.get("value", 1) != 1:
        return _unknown("a product")
    values = [(t, call.values.of(t)) for t in factors]
    (t, row), (u, weight) = values if isinstance(values[0][1], Row) else reversed(values)
    added = call.values.of(bias)
    if isinstance(row, Row) and isinstance(weight, Parameter) and isinstance(added, Parameter):
        dtype = call.out.dtype
        return row.times(weight, _over(row, t, u), dtype).plus(added, _over(row, t, bias), dtype)
    return _unknown("a product")


@operation("pow")
def _pow(call: Operation) -> Value:
    value, power = call.values.find(call.args[0]), call.args[1]
    if isinstance(value, Row) and isinstance(power, (int, float)) and power == 2:
        return _squared(value, call.out.dtype)
    if isinstance(value, Moment) and isinstance(power, (int, float)):
        return value.to(power)
    return _unknown("a power")


def _to_power(power: float) -> Callable[[Operation], Value]:
    def function(call: Operation) -> Value:
        value = call.values.of(call.args[0])
        if isinstance(value, Parameter) and value.offset and power == -0.5:
            only_wide(call.out.dtype)
            return Running(value.name, value.offset, call.out.dtype)
        return value.to(power) if isinstance(value, Moment) else _unknown("a root")

    return function


def _activation(name: str) -> Callable[[Operation], Value]:
    def function(call: Operation) -> Value:
        value = call.values.of(call.args[0])
        act = "gelu_tanh" if call.named.get("approximate") == "tanh" else name
        if not isinstance(value, Gate) or value.act != "identity":
            return _unknown("an activation")
        only_wide(call.out.dtype)
        return value._replace(act=act)

    return function


for _name in ("silu", "sigmoid", "relu", "gelu", "mish", "hardswish"):
    operation(_name)(_activation(_name))
operation("sqrt")(_to_power(0.5))
operation("rsqrt")(_to_power(-0.5))
operation("reciprocal")(_to_power(-1))


@operation("mean")
def _mean(call: Operation) -> Value:
    tensor, value = call.args[0], call.values.of(call.args[0])
    if not isinstance(value, (Row, Square)) or (
        isinstance(value, Row) and (not value.is_plain() or value.gate)
    ):
        return _unknown("a mean")
    over = _reduced(tensor, value.axes, call.get(1, "dim"), call.get(2, "keepdim", False))
    only_wide(call.out.dtype)
    if isinstance(value, Row):
        return Moment("mean", over, call.out.dtype)
    if value.centered not in ((), over):
        return _unknown("a mean")
    kind = "variance" if value.centered else "mean_square"
    return Moment(kind, over, call.out.dtype, gated=value.gated)


@operation("var", "var_mean")
def _var(call: Operation) -> Value:
    tensor, value = call.args[0], call.values.of(call.args[0])
    if not isinstance(value, Row) or not value.is_plain() or value.gate or call.named.get("correction") != 0:
        return _unknown("a variance")
    over = _reduced(tensor, value.axes, call.get(1, "dim"), call.named.get("keepdim", False))
    out = call.out[0] if isinstance(call.out, tuple) else call.out
    only_wide(out.dtype)
    if isinstance(call.out, tuple):
        call.values.set(call.out[1], Moment("mean", over, out.dtype))
    return Moment("variance", over, out.dtype)


@operation("_to_copy")
def _to_copy(call: Operation) -> Value:
    value, dtype = call.values.of(call.args[0]), call.out.dtype
    if call.out.device != call.args[0].device:
        return _unknown("a copy to another device")
    if isinstance(value, Row):
        return value.cast(dtype)
    if torch.promote_types(dtype, value.dtype) != dtype:
        raise UnknownFormError(f"it rounds a statistic or a parameter to {short(dtype)}")
    if isinstance(value, Parameter) and value.offset:
        return value  # the sum keeps the dtype that it was formed in
    return value._replace(dtype=dtype)


_VIEWS = "clone detach alias view _unsafe_view unsqueeze squeeze expand slice select _reshape_alias"


@operation(*_VIEWS.split())
def _view(call: Operation) -> Value:
    """A view that only adds or drops axes of one value, of parameters; one that splits a row's last axis.

    Autograd detaches what it saves. A layer's own `detach` is refused before it comes here.
    """
    value, before, after = call.values.of(call.args[0]), call.args[0].shape, call.out.shape
    if before == after:
        return value
    if isinstance(value, (Parameter, Running)) and _longer_than_one(before) == _longer_than_one(after):
        return value
    if isinstance(value, Parameter) and len(before) == 1 and len(after) == 2:
        return value
    if isinstance(value, Row) and value.axes == tuple(range(len(before))):
        if not value.split and before[:-1] == after[:-2]:
            return value._replace(axes=tuple(range(len(after))), split=after[-2], is_split=True)
        if value.is_split and before[:-2] == after[:-1]:
            return value._replace(axes=tuple(range(len(after))), is_split=False)
    return _unknown("a view of another shape")


def _longer_than_one(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n != 1]


@operation("permute", "transpose", "t")
def _permute(call: Operation) -> Value:
    tensor, value = call.args[0], call.values.of(call.args[0])
    rank = tensor.dim()
    if not isinstance(value, (Row, Square)) or (isinstance(value, Row) and value.split):
        return _unknown("a permutation")
    order = list(range(rank))
    if isinstance(call.args[1], int):
        i, j = call.args[1] % rank, call.args[2] % rank
        order[i], order[j] = j, i
    else:
        order = [i % rank for i in call.args[1]]
    return value._replace(axes=tuple(value.axes[i] for i in order))


@operation("native_layer_norm", "_fused_rms_norm")
def _row_norm(call: Operation) -> Value:
    tensor, sizes, row = call.args[0], call.args[1], call.values.of(call.args[0])
    layer = len(call.args) == 5
    eps = call.args[-1]
    if not isinstance(row, Row) or not row.is_plain() or row.centered or row.gate:
        return _unknown("a norm of something else than its input")
    if eps is None:
        eps = torch.finfo(torch.float64 if tensor.dtype == torch.float64 else torch.float32).eps
    over = tuple(row.axes[-len(sizes) :])
    moment = Moment("variance" if layer else "mean_square", tuple(sorted(over)), torch.float32, eps)
    row = row._replace(moment=moment.to(-0.5), centered=moment.over if layer else ())
    return _with_parameters(row, over, call.args[2], call.args[3] if layer else None, call)


@operation("native_group_norm")
def _group_norm(call: Operation) -> Value:
    row, groups, eps = call.values.of(call.args[0]), call.args[-2], call.args[-1]
    if not isinstance(row, Row) or not row.is_plain() or row.centered or row.gate or row.axes[:2] != (0, 1):
        return _unknown("a norm of something else than its input")
    row = row._replace(moment=Moment("group", (groups,), torch.float32, eps, -0.5))
    return _with_parameters(row, (1,), call.args[1], call.args[2], call)


def _with_parameters(row: Row, over: tuple[int, ...], weight: Any, bias: Any, call: Operation) -> Row:
    dtype = call.out[0].dtype
    for name, tensor in (("weight", weight), ("bias", bias)):
        value = None if tensor is None else call.values.of(tensor)
        if value is None:
            continue
        if not isinstance(value, Parameter) or (name == "bias" and value.offset):
            return _unknown(f"a norm with a computed {name}")
        if name == "weight":
            row = row._replace(weight=value, weight_over=over)
        else:
            row = row._replace(bias=value, bias_over=over)
    bare, low = weight is None and bias is None, dtype in LOW
    return row._replace(
        dtype=dtype, casts=(dtype,) if low else (), rounded=low and bare, final=low and not bare
    )


def _squared(row: Row, dtype: torch.dtype) -> Square:
    if not row.is_plain():
        raise UnknownFormError("it squares something else than its input")
    only_wide(dtype)
    return Square(row.axes, row.centered, dtype, row.gate is not None)


def _reduced(tensor: Tensor, axes: tuple[int, ...], dims: Any, keepdim: bool) -> tuple[int, ...]:
    """The input's axes behind the reduced ones."""
    if dims is None or not keepdim:
        raise UnknownFormError("it reduces its input to another number of axes")
    dims = [dims] if isinstance(dims, int) else dims
    return tuple(sorted(axes[d % tensor.dim()] for d in dims))


def _over(row: Row, tensor: Tensor, parameter: Tensor) -> tuple[int, ...]:
    """The input's axes that a parameter lies along."""
    first = tensor.dim() - parameter.dim()
    over = [row.axes[first + i] for i, n in enumerate(parameter.shape) if n != 1] if first >= 0 else []
    if row.is_split and over == [tensor.dim() - 2, tensor.dim() - 1]:
        over = over[:1]  # both parts of the split axis
    if not over or over != sorted(over):
        raise UnknownFormError("its weight or bias has one value, or other axes than its input")
    return tuple(over)


def _same_rows(row: Row, moment: Moment, tensor: Tensor, statistic: Tensor) -> None:
    """Does each row meet its own statistic?"""
    sizes = [1 if axis in moment.over else n for axis, n in zip(row.axes, tensor.shape, strict=True)]
    if list(statistic.shape) != sizes:
        raise UnknownFormError("it combines a row with the statistic of another")


def _unknown(what: str) -> NoReturn:
    raise UnknownFormError(f"it computes {what} that no norm of leannorm has")
