"""What calls cost: which of them take much longer than reading their result, and how many operations."""

from __future__ import annotations

from leannorm.saving import operators
from leannorm.saving.log.log import Log
from leannorm.saving.log.values import Call

_MOST = {"convolution": 768, "attention": 1024}  # operations per value of the output; with more it is costly
_DROPOUT, _TRANSPOSED, _GROUPS = 3, 6, 8  # positions of arguments


def operations(log: Log, call: Call) -> int:
    """The number of operations of one call; 0 if it is no product."""
    factors = _factors(log, call)
    if factors is None or call.by_result:
        return 0
    made = log.values[call.outs[0]].made
    return operators.operations(call.rule.formula, *factors, made.sizes, is_transposed(call))


def is_costly(log: Log, call: Call) -> bool:
    formula, factors = call.rule.formula, _factors(log, call)
    if factors is None or not formula:
        return bool(formula) or not call.outs
    made = log.values[call.outs[0]].made
    if formula == "matrix":  # costly with fewer outputs than inputs
        return not made.sizes or factors[0][-1] > made.sizes[-1]
    dropout = call.args[_DROPOUT] if formula == "attention" else 0.0
    return (isinstance(dropout, float) and dropout != 0.0) or operations(log, call) > _MOST[formula] * max(
        made.numel, 1
    )


def _factors(log: Log, call: Call) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The sizes of the two tensors that are multiplied; None if they are not known."""
    is_matrix = call.rule.formula == "matrix"
    first = int(is_matrix and len(call.args) > 3)  # then another tensor is added to the product
    left, right = call.sizes(log, first), call.sizes(log, first + 1)
    return (left, right) if call.outs and left and (is_matrix or len(right) > 1) else None


def is_transposed(call: Call) -> bool:
    """Whether it is a transposed convolution."""
    is_convolution = call.rule.formula == "convolution" and len(call.args) > _TRANSPOSED
    return is_convolution and call.args[_TRANSPOSED] is True


def groups_of(call: Call) -> int:
    is_convolution = call.rule.formula == "convolution" and len(call.args) > _GROUPS
    return call.args[_GROUPS] if is_convolution and isinstance(call.args[_GROUPS], int) else 0
