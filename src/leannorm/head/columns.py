"""What a loss needs of each row of logits, some columns at a time, and the gradients of rows and weights.

    lse[i] = log Σ_j exp(y[i, j])        picked[i, k] = y[i, index[i, k]]
    mean[i] = Σ_j softmax(y)[i, j] · y[i, j]        total[i] = Σ_j weights[j] · y[i, j]

    dy[i, j] = p[i, j] · (dlse[i] + dmean[i] · (1 + y[i, j] − mean[i])) + Σ_k dpicked[i, k] · (index[i, k] = j)
               + dtotal[i] · weights[j],    p[i, j] = exp(y[i, j] − lse[i])

The columns of y are made twice, in the forward and in the backward pass. The gradient of a weight's rows is
one product over all tokens, as in torch; that of the hidden rows is added up over the columns, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from leannorm.head.formula import Formula, Product, Slot, evaluate, flat, unflat, without_autocast

_ELEMENTS, _ON_DEVICE = 1 << 23, 1 << 27  # of a block
_FEWEST = 256  # columns: a product of fewer is slow


class Wanted(NamedTuple):
    """Which of the four are asked for, of which logits."""

    formula: Formula
    dtypes: tuple[torch.dtype, ...]
    lse: bool = True
    mean: bool = False


class Rows(NamedTuple):
    """The answers; None is what was not asked for."""

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
    """Of every row of these logits, whose products have rows (N, H); `index` is (N, k)."""
    device = products[0].rows.device.type
    wanted = Wanted(formula, tuple(p.dtype for p in products), lse or mean, mean)
    with without_autocast(device):
        casted = [p.with_rows(lambda t, p=p: t.to(p.dtype)) for p in products]  # type: ignore[misc]
        return Rows(*_Columns.apply(wanted, index, weights, *flat(casted)))


def blocks(rows: int, width: int, device: str) -> Iterator[tuple[int, int]]:
    """The columns of each block."""
    most = _ELEMENTS if device == "cpu" else _ON_DEVICE
    step = max(most // max(rows, 1), _FEWEST)
    return ((a, min(a + step, width)) for a in range(0, width, step))


def precise(y: Tensor) -> Tensor:
    """In the dtype of the arithmetic."""
    return y if y.dtype in (torch.float32, torch.float64) else y.float()


def argmax(formula: Formula, products: list[Product]) -> Tensor:
    """The column of the largest value of each row; of equal ones the first."""
    best: Tensor | None = None
    at: Any = None
    rows, width = products[0].rows.shape[0], products[0].weight.shape[0]
    with torch.no_grad(), without_autocast(products[0].rows.device.type):
        casted = [p.with_rows(lambda t, p=p: t.to(p.dtype)) for p in products]  # type: ignore[misc]
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
    """The index in the columns from `a` to `b`, and which of its values lie there."""
    return (index - a).clamp(0, b - a - 1), (index >= a) & (index < b)


class _Columns(Function):
    @staticmethod
    def forward(ctx: Any, wanted: Wanted, index: Any, weights: Any, *tensors: Any) -> Any:
        products = unflat(tensors, wanted.dtypes)
        n, width, device = len(products[0].rows), len(products[0].weight), products[0].rows.device.type
        parts, means = list[Tensor](), list[Tensor]()
        picked: Tensor | None = None
        total: Tensor | None = None
        for a, b in blocks(n, width, device):
            y = precise(evaluate(wanted.formula, [p.columns(a, b) for p in products]))
            if index is not None:
                at, here = _within(index, a, b)
                some = y.gather(1, at).where(here, 0)
                picked = some if picked is None else picked.add_(some)
            if weights is not None:
                some = y @ weights[a:b].to(y.dtype)
                total = some if total is None else total.add_(some)
            if wanted.lse:
                parts.append(torch.logsumexp(y, 1))
            if wanted.mean:
                p = (y - parts[-1].unsqueeze(1)).exp_()
                means.append(p.mul_(y).sum(1))
        lse = torch.logsumexp(torch.stack(parts), 0) if parts else None
        mean: Tensor | None = None
        for part, some in zip(parts, means, strict=False):
            weighted = (part - lse).exp_() * some
            mean = weighted if mean is None else mean.add_(weighted)
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


def _gradients(
    wanted: Wanted, products: list[Product], needed: Any, kept: Any, grads: Any
) -> list[Tensor | None]:
    """Those of rows, weights and biases, by blocks of columns."""
    n, width, device = len(products[0].rows), len(products[0].weight), products[0].rows.device.type
    made = [
        None if not need else torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))
        if i % 3 == 0 else torch.empty_like(t, memory_format=torch.contiguous_format)
        for i, (t, need) in enumerate(zip(flat(products), needed, strict=True))
    ]  # fmt: skip
    for a, b in blocks(n, width, device):
        values = [p.columns(a, b) for p in products]
        for k, dz in enumerate(_block(wanted.formula, values, a, b, kept, grads)):
            product = products[k]
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
    tensors = flat(products)
    return [g if g is None or t is None else g.to(t.dtype) for g, t in zip(made, tensors, strict=True)]


def _block(
    formula: Formula, values: list[Tensor], a: int, b: int, kept: Any, grads: Any
) -> list[Tensor]:
    """The gradients of some columns of each product."""
    leaves = [v.detach().requires_grad_() for v in values] if type(formula) is not Slot else values
    with torch.set_grad_enabled(type(formula) is not Slot):
        y = precise(evaluate(formula, leaves))
    dy = _of_logits(y.detach(), a, b, kept, grads)
    if y is leaves[0]:
        return [dy]
    if type(formula) is Slot:
        return [dy.to(values[0].dtype)]
    made: Any = torch.autograd.grad(y, leaves, dy)
    return list(made)


def _of_logits(y: Tensor, a: int, b: int, kept: Any, grads: Any) -> Tensor:
    """dy of these columns."""
    index, weights, lse, mean = kept
    of_lse, of_picked, of_mean, of_total = grads
    if of_lse is not None or of_mean is not None:
        dy = (y - lse.unsqueeze(1)).exp_()
        factor = 0 if of_lse is None else of_lse.unsqueeze(1)
        if of_mean is not None:
            factor = factor + of_mean.unsqueeze(1) * (1 - mean.unsqueeze(1)) + of_mean.unsqueeze(1) * y
        dy.mul_(factor)
    else:
        dy = torch.zeros_like(y)
    if of_picked is not None:
        at, here = _within(index, a, b)
        dy.scatter_add_(1, at, of_picked.to(y.dtype).where(here, 0))
    if of_total is not None:
        dy.addr_(of_total.to(y.dtype), weights[a:b].to(y.dtype))
    return dy


def _differentiable(
    wanted: Wanted, index: Any, weights: Any, tensors: Any, needed: Any, grads: Any
) -> list[Tensor | None]:
    """The gradients as a graph, of whole logits (`create_graph=True`)."""
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
