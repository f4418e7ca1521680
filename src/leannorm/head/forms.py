"""Operators whose result is logits again: views, slices of rows, casts, scales, soft caps and sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from leannorm.head.formula import Call, Formula, Product, moved
from leannorm.head.logits import READERS, Logits


def reads(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a reader for these functions of torch."""

    def put(reader: Callable[..., Any]) -> Callable[..., Any]:
        READERS.update(dict.fromkeys((f for f in functions if f is not None), reader))
        return reader

    return put


def both(*names: str) -> list[Any]:
    """The functions and the tensor methods with these names."""
    return [f for n in names for f in (getattr(torch, n, None), getattr(Tensor, n, None)) if f is not None]


def is_open(x: Any, *kinds: str) -> bool:
    """Whether `x` is `Logits` (of these kinds) that were not computed yet."""
    return isinstance(x, Logits) and not x.computed and x.kind in (kinds or (x.kind,))


def is_last(x: Logits) -> bool:
    """Whether the vocabulary is the last axis."""
    return x.axis == x.dim() - 1


def shape_of(x: Logits) -> Tensor:
    """A meta tensor with the shape, strides and dtype of `x`."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def derived(x: Logits, like: Tensor, func: Any, args: Any, kwargs: Any, **fields: Any) -> Logits:
    """The logits that `func(x, *args)` would return."""
    x.check()
    fields = {"formula": x.formula, "products": x.products, "kind": x.kind, "axis": x.axis} | fields
    with torch._C.DisableTorchFunctionSubclass():
        replay = partial(_again, func, x, args, kwargs)
        return Logits.of(like=like, replay=replay, told=x.told, parent=x, **fields)


def _again(func: Any, x: Logits, args: Any, kwargs: Any) -> Any:
    plain = [a.made(None) if isinstance(a, Logits) else a for a in args]
    return func(x.made(None), *plain, **kwargs)


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def part(func: Any, number: int) -> Callable[..., Any]:
    """A function that returns one of the results of `func`."""

    def one(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)[number]

    one.__name__ = _name(func)
    return one


@reads(*both("view", "reshape", "view_as", "reshape_as"))
def _view(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_open(x) or not is_last(x) or kwargs or any(isinstance(a, (torch.dtype, Logits)) for a in args):
        return NotImplemented
    like = func(shape_of(x), *args)
    if not like.dim() or like.shape[-1] != x.shape[-1]:
        return NotImplemented
    products = [p.with_rows(lambda t: t.reshape(*like.shape[:-1], t.shape[-1])) for p in x.products]
    return derived(x, like, func, args, kwargs, products=products, axis=-1)


_OF_ROWS = "flatten squeeze unsqueeze select narrow split chunk tensor_split unbind detach clone contiguous"


@reads(*both(*_OF_ROWS.split()))
def _rows(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `func` on the rows of the products, unless it changes the axis of the vocabulary."""
    if not is_open(x) or not is_last(x):
        return NotImplemented
    likes, width = func(shape_of(x), *args, **kwargs), x.shape[-1]
    try:
        found = [func(p.rows, *args, **kwargs) for p in x.products]
    except (RuntimeError, IndexError, ValueError):
        return NotImplemented
    of_weight = func is Tensor.detach or func is torch.detach
    if isinstance(likes, Tensor):
        if (
            likes.shape == x.shape
            and likes.stride() == x.stride()
            and not of_weight
            and _name(func) != "clone"
        ):
            return x
        made = _one(x, likes, found, func, args, kwargs, of_weight)
        return NotImplemented if made is None else made
    if any(len(f) != len(likes) for f in found):
        return NotImplemented
    fits = all(like.shape == (*f[i].shape[:-1], width) for f in found for i, like in enumerate(likes))
    if not fits:
        return NotImplemented
    parts = [
        _one(x, like, [f[i] for f in found], part(func, i), args, kwargs) for i, like in enumerate(likes)
    ]
    return tuple(parts)


def _one(
    x: Logits, like: Tensor, rows: list[Tensor], func: Any, args: Any, kwargs: Any, detached: bool = False
) -> Logits | None:
    products = [p._replace(rows=r) for p, r in zip(x.products, rows, strict=True)]
    if any(like.shape != (*r.shape[:-1], x.shape[-1]) for r in rows):
        return None
    if detached:
        products = [
            p._replace(weight=p.weight.detach(), bias=None if p.bias is None else p.bias.detach())
            for p in products
        ]
    return derived(x, like, func, args, kwargs, products=products, axis=-1)


@reads(Tensor.__iter__)
def _iterate(func: Any, x: Any) -> Any:
    parts = _rows(torch.unbind, x)
    return parts if parts is NotImplemented else iter(parts)


@reads(Tensor.__getitem__)
def _getitem(func: Any, x: Any, index: Any) -> Any:
    if not is_open(x) or not is_last(x) or not _leaves_last(x.dim(), index):
        return NotImplemented
    rows = [func(p.rows, index) for p in x.products]
    like = torch.empty((*rows[0].shape[:-1], x.shape[-1]), dtype=x.dtype, device="meta")
    if not any(isinstance(i, (Tensor, list)) for i in (index if isinstance(index, tuple) else (index,))):
        like = func(shape_of(x), index)
    made = _one(x, like, rows, func, (index,), {})
    return NotImplemented if made is None else made


def _leaves_last(dims: int, index: Any) -> bool:
    """Whether the index keeps all of the last axis."""
    items = index if isinstance(index, tuple) else (index,)
    used = []
    for i in items:
        if i is None or i is Ellipsis or isinstance(i, (int, slice)):
            used.append(0 if i is None or i is Ellipsis else 1)
        elif isinstance(i, Tensor) and not isinstance(i, Logits):
            used.append(i.dim() if i.dtype in (torch.bool, torch.uint8) else 1)
        elif isinstance(i, list) and all(isinstance(j, int) for j in i):
            used.append(1)
        else:
            return False
        if isinstance(i, bool):
            return False
    dotted = any(i is Ellipsis for i in items)
    if sum(used) < dims and not (dotted and items[-1] is not Ellipsis):
        return True
    if not items:
        return True
    last = next((i for i in reversed(items) if i is not None), None)
    if last is Ellipsis:
        return sum(used) < dims
    return isinstance(last, slice) and last == slice(None) and sum(used) <= dims


@reads(*both("transpose", "permute", "movedim", "swapaxes", "t"), Tensor.mT.__get__, Tensor.T.__get__)  # type: ignore[attr-defined]
def _transpose(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Permute axes; the result stores where the vocabulary went."""
    if not is_open(x, "logits", "log_softmax"):
        return NotImplemented
    like = func(shape_of(x), *args, **kwargs)
    numbered = func(torch.empty([*range(2, 2 + x.dim())], device="meta"), *args, **kwargs)
    order = [size - 2 for size in numbered.shape]
    of_rows = [i for i in range(x.dim()) if i != x.axis]
    rows = [of_rows.index(i) for i in order if i != x.axis]
    products = [p.with_rows(lambda t: t.permute(*rows, -1)) for p in x.products]
    return derived(x, like, func, args, kwargs, products=products, axis=order.index(x.axis))


@reads(*both("float", "double", "half", "bfloat16", "to", "type", "type_as"))
def _cast(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_open(x) or any(isinstance(a, Logits) for a in args):
        return NotImplemented
    made = func(torch.empty((), dtype=x.dtype, device=x.device), *args, **kwargs)
    given = {*kwargs} & {"copy", "memory_format"}
    if not isinstance(made, Tensor) or given or made.device != x.device or not made.is_floating_point():
        return NotImplemented
    if made.dtype == x.dtype:
        return x
    if x.kind != "logits":
        return NotImplemented
    return derived(
        x,
        shape_of(x).to(made.dtype),
        func,
        args,
        kwargs,
        formula=Call(Tensor.to, (x.formula, made.dtype), {}),
    )


_SCALES = (
    "mul multiply div divide true_divide add sub subtract neg tanh clamp __add__ __radd__ __mul__ __rmul__"
)
_SCALES += " __sub__ __truediv__ __neg__ __rsub__"


@reads(*both(*_SCALES.split()), torch.nn.functional.tanh)
def _scale(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """An elementwise operator with numbers, or the sum of two logits."""
    if len(args) == 1 and isinstance(args[0], Logits):
        return _sum(func, x, args[0], kwargs)
    reverse = not isinstance(x, Logits) and len(args) == 1 and isinstance(args[0], Logits)
    if reverse or not is_open(x, "logits") or kwargs.get("out") is not None:
        return NotImplemented
    if not all(_is_number(a) for a in (*args, *kwargs.values())):
        return NotImplemented
    args = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)
    probe = func(torch.empty(1, dtype=x.dtype, device=x.device), *args, **kwargs)
    if not isinstance(probe, Tensor) or not probe.is_floating_point() or probe.device != x.device:
        return NotImplemented
    like = shape_of(x).to(probe.dtype)
    return derived(x, like, func, args, kwargs, formula=Call(func, (x.formula, *args), kwargs))


def _is_number(a: Any) -> bool:
    if isinstance(a, Tensor):
        return type(a) is Tensor and not a.dim() and not a.requires_grad
    return a is None or isinstance(a, (int, float))


_SUMS = {*both("add", "sub", "__add__", "__sub__")}


def _sum(func: Any, x: Any, other: Logits, kwargs: Any) -> Any:
    """The sum of two logits, such as those of a layer and of its adapter."""
    fit = func in _SUMS and is_open(x, "logits") and is_open(other, "logits")
    if not fit and _is_number(x) and is_open(other, "logits") and not kwargs:  # 2 * logits
        return _of_number(func, x, other)
    if not fit or not (x.shape == other.shape and x.axis == other.axis and x.width() == other.width()):
        if is_open(x) and is_open(other):
            return _weighted(func, x, other)
        return NotImplemented
    probe = func(*(torch.empty(1, dtype=t.dtype, device=t.device) for t in (x, other)), **kwargs)
    formula: Formula = Call(func, (x.formula, moved(other.formula, len(x.products))), kwargs)
    products: list[Product] = [*x.products, *other.products]
    like = shape_of(x).to(probe.dtype)
    other.check()
    made = derived(x, like, func, (other,), kwargs, formula=formula, products=products)
    other.join(made)
    return made


def _of_number(func: Any, number: Any, x: Logits) -> Any:
    if isinstance(number, Tensor):
        number = number.detach().clone()
    probe = (
        func(number, torch.empty(1, dtype=x.dtype, device=x.device)) if isinstance(number, Tensor) else None
    )
    if probe is None:
        return NotImplemented
    formula = Call(func, (number, x.formula), {})

    def swapped(y: Tensor, number: Tensor) -> Any:
        return func(number, y)

    return derived(x, shape_of(x).to(probe.dtype), swapped, (number,), {}, formula=formula)


_PRODUCTS = {*both("mul", "multiply", "__mul__")}


def _weighted(func: Any, x: Logits, other: Logits) -> Any:
    """Softmax times logits, or times log-softmax, whose sum over the vocabulary is an entropy."""
    if func not in _PRODUCTS or x.formula is not other.formula or len(x.products) != len(other.products):
        return NotImplemented
    if any(p is not q for p, q in zip(x.products, other.products, strict=True)):
        return NotImplemented
    if x.axis != other.axis or x.dtype != other.dtype:
        return NotImplemented
    first, second = sorted((x, other), key=lambda t: t.kind != "softmax")
    if first.kind != "softmax" or second.kind not in ("logits", "log_softmax"):
        return NotImplemented
    return derived(x, shape_of(x), func, (other,), {}, kind=f"softmax·{second.kind}")
