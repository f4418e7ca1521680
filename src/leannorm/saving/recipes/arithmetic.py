"""Elementwise arithmetic: scale, gate, residual connection, mask, and the parts of norms written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leannorm.saving.calls import CallArguments
from leannorm.saving.graph import constant, kind_of, number, saved
from leannorm.saving.recipes.registry import OfInput, ValueOf, of_input, recipe
from leannorm.saving.recipes.views import VIEWS
from leannorm.saving.steps import Step
from leannorm.saving.values import Value

_OF_TWO: dict[str, Callable[..., Tensor]] = {"MulBackward0": torch.mul, "DivBackward0": torch.div}


@recipe(*_OF_TWO)
def of_two(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """LayerScale, squeeze-and-excite, dropout (input times mask). Factors that are not saved are searched."""
    function = _OF_TWO[kind_of(node)]
    a = saved(node, "self") or value_of(0)
    b = None if a is None else saved(node, "other") or value_of(1)
    if a is None or b is not None:
        return None if a is None or b is None else Step(function, (a, b), kind="scale")
    other = number(node, "other")
    return None if other is None else Step(function, (a,), (), (other,), kind="scale")


# What rotary embeddings and norms written by hand are made of
of_input({
    "MulBackward1": OfInput(torch.mul, ("other",), "scale"),
    "NegBackward0": OfInput(torch.neg),
    "PowBackward0": OfInput(torch.pow, ("exponent",)),
    "RsqrtBackward0": OfInput(torch.rsqrt),
})  # fmt: skip


def _mean(x: Tensor, dim: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor:
    return torch.mean(x, dim, keepdim, dtype=dtype)


def _sum(x: Tensor, dim: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor:
    return torch.sum(x, dim, keepdim, dtype=dtype)


_OVER_AXES = {"MeanBackward1": _mean, "SumBackward1": _sum}


@recipe(*_OVER_AXES)
def over_axes(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """A token's sum over its experts; the sum by which a router's weights are divided."""
    x = value_of(0)
    constants = constant(node, "dim"), node._saved_keepdim, node._input_metadata[0].dtype
    return None if x is None else Step(_OVER_AXES[kind_of(node)], (x,), (), constants)


def _dropout(x: Tensor, mask: Tensor, p: float) -> Tensor:
    return x * mask * (1 / (1 - p))


@recipe("NativeDropoutBackward0")
def dropout(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    x, mask, p = value_of(0), saved(node, "result1"), node._saved_p
    if output or x is None or mask is None or not 0 < p < 1:
        return None
    return Step(_dropout, (x, mask), (), (p,))


def add_to(a: Tensor, b: Tensor) -> Tensor:
    return a.add_(b) if a.shape == b.shape and a.dtype == b.dtype else a + b


@recipe("AddBackward0")
def add(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    a, b = value_of(0), value_of(1)
    if a is None or node._saved_alpha != 1:
        return None
    if b is None:
        if _masks_the_future(node):
            return Step(_causal, (a,), in_place=_causal_in_place, kind="scale")
        shift = _of_frozen_norm(node)
        return None if shift is None else Step(torch.add, (a,), (shift,), kind="scale")
    return _with_norm(a, b, 0) or _with_norm(b, a, 1) or Step(torch.add, (a, b), in_place=add_to, kind="sum")


def _with_norm(norm: Value, added: Value, place: int) -> Step | None:
    """Norm and addition as one step from the norm's input, of a norm whose output nobody saved.

    `place`: of the norm among the operands, the first of which says how the sum lies in memory.
    """
    step = norm.step
    if norm.layout is not None or step is None or step.then is None or step.kind != "norm":
        return None
    like = added if added.tensor is None else added.tensor
    alike = (like.shape, like.dtype) == (norm.shape, norm.dtype)
    fused = step.then(step, "identity", added) if alike else None
    if fused is None:
        return None
    return fused._replace(flags=step.flags, proved=step.proved, identity=("norm", place))


def _of_frozen_norm(node: Any) -> Tensor | None:
    """What a frozen batch norm adds to what it has scaled, from the call that saved the scale."""
    (scaled, _), (added, _) = node.next_functions
    if added is not None or scaled is None or kind_of(scaled) != "MulBackward0":
        return None
    scale = saved(scaled, "other")
    return scale.call.bias if scale is not None and isinstance(scale.call, CallArguments) else None


def _masks_the_future(node: Any) -> bool:
    """Is a causal mask added here, by the call of attention that has multiplied queries by keys?"""
    (scores, _), (added, _) = node.next_functions
    while scores is not None and kind_of(scores) in VIEWS:
        scores = scores.next_functions[0][0]
    if added is not None or scores is None or kind_of(scores) != "BmmBackward0":
        return False
    queries = saved(scores, "self")
    return queries is not None and isinstance(queries.call, CallArguments) and queries.call.causal


def _future_of(scores: Tensor) -> Tensor:
    there = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return torch.where(there, 0.0, -torch.inf).to(scores.dtype)


def _causal(scores: Tensor) -> Tensor:
    return scores + _future_of(scores)


def _causal_in_place(scores: Tensor) -> Tensor:
    return scores.add_(_future_of(scores))


def _subtract_from(a: Tensor, b: Tensor) -> Tensor:
    return a.sub_(b) if a.shape == b.shape and a.dtype == b.dtype else a - b


@recipe("SubBackward0")
def sub(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """Rotary embeddings of interleaved pairs; a volume's residual."""
    a, b = value_of(0), value_of(1)
    if a is None or b is None or node._saved_alpha != 1:
        return None
    return Step(torch.sub, (a, b), in_place=_subtract_from, kind="sum")


@recipe("WhereBackward0")
def where(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    a, b, condition = value_of(0), value_of(1), saved(node, "condition")
    if a is None or b is None or condition is None:
        return None
    return Step(torch.where, (condition, a, b), kind="scale")
