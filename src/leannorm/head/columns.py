"""Reductions over each row of logits, a block of columns at a time, and their gradients.

    lse[i] = log Σ_j exp(y[i, j])        picked[i, k] = y[i, index[i, k]]
    mean[i] = Σ_j softmax(y)[i, j] · y[i, j]        total[i] = Σ_j weights[j] · y[i, j]

    dy[i, j] = p[i, j] · (dlse[i] + dmean[i] · (1 + y[i, j] − mean[i]))
               + Σ_k dpicked[i, k] · (index[i, k] = j) + dtotal[i] · weights[j],
    p[i, j] = exp(y[i, j] − lse[i])

The columns of y are computed twice, in the forward and in the backward pass. The gradient of a block of the
weight's rows is one product over all tokens, as in torch; the gradient of the hidden rows is summed over the
blocks in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from leannorm.head.formula import Formula, Product, Slot, evaluate, flat, unflat, without_autocast

_ELEMENTS, _ON_DEVICE = 1 << 22, 1 << 27  # of a block
_PART = 1 << 18  # elements of a block that are processed together on a CPU
_FEWEST = 256  # columns: narrower products are slow


class Wanted(NamedTuple):
    """The formula and dtypes of the logits, and which of the reductions a caller needs."""

    formula: Formula
    dtypes: tuple[torch.dtype, ...]
    lse: bool = True
    mean: bool = False


class Rows(NamedTuple):
    """The four reductions; None if it was not requested."""

    lse: Tensor | None
    picked: Tensor | None
    mean: Tensor | None
    total: Tensor | None


def rows_of(
    formula: Formula,
    products: list[Product],
    *,
    index: Tensor | None = None,
    weights: Tensor | None = None,
    lse: bool = True,
    mean: bool = False,
) -> Rows:
    """Reduce every row of the logits; the products have rows (N, H), `index` is (N, k)."""
    device = products[0].rows.device.type
    wanted = Wanted(formula, tuple(p.dtype for p in products), lse or mean, mean)
    with without_autocast(device):
        casted = [p.casted() for p in products]
        return Rows(*_Columns.apply(wanted, index, weights, *flat(casted)))


def blocks(rows: int, width: int, device: str) -> Iterator[tuple[int, int]]:
    """The first and last column of each block."""
    most = _ELEMENTS if device == "cpu" else _ON_DEVICE
    step = max(most // max(rows, 1), _FEWEST)
    return ((a, min(a + step, width)) for a in range(0, width, step))


def precise(y: Tensor) -> Tensor:
    """Cast to the dtype of the arithmetic: float32, or float64 for float64."""
    return y if y.dtype in (torch.float32, torch.float64) else y.float()


def argmax(formula: Formula, products: list[Product]) -> Tensor:
    """The column of the largest value in each row; the first of several equal ones."""
    best: Tensor | None = None
    at: Any = None
    rows, width = products[0].rows.shape[0], products[0].weight.shape[0]
    with torch.no_grad(), without_autocast(products[0].rows.device.type):
        casted = [p.casted() for p in products]
        for a, b in blocks(rows, width, products[0].rows.device.type):
            value, where = evaluate(formula, [p.columns(a, b) for p in casted]).max(1)
            if best is None:
                best, at = value, where
                continue
            larger = (value > best) | (value.isnan() & ~best.isnan())
            best, at = torch.where(larger, value, best), torch.where(larger, where + a, at)
    assert isinstance(at, Tensor)
    return at


def _within(index: Tensor, a: int, b: int) -> tuple[Tensor, Tensor]:
    """The index relative to column `a`, and a mask of the values that lie between `a` and `b`."""
    return (index - a).clamp(0, b - a - 1), (index >= a) & (index < b)


class _Columns(Function):
    @staticmethod
    def forward(ctx: Any, wanted: Wanted, index: Any, weights: Any, *tensors: Any) -> Any:
        products = unflat(tensors, wanted.dtypes)
        n, width = len(products[0].rows), len(products[0].weight)
        parts = [
            _forward(wanted, [p.columns(a, b) for p in products], index, weights, a, b)
            for a, b in blocks(n, width, products[0].rows.device.type)
        ]
        lses, picks, means, totals = zip(*parts, strict=True)
        lse: Tensor | None = None
        mean: Tensor | None = None
        if wanted.lse:
            lse = torch.logsumexp(torch.stack(lses), 0)
        if wanted.mean:
            assert lse is not None
            shares = (torch.stack(lses) - lse).exp_()
            mean = shares.mul_(torch.stack(means)).sum(0)
        picked = None if index is None else sum(picks)
        total = None if weights is None else sum(totals)
        ctx.wanted = wanted
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index, weights, lse, mean, *tensors)
        return lse, picked, mean, total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        index, weights, lse, mean, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        if all(g is None for g in grads):
            return (None,) * (3 + len(tensors))
        if torch.is_grad_enabled():
            return None, None, None, *_differentiable(ctx.wanted, index, weights, tensors, needed, grads)
        products = unflat(tensors, ctx.wanted.dtypes)
        with without_autocast(products[0].rows.device.type):
            made = _gradients(ctx.wanted, products, needed, (index, weights, lse, mean), grads)
        return None, None, None, *made


def _parts(values: list[Tensor]) -> Iterator[slice]:
    """Split a block into parts of so few rows that temporaries stay in a CPU's cache."""
    width = values[0].shape[1]
    n = max(len(values[0]), 1)  # no rows are one part
    step = max(_PART // width, 1) if values[0].device.type == "cpu" else n
    return (slice(start, start + step) for start in range(0, n, step))


def _forward(
    wanted: Wanted, values: list[Tensor], index: Any, weights: Any, a: int, b: int
) -> tuple[Tensor | None, ...]:
    """The contribution of a block of columns to lse, picked, mean and total."""
    found = list[tuple[Tensor | None, ...]]()
    for part in _parts(values):
        y = precise(evaluate(wanted.formula, [v[part] for v in values]))
        lse = picked = mean = total = None
        if index is not None:
            at, here = _within(index[part], a, b)
            picked = y.gather(1, at).where(here, 0)
        if weights is not None:
            total = y @ weights[a:b].to(y.dtype)
        if wanted.lse:
            top = y.amax(1, keepdim=True)
            top = top.where(top.abs() != torch.inf, 0)
            e = (y - top).exp_()
            sums = e.sum(1)
            lse = sums.log() + top.squeeze(1)
            if wanted.mean:
                mean = e.mul_(y).sum(1) / sums
        found.append((lse, picked, mean, total))
    return tuple(None if x[0] is None else torch.cat(x) for x in zip(*found, strict=True))


def _gradients(
    wanted: Wanted, products: list[Product], needed: Any, kept: Any, grads: Any
) -> list[Tensor | None]:
    """The gradients of rows, weights and biases, computed by blocks of columns."""
    n, width, device = len(products[0].rows), len(products[0].weight), products[0].rows.device.type
    tensors = flat(products)
    made: list[Tensor | None] = [None] * len(tensors)
    for i, (t, need) in enumerate(zip(tensors, needed, strict=True)):
        if need and t is not None:
            made[i] = torch.empty(t.shape, dtype=t.dtype, device=t.device)
            if i % 3 == 0:  # summed over the blocks, in float32 or float64
                made[i] = torch.zeros(
                    t.shape, dtype=torch.promote_types(t.dtype, torch.float32), device=t.device
                )
    for a, b in blocks(n, width, device):
        values = [p.columns(a, b) for p in products]
        for part in _parts(values):
            _differentiate(wanted.formula, [v[part] for v in values], part, a, b, kept, grads)
        for k, (product, dz) in enumerate(zip(products, values, strict=True)):
            rows, weight, bias = made[3 * k : 3 * k + 3]
            if rows is not None:
                columns = product.weight[a:b].to(product.dtype)
                if rows.dtype == dz.dtype:
                    rows.addmm_(dz, columns)
                else:
                    rows.add_(dz @ columns)
            if weight is not None:
                if weight.dtype == dz.dtype:
                    torch.mm(dz.t(), product.rows, out=weight[a:b])
                else:
                    weight[a:b] = dz.t() @ product.rows
            if bias is not None:
                bias[a:b] = dz.sum(0)
    return [g if g is None or t is None else g.to(t.dtype) for g, t in zip(made, tensors, strict=True)]


def _differentiate(
    formula: Formula, values: list[Tensor], part: slice, a: int, b: int, kept: Any, grads: Any
) -> None:
    """Overwrite the values of a part of each product with their gradients."""
    plain = type(formula) is Slot
    leaves = values if plain else [v.detach().clone().requires_grad_() for v in values]
    with torch.set_grad_enabled(not plain):
        y = precise(evaluate(formula, leaves))
    dy = _of_logits(y.detach(), part, a, b, kept, grads)
    made: Any = [dy] if plain else torch.autograd.grad(y, leaves, dy)
    for value, dz in zip(values, made, strict=True):
        if value.data_ptr() != dz.data_ptr():
            value.copy_(dz)


def _of_logits(y: Tensor, part: slice, a: int, b: int, kept: Any, grads: Any) -> Tensor:
    """dy for these rows and columns."""
    index, weights, lse, mean = kept
    of_lse, of_picked, of_mean, of_total = (None if g is None else g[part].to(y.dtype) for g in grads)
    if of_lse is None and of_mean is None:
        dy = torch.zeros_like(y)
    else:
        dy = (y - lse[part].unsqueeze(1)).exp_()
        if of_mean is None:
            dy.mul_(of_lse.unsqueeze(1))  # type: ignore[union-attr]
        else:
            least = of_mean * (1 - mean[part]) + (0 if of_lse is None else of_lse)
            dy.mul_(torch.addcmul(least.unsqueeze(1), y, of_mean.unsqueeze(1)))
    if of_picked is not None:
        at, here = _within(index[part], a, b)
        dy.scatter_add_(1, at, of_picked.where(here, 0))
    if of_total is not None:
        dy.addr_(of_total, weights[a:b].to(y.dtype))
    return dy


def _differentiable(
    wanted: Wanted, index: Any, weights: Any, tensors: Any, needed: Any, grads: Any
) -> list[Tensor | None]:
    """The gradients with a graph of their own (`create_graph=True`), from all logits at once."""
    products = unflat(tensors, wanted.dtypes)
    y = precise(evaluate(wanted.formula, [p.columns(0, len(p.weight)) for p in products]))
    outputs = [
        torch.logsumexp(y, 1),
        None if index is None else y.gather(1, index),
        (torch.softmax(y, 1) * y).sum(1) if wanted.mean else None,
        None if weights is None else y @ weights.to(y.dtype),
    ]
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o is not None and g is not None]
    inputs = [t for t, need in zip(tensors, needed, strict=True) if need]
    found: Any = torch.autograd.grad([o for o, _ in pairs], inputs, [g for _, g in pairs], create_graph=True)
    rest = iter(found)
    return [next(rest) if need else None for need in needed]
