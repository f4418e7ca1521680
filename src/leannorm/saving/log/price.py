"""What calls cost: which of them take much longer than reading their result, and how many operations."""

from __future__ import annotations

from math import prod

from leannorm.saving.log.log import Log
from leannorm.saving.log.rules import ATTENTION, CONVOLUTION, MATRIX
from leannorm.saving.log.values import Call

_OF_CONVOLUTION, _OF_ATTENTION = (
    768,
    1024,
)  # a call with more operations per value of its output is costly


def is_costly(log: Log, call: Call) -> bool:
    if not call.outs:
        return True
    out = max(log.values[call.outs[0]].made.numel, 1)
    if call.rule.formula == CONVOLUTION:
        x, weight = call.sizes(log, 0), call.sizes(log, 1)
        each = 2 * prod(weight[1:]) * (prod(x) / out if call.args[6] is True else 1)
        return len(weight) < 2 or each > _OF_CONVOLUTION
    if call.rule.formula == MATRIX:  # costly with fewer outputs than inputs
        a, sizes = _factor(log, call), log.values[call.outs[0]].made.sizes
        return not a or not sizes or a[-1] > sizes[-1]
    if call.rule.formula == ATTENTION:
        q, k = call.sizes(log, 0), call.sizes(log, 1)
        dropout = isinstance(call.args[3], float) and call.args[3] != 0.0
        return not q or len(k) < 2 or dropout or 4 * prod(q) * k[-2] > _OF_ATTENTION * out
    return False


def _factor(log: Log, call: Call) -> tuple[int, ...]:
    return call.sizes(log, 1 if len(call.args) > 3 else 0)


def operations(log: Log, call: Call) -> int:
    """The number of operations of one call."""
    if not call.outs or call.by_result:
        return 0
    out = log.values[call.outs[0]].made.numel
    if call.rule.formula == CONVOLUTION:
        weight = call.sizes(log, 1)
        return (
            2
            * prod(weight[1:])
            * (prod(call.sizes(log, 0)) if call.args[6] is True else out)
            * (len(weight) > 1)
        )
    if call.rule.formula == MATRIX:
        a = _factor(log, call)
        return 2 * out * a[-1] if a else 0
    if call.rule.formula == ATTENTION:
        k = call.sizes(log, 1)
        return 4 * prod(call.sizes(log, 0)) * k[-2] if len(k) > 1 else 0
    return 0


def groups_of(call: Call) -> int:
    is_convolution = call.rule.formula == CONVOLUTION and len(call.args) > 8
    return call.args[8] if is_convolution and isinstance(call.args[8], int) else 0
