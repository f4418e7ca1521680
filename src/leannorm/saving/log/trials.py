"""Calls of a kind that is not trusted yet are made again during the forward pass, and the bits compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from leannorm.ops import modes
from leannorm.saving.evidence import same_bits
from leannorm.saving.log.log import Log
from leannorm.saving.log.replay import Replay, is_of_program
from leannorm.saving.log.tensors import Geometry, below, is_dense, is_of_several, over, sample_of, shown
from leannorm.saving.log.values import Call
from leannorm.saving.reasons import Why

_ENOUGH, _MANY, _MOST_KINDS = 2, 1 << 20, 1 << 16
_SOME = 4096  # numbers in a sample
_TRIED = Counter[Hashable]()
"""How often calls of a kind had the same bits when they were made again. Two trials on tensors of several
values are enough to trust a kind. One that ever had other bits is below 0."""


_LOOKS = Counter[Hashable]()  # of a device, how often the host has waited
_MANY_LOOKS, _NOW_AND_THEN = 4, 256


def forget_trials() -> None:
    _TRIED.clear()
    _LOOKS.clear()


def is_refused(log: Log, call: Call) -> bool:
    return _TRIED[_kind_of(log, call)] < 0


def _change(log: Log, call: Call, by: int) -> None:
    if len(_TRIED) > _MOST_KINDS:
        _TRIED.clear()
    _TRIED[_kind_of(log, call)] += by


def _kind_of(log: Log, call: Call) -> Hashable:
    if call.kind is None:
        reads = []
        for read in call.reads:
            shape = log.shape_of(read)
            strides = [1 if s == 1 else 0 if s == 0 else -1 for s in shape.strides]
            reads.append((shape.dtype, shape.device.type, read.at, read.shape is None, *strides))
        call.kind = call.rule.op, call.grad_mode, call.flags, repr(call.args), tuple(reads)
    return call.kind, call.by_result


def _is_vain(kind: Hashable) -> bool:
    """Whether to skip a trial, since many showed nothing because of their values."""
    looks = _LOOKS[kind]
    _LOOKS[kind] += looks >= _MANY_LOOKS
    return looks >= _MANY_LOOKS and looks % _NOW_AND_THEN != 0


def _hides_bits(source: Geometry, made: Geometry) -> bool:
    """Whether other bits of what is read may give the same result: a narrower dtype, a mask, few of many."""
    to_real = made.dtype.is_floating_point or made.dtype.is_complex
    of_real = source.dtype.is_floating_point or source.dtype.is_complex
    narrows = of_real and (not to_real or made.dtype.itemsize < source.dtype.itemsize)
    return narrows or 2 * made.numel < source.numel


def _may_differ(call: Call) -> bool:
    """Whether a second call is likely to have other bits: a faster formula, or an operator of the program.
    These are trusted only if their own results were compared."""
    return call.by_result or is_of_program(call)


class _Untried(NamedTuple):
    """A value that is still there, and the calls of kinds that are not trusted yet from which its trial makes
    it; for each, whether other bits of its result may give the same bits of the value."""

    by: int
    calls: list[tuple[Call, bool]]


def _untried(log: Log, v: int) -> Iterator[_Untried]:
    """The values that a trial compares: this value, and those that it is made of, if they are still there."""
    there, seen = [v], set[int]()
    for by in there:  # which grows
        left, part = [(by, False)], _Untried(by, [])
        while left:
            one, is_hidden = left.pop()
            x = log.values[one]
            if one in seen or (one != v and x.held is not None):
                continue
            seen.add(one)
            call = log.calls[x.call]
            if not call.rule.moves and _TRIED[_kind_of(log, call)] < _ENOUGH:
                part.calls.append((call, is_hidden))
            for i in log.inputs_of(call):
                if log.at_hand(i) is not None:
                    there.append(i)
                else:
                    left.append((i, is_hidden or _hides_bits(log.values[i].made, x.made)))
        if part.calls:
            yield part


def _same(again: Tensor, before: Tensor) -> bool | None:
    """Whether the bits are the same; None if that is not known, as the payloads of NaNs may differ."""
    with below():
        if same_bits(again, before):
            return True
        return None if before.is_floating_point() and bool(before.isnan().any()) else False


def has_other_bits(log: Log, v: int) -> Why:
    """`Why.NONE` if the value, which is to be dropped, has the same bits when it is made again.

    On a device the host waits for that, so it is not done while a graph is captured, and rarely after some
    trials whose values showed nothing.
    """
    x, parts = log.values[v], list(_untried(log, v))
    untried = [call for part in parts for call, _ in part.calls]
    if not untried:
        return Why.NONE
    assert x.held is not None
    if x.made.device.type != "cpu":
        if modes.capturing(x.held) or any(_is_vain(_kind_of(log, call)) for call in untried):
            return Why.UNTRIED
        _LOOKS.update(_kind_of(log, call) for call in untried)
    why = Why.NONE
    for by, calls in parts:
        made = log.values[by].made
        storage = None if by == v else log.at_hand(by)
        before = shown(x.held, made) if storage is None else over(storage, made)
        same: bool | None = False
        replay = Replay(log, is_trial=True)
        with suppress(Exception):  # if the operator cannot be called again, its result is kept
            same = _same(replay.value(by), before)
        if same is False:
            _refuse(log, log.calls[log.values[by].call], [call for call, _ in calls])
        if not same:
            why = Why.OTHER_BITS
        elif _has_several_values(before):
            for call, is_hidden in calls:
                if not (is_hidden and _may_differ(call)) and _has_varied_inputs(log, call, replay):
                    _change(log, call, 1)
    return why


def _refuse(log: Log, last: Call, untried: list[Call]) -> None:
    """A value got other bits: refuse the call that made it if that is untried, else all untried calls."""
    for call in [last] if last in untried else untried:
        _change(log, call, -_MANY)


def _has_several_values(tensor: Tensor) -> bool:
    if tensor.device.type == "cpu":
        return is_of_several(sample_of(tensor))
    with below():
        row = tensor.reshape(-1)
        return bool(row.ne(row[:1]).any())


def _has_normal_numbers(tensor: Tensor) -> bool:
    """Whether any number of a sample is normal: of zeros and denormal numbers most kernels make the same."""
    if tensor.dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return True
    with below():
        flat = tensor.as_strided((tensor.numel(),), (1,)) if is_dense(tensor) else tensor.reshape(-1)
        some = flat[:: max(flat.numel() // _SOME, 1)]
        return bool(some.abs().ge(torch.finfo(tensor.dtype).tiny).any())


def _has_varied_inputs(log: Log, call: Call, replay: Replay) -> bool:
    """Whether the arguments have several values: a norm of zeros is its bias, however it is computed."""
    inputs = log.inputs_of(call)
    most = max((log.values[i].made.numel for i in inputs), default=0)
    if not most:
        return True
    for i in inputs:
        held = log.values[i].held
        made = replay.made.get(i) if held is None else held
        if 2 * log.values[i].made.numel < most or made is None:
            continue
        if _has_several_values(made) and _has_normal_numbers(made):
            return True
    return False
