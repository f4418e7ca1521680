"""Operators that read logits without computing all of them: losses, log-probabilities, entropies, argmax."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leannorm.head.columns import Rows, argmax, precise, rows_of
from leannorm.head.forms import both, derived, is_last, is_open, reads, shape_of
from leannorm.head.formula import Call, Product, evaluate, without_autocast
from leannorm.head.logits import Logits


def _products(x: Logits) -> list[Product]:
    """The products, with rows of shape (N, H)."""
    x.check()
    x.told.read.add(x.width())
    return [p.with_rows(lambda t: t.reshape(-1, t.shape[-1])) for p in x.products]


def _rows(x: Logits, **wanted: Any) -> Rows:
    return rows_of(x.formula, _products(x), **wanted)


_FEW = 0.9


def _read(valid: Tensor) -> Tensor | None:
    """The indices of the rows that a loss reads on a CPU, without a prompt or padding; None: all rows."""
    if valid.device.type != "cpu":
        return None  # the host would wait for their number
    rows = valid.nonzero().squeeze(1)
    return rows if 0 < len(rows) < _FEW * len(valid) else None


def _lead(x: Logits) -> tuple[int, ...]:
    """The shape without the axis of the vocabulary."""
    return tuple(size for i, size in enumerate(x.shape) if i != x.axis)


def _is_axis(x: Logits, dim: Any) -> bool:
    """Whether `dim` is the axis of the vocabulary."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    return isinstance(dim, int) and not isinstance(dim, bool) and dim in (x.axis, x.axis - x.dim())


def _one(x: Logits) -> Tensor:
    """A tensor of two logits, on which an operator of torch shows the dtype of its result."""
    return torch.zeros(1, 2, dtype=x.dtype, device=x.device)


def _fit_classes(x: Logits, target: Any, weight: Any, ignore_index: int) -> bool:
    """Whether torch accepts these targets; if not, torch itself raises its error."""
    if x.axis != min(1, x.dim() - 1) or type(target) is not Tensor or target.dtype is not torch.int64:
        return False
    if tuple(target.shape) != _lead(x) or target.device != x.device or not target.numel():
        return False
    if weight is not None and not (
        isinstance(weight, Tensor)
        and tuple(weight.shape) == (x.shape[x.axis],)
        and not weight.requires_grad
        and weight.device == x.device
        and weight.is_floating_point()
    ):
        return False
    if target.device.type != "cpu":
        return True  # a kernel checks the range there
    beyond = ((target < 0) | (target >= x.shape[x.axis])) & (target != ignore_index)
    return not bool(beyond.any())


@reads(F.cross_entropy)
def _cross_entropy(  # noqa: PLR0913
    func: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if not is_open(input, "logits") or size_average is not None or reduce is not None:
        return NotImplemented
    return _loss(func, input, target, weight, ignore_index, reduction, label_smoothing)


@reads(F.nll_loss, torch.nll_loss if hasattr(torch, "nll_loss") else None)
def _nll_loss(
    func: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    if not is_open(input, "log_softmax") or size_average is not None or reduce is not None:
        return NotImplemented
    return _loss(func, input, target, weight, ignore_index, reduction, 0.0)


def _loss(
    func: Any, x: Logits, target: Any, weight: Any, ignore: int, reduction: Any, smoothing: float
) -> Any:
    if reduction not in ("mean", "sum", "none") or not 0.0 <= smoothing <= 1.0:
        return NotImplemented
    if not _fit_classes(x, target, weight, ignore):
        return NotImplemented
    two = torch.ones(2, dtype=weight.dtype, device=x.device) if weight is not None else None
    try:
        dtype = func(_one(x), torch.zeros(1, dtype=torch.int64, device=x.device), two).dtype
    except RuntimeError:  # the dtypes cannot be combined
        return NotImplemented
    with without_autocast(x.device.type):
        loss = _of_classes(x, target.reshape(-1), weight, ignore, reduction, smoothing)
        return loss.to(dtype).reshape(_lead(x)) if reduction == "none" else loss.to(dtype)


def _of_classes(
    x: Logits, target: Tensor, weight: Tensor | None, ignore: int, reduction: str, smoothing: float
) -> Tensor:
    valid, products = target != ignore, _products(x)
    rows, count = _read(valid), len(valid)
    if rows is not None:
        target, valid = target[rows], valid[rows]
        products = [p.with_rows(lambda t: t.index_select(0, rows)) for p in products]
    at = target.where(valid, 0)
    width = x.shape[x.axis]
    weights = weight if weight is not None else torch.ones(width, device=x.device) if smoothing else None
    found = rows_of(x.formula, products, index=at.unsqueeze(1), weights=weights if smoothing else None)
    lse, picked = found.lse, found.picked
    assert lse is not None
    assert picked is not None
    nll = lse - picked.squeeze(1)
    factor = valid.to(nll.dtype)
    if weight is not None:
        factor = factor * weight.to(nll.dtype)[at]
    losses = (nll * factor).where(valid, 0)
    if smoothing:
        assert weights is not None
        assert found.total is not None
        smooth = (lse * weights.to(lse.dtype).sum() - found.total).where(valid, 0)
        losses = (1 - smoothing) * losses + smoothing / width * smooth
    if reduction == "none":
        return losses if rows is None else losses.new_zeros(count).index_copy(0, rows, losses)
    return losses.sum() if reduction == "sum" else losses.sum() / factor.sum()


@reads(*both("logsumexp"), torch.special.logsumexp)
def _logsumexp(func: Any, x: Any, dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
    if more or not is_open(x, "logits") or not is_last(x) or not _is_axis(x, dim):
        return NotImplemented
    lse = _rows(x).lse
    assert lse is not None
    lse = lse.to(func(_one(x), 1).dtype).reshape(_lead(x))
    return lse.unsqueeze(-1) if keepdim else lse


_SOFTMAXES = both("softmax", "log_softmax")


@reads(*_SOFTMAXES, F.softmax, F.log_softmax, torch.special.softmax, torch.special.log_softmax)
def _softmax(func: Any, x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not is_open(x, "logits") or not _is_axis(x, dim):
        return NotImplemented
    dtype = func(_one(x), 1, *args, **kwargs).dtype
    formula, products = x.formula, x.products
    if dtype != x.dtype:
        if kwargs.get("dtype") is None and x.dtype not in (torch.float16, torch.bfloat16):
            return NotImplemented
        formula = Call(Tensor.to, (formula, dtype), {})
    kind = "log_softmax" if "log" in func.__name__ else "softmax"
    like = shape_of(x).to(dtype)
    return derived(x, like, func, (dim, *args), kwargs, formula=formula, products=products, kind=kind)


@reads(*both("exp"))
def _exp(func: Any, x: Any, **more: Any) -> Any:
    if more or not is_open(x, "log_softmax"):
        return NotImplemented
    return derived(x, shape_of(x), func, (), {}, kind="softmax")


@reads(*both("sum"))
def _sum(func: Any, x: Any, dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
    """The sum over the vocabulary of softmax times log-softmax or logits, for entropies."""
    if more or not is_open(x, "softmax·logits", "softmax·log_softmax"):
        return NotImplemented
    if not _is_axis(x, dim) or not is_last(x):
        return NotImplemented
    found = _rows(x, mean=True)
    assert found.mean is not None
    assert found.lse is not None
    made = found.mean if x.kind == "softmax·logits" else found.mean - found.lse
    made = made.to(x.dtype).reshape(_lead(x))
    return made.unsqueeze(-1) if keepdim else made


@reads(*both("mean"))
def _mean(func: Any, x: Any, dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
    """The mean over the vocabulary, or over rows too: what trainers show of a policy's logits."""
    if more or not is_open(x, "logits") or not is_last(x):
        return NotImplemented
    if not (_is_axis(x, dim) or (dim is None and not keepdim)):
        return NotImplemented
    total = _rows(x, weights=torch.ones(x.shape[-1], device=x.device), lse=False).total
    assert total is not None
    made = total.reshape(_lead(x)) / x.shape[-1]
    if dim is None:
        return made.mean().to(x.dtype)
    return (made.unsqueeze(-1) if keepdim else made).to(x.dtype)


@reads(*both("gather", "take_along_dim"))
def _gather(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    given = dict(
        zip(("dim", "index") if "gather" in func.__name__ else ("indices", "dim"), args, strict=False)
    )
    given |= kwargs
    dim, index = given.get("dim"), given.get("index", given.get("indices"))
    if not is_open(x, "logits", "log_softmax") or not is_last(x) or not _is_axis(x, dim):
        return NotImplemented
    if type(index) is not Tensor or index.dtype is not torch.int64 or index.dim() != x.dim():
        return NotImplemented
    if tuple(index.shape[:-1]) != _lead(x) or not index.numel() or given.get("sparse_grad"):
        return NotImplemented
    flat, width = index.reshape(-1, index.shape[-1]), x.shape[-1]
    if index.device.type == "cpu" and bool(((index < 0) | (index >= width)).any()):
        return NotImplemented  # torch raises its own error
    with without_autocast(x.device.type):
        if x.kind == "log_softmax":
            found = _rows(x, index=flat)
            assert found.picked is not None
            assert found.lse is not None
            made = found.picked - found.lse.unsqueeze(1)
        elif flat.shape[1] * x.products[0].rows.shape[-1] <= width:
            made = evaluate(x.formula, [_picked(p, flat) for p in _products(x)])
        else:
            return NotImplemented
    return made.to(x.dtype).reshape(index.shape)


def _picked(p: Product, index: Tensor) -> Tensor:
    """The outputs at `index` of each row, each a product of two vectors."""
    rows = precise(p.rows.to(p.dtype)).unsqueeze(1)
    made = (rows * precise(F.embedding(index, p.weight).to(p.dtype))).sum(-1)
    if p.bias is not None:
        made = made + precise(p.bias.to(p.dtype))[index]
    return made.to(p.dtype)


@reads(Tensor.register_hook)
def _register_hook(func: Any, x: Any, hook: Any = None) -> Any:
    """FSDP2's hook, which gathers a module's weights and changes no gradient: what is read runs it."""
    kind = type(getattr(hook, "__self__", None)).__module__
    if not is_open(x) or not kind.startswith("torch.distributed.fsdp._fully_shard."):
        return NotImplemented
    x.hooks.append(hook)
    with torch._C.DisableTorchFunctionSubclass():
        return func(x, hook)


@reads(*both("argmax"))
def _argmax(func: Any, x: Any, dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
    if more or not is_open(x, "logits") or not is_last(x) or not _is_axis(x, dim):
        return NotImplemented
    at = argmax(x.formula, _products(x)).reshape(_lead(x))
    return at.unsqueeze(-1) if keepdim else at
