"""Formulas of logits: products of rows with a weight, and elementwise operators on the products.

A formula contains no tensors: `Slot(0)` is the first of its products, and `Call(torch.tanh, (Slot(0),))` an
operator on that product. A view of some tokens changes the rows of the products, and not the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Slot(NamedTuple):
    """The product with this number."""

    number: int


class Call(NamedTuple):
    """An elementwise operator, some of whose arguments are formulas."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Formula = Slot | Call


class Gathered(NamedTuple):
    """A weight that is gathered from shards while `modules` run.

    `edits()` changes if the shards are edited; `frees`: the weight is freed as the modules end.
    """

    edits: Callable[[], Any]
    frees: bool
    modules: tuple[nn.Module, ...]


class Product(NamedTuple):
    """`F.linear(rows, weight, bias)` in `dtype`, which is autocast's dtype if autocast was on."""

    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    edits: Callable[[], Any] | None = None  # of the shards that the weight was gathered from

    def with_rows(self, function: Callable[[Tensor], Tensor]) -> Product:
        return self._replace(rows=function(self.rows))

    def casted(self) -> Product:
        return self._replace(rows=self.rows.to(self.dtype))

    def columns(self, start: int, stop: int) -> Tensor:
        """The columns from `start` to `stop` of the product."""
        weight = self.weight[start:stop].to(self.dtype)
        bias = None if self.bias is None else self.bias[start:stop].to(self.dtype)
        return torch.nn.functional.linear(self.rows, weight, bias)


def evaluate(formula: Any, values: Sequence[Tensor]) -> Any:
    """Evaluate the formula, given the values of its products."""
    if type(formula) is Slot:
        return values[formula.number]
    if type(formula) is Call:
        args = [evaluate(a, values) for a in formula.args]
        return formula.function(*args, **formula.kwargs)
    return formula


def moved(formula: Any, by: int) -> Any:
    """The formula with the numbers of its slots raised by `by`."""
    if type(formula) is Slot:
        return Slot(formula.number + by)
    if type(formula) is Call:
        return formula._replace(args=tuple(moved(a, by) for a in formula.args))
    return formula


def flat(products: Sequence[Product]) -> list[Tensor | None]:
    """The tensors of the products in one list, as an autograd function takes them."""
    return [t for p in products for t in (p.rows, p.weight, p.bias)]


def unflat(tensors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]) -> list[Product]:
    """The products that `flat` made these tensors of."""
    threes = zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True)
    return [Product(r, w, b, d) for (r, w, b), d in zip(threes, dtypes, strict=True)]  # type: ignore[arg-type]


class Setting(NamedTuple):
    """The modes of a call: whether gradients are recorded, and autocast's dtype (None: autocast is off)."""

    grad: bool
    device: str
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device: str) -> Setting:
        on = torch.is_autocast_enabled(device)
        return cls(torch.is_grad_enabled(), device, torch.get_autocast_dtype(device) if on else None)

    def set(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(torch.set_grad_enabled(self.grad))
        if self.autocast is not None or torch.is_autocast_enabled(self.device):
            on = self.autocast is not None
            stack.enter_context(torch.autocast(self.device, dtype=self.autocast, enabled=on))
        return stack


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Turn autocast off, since the dtypes are already decided."""
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
