"""What a pass keeps: it drops a saved value if calls can make it again from values that it keeps."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from leannorm.saving.log.log import Log
from leannorm.saving.log.price import is_costly, is_transposed
from leannorm.saving.log.tensors import below, copy_of, empty_as, over, sample_of, shown
from leannorm.saving.log.trials import has_other_bits, is_refused
from leannorm.saving.log.values import COPIED, DROPPED, HELD, Call
from leannorm.saving.operators import ONCE, PRODUCT, SUM, VIEW
from leannorm.saving.reasons import NO_CAUSE, Cause, Why

_DEPTH = 64
_FOREVER = 1 << 60
TIMED_CALLS = 8  # as in `Met` in log.h


def _varies(call: Call) -> bool:
    """Whether threads of a device may add in any order, so that the call would give other bits."""
    varies = call.rule.varies or is_transposed(call)
    return varies and not torch.are_deterministic_algorithms_enabled()


def _is_timed(call: Call) -> bool:
    """Whether cuDNN times algorithms of this convolution, in each thread by itself."""
    return call.rule.formula == "convolution" and torch.backends.cudnn.benchmark


class Walk:
    """A search for the values from which `top` can be rebuilt. `before`: values saved from this number on do
    not count as kept. `taken`: values that no node saves, to be kept instead of `top`. `may_hold`: how many
    bytes these may have. `takes`: positions among what `top` is made of; a plan counts what these take."""

    def __init__(
        self, log: Log, top: int, may_hold: float, before: int = _FOREVER, takes: Collection[int] = ()
    ) -> None:
        self.log, self.top, self.before, self.may_hold = log, top, before, may_hold
        self.takes = takes
        self.may_copy = log.values[top].storage_bytes - may_hold
        self.why = Why.NONE
        self.taken, self.cause = list[int](), NO_CAUSE  # the cause that was found first
        log.stamp += 1

    def is_available(self, v: int, depth: int = _DEPTH) -> bool:
        """Whether the value is kept, or can be made again from values that are."""
        x = self.log.values[v]
        if x.held is not None:
            there = x.copied or (self.log.is_there(v) and not self.log.memories[x.memory].sent)
            filled = x.elsewhere is not None or x.held.untyped_storage().nbytes() >= x.made.extent
            return not x.lost and there and filled and (not x.saves or x.number < self.before)
        if x.state == DROPPED:
            return True
        if x.seen == self.log.stamp:
            return x.can
        x.seen, x.can = self.log.stamp, False
        x.can = (x.outlives and self._take(v)) or self._made_again(v, depth) or self._take(v)
        return x.can

    def _refuse(self, reason: Why, v: int) -> bool:
        call = self.log.values[v].call
        if self.cause.why == Why.NONE and call >= 0:
            self.cause = Cause(reason, "" if v == self.top else self.log.calls[call].rule.name)
        is_final = self.why in (Why.COLLECTIVE, Why.CHECKPOINTED, Why.FREED)
        if self.why == Why.NONE or reason == Why.CHECKPOINTED or (v == self.top and not is_final):
            self.why = reason
        return False

    def _keeps(self, call: Call, v: int, i: int) -> bool:
        """Whether value `i` is kept as planned, instead of `v`, which is made of it."""
        x, seen = self.log.values[i], self.log.stamp
        if x.held is not None or x.state == DROPPED or x.seen == seen:
            return self.is_available(i)
        if not self._take(i, planned=True) and not self._copies(call, v, i, planned=True):
            return False
        x.seen, x.can = seen, True
        return True

    def _take(self, v: int, planned: bool = False) -> bool:
        log, x = self.log, self.log.values[v]
        if v == self.top or log.at_hand(v) is None or log.memories[x.memory].sent:
            return False
        if x.takes_memory:  # then more bytes are kept
            if not planned and x.storage_bytes > self.may_hold:
                return False
            self.may_hold -= 0 if planned else x.storage_bytes
        elif x.storage_bytes <= COPIED:  # a larger one was there before the pass, and stays
            self.may_copy -= x.storage_bytes
            if self.may_copy < 0:
                return False
        x.runs = x.sums = x.products = 0
        x.whole, x.instead = True, self.top
        self.taken.append(v)
        return True

    def _copies(self, call: Call, v: int, i: int, planned: bool = False) -> bool:
        """Whether value `i` is gone, and can be copied from the concatenation `v` that has it as a part. A
        DenseNet concatenates all parts again in each layer, so the layers share one copy."""
        x, made = self.log.values[i], self.log.values[v].made
        if v != self.top or call.rule.name != "aten::cat" or x.held is not None or x.state == DROPPED:
            return False
        fits = planned or x.storage_bytes <= self.may_hold
        if x.made.dtype != made.dtype or not fits or not x.made.fills(x.storage_bytes):
            return False
        for read in call.reads:
            moved = read.value == i and read.shape is not None
            if moved or len(self.log.shape_of(read).sizes) != len(made.sizes):
                return False
        self.may_hold -= 0 if planned else x.storage_bytes
        x.can, x.runs, x.sums, x.products, x.whole, x.instead = True, 0, 0, 0, False, v
        self.taken.append(i)
        return True

    def _by_result(self, call: Call, v: int) -> bool:
        """Whether those results are kept from which the first one can be computed faster."""
        rule, log = call.rule, self.log
        if not rule.results or log.values[v].out:
            return False
        made = log.values[v].made
        if rule.by_statistics and not (
            call.args[rule.gate]
            and made.dtype in (torch.float32, torch.float64)
            and made.device.type == "cpu"
        ):
            return False
        results = [log.result_of(call, out) for out in rule.results]
        if any(r < 0 or log.values[r].held is None for r in results):
            return False
        return len({log.values[r].made.dtype for r in results}) == 1

    def _made_again(self, v: int, depth: int) -> bool:
        log, x = self.log, self.log.values[v]
        if x.call < 0:
            return self._refuse(Why.UNKNOWN, v)
        if not depth:
            return self._refuse(Why.TOO_DEEP, v)
        call, policy = log.calls[x.call], log.policy
        if call.rule.sends:
            return self._refuse(Why.COLLECTIVE, v)
        if not call.usable:
            return self._refuse(Why.FLAGS, v)
        if call.rule.kind in (ONCE, VIEW) or x.made.offset:
            return self._refuse(Why.NEVER, v)
        if v not in call.outs:
            return self._refuse(Why.UNKNOWN, v)
        if x.made.device.type != "cpu" and _varies(call):
            return self._refuse(Why.NEVER, v)
        if x.made.device.type != "cpu" and _is_timed(call):
            log.meets(TIMED_CALLS)
            return self._refuse(Why.TIMED, v)
        product = call.rule.kind == PRODUCT
        window = product and not call.rule.formula
        if product and not policy.everything and (not policy.products or is_costly(log, call)):
            return self._refuse(Why.NOT_REPEATED, v)
        if all(log.values[out].state != DROPPED for out in call.outs):  # else this was decided before
            call.by_result = self._by_result(call, v)
        if not call.by_result and call.rule.again is None:
            return self._refuse(Why.NEVER, v)
        if call.by_result and x.out:
            return self._refuse(Why.NOT_AT_HAND, v)
        if is_refused(log, call):
            return self._refuse(Why.OTHER_BITS, v)
        runs, sums, products = 1, 0, 0
        for position, i in enumerate(log.inputs_of(call)):
            planned = v == self.top and position in self.takes and self._keeps(call, v, i)
            if not (planned or self.is_available(i, depth - 1) or self._copies(call, v, i)):
                return self._refuse(Why.CHECKPOINTED if call.in_checkpoint else Why.NOT_AT_HAND, v)
            made = log.values[i]
            if made.held is None:
                runs = max(runs, made.runs + 1) if policy.by_plan else runs + made.runs
                sums, products = max(sums, made.sums), max(products, made.products)
        if window and products and not policy.everything:
            return self._refuse(Why.NOT_REPEATED, v)  # it is small, and the product that it needs is larger
        sums += call.rule.kind == SUM and self._adds_equals(call, v)
        products += product
        if runs > policy.runs:
            return self._refuse(Why.TOO_DEEP, v)
        if sums > policy.sums or products > policy.row:
            return self._refuse(Why.TOO_DEEP if policy.everything else Why.NOT_REPEATED, v)
        x.runs, x.sums, x.products = runs, sums, products
        return True

    def _adds_equals(self, call: Call, v: int) -> bool:
        """Whether it adds two tensors of the result's size, as a residual connection does, and not a bias."""
        numel = self.log.values[v].made.numel
        return sum(self.log.shape_of(read).numel == numel for read in call.reads) > 1


# ---------------------------------------------------------------- which values others need


def _part_of(log: Log, whole: int, part: int) -> Tensor:
    """A copy of an argument of a concatenation, taken from its result."""
    x = log.values[whole]
    call = log.calls[x.call]
    dim, at = call.args[1], [read.value for read in call.reads].index(part)
    assert x.held is not None
    with below():
        parts = shown(x.held, x.made).split([log.shape_of(read).sizes[dim] for read in call.reads], dim)
        return empty_as(log.values[part].made).copy_(parts[at])


def add_reader(log: Log, v: int, taken: Collection[int]) -> None:
    """Count one more reader of the value, and of what it is made of."""
    left = [v]
    while left:
        one = left.pop()
        x = log.values[one]
        x.refs += 1
        x.left += 1
        if x.held is not None:
            if x.sample is None:
                x.sample = x.sampled()
            there = x.is_outside and not x.copied and x.elsewhere is None and not x.parameter
            if there and x.storage_bytes <= COPIED:
                x.shown, x.held, x.copied = x.held, copy_of(x.held, x.made), True
        elif x.state == DROPPED:
            continue
        elif one in taken:
            if not x.whole:
                x.held, x.copied = _part_of(log, x.instead, one), True
            else:
                storage = log.memories[x.memory].storage()
                assert storage is not None
                x.held = over(storage, x.made)
                if x.is_outside and x.storage_bytes <= COPIED:
                    x.held, x.copied = copy_of(x.held, x.made), True
                elif not x.is_outside:
                    log.to_move.append(one)
            x.sample, x.state = x.sampled(), HELD
        else:
            x.state = DROPPED
            left += log.inputs_of(log.calls[x.call])


def hold_again(log: Log, v: int, held: Tensor) -> None:
    """Keep a dropped value that is saved again, so that others can be made from it."""
    x = log.values[v]
    x.held, x.state = held, HELD
    x.sample = sample_of(x.as_made(held))
    for i in log.inputs_of(log.calls[x.call]):
        log.remove_reader(i)


_MUCH_LARGER = 32  # times


def decide(log: Log, v: int, takes: Collection[int]) -> None:
    """Drop a saved value that is kept, if it can be rebuilt; else note why not. `takes`: as in `Walk`."""
    x, policy = log.values[v], log.policy
    if x.state == DROPPED or not x.saves or x.copied or x.lost or x.elsewhere is not None:
        return
    x.state, elements = HELD, x.made.numel
    log.largest = max(log.largest, elements)
    if x.is_outside:
        x.why = Why.NONE
    if x.is_outside or elements < policy.smallest:
        return
    if not policy.everything and elements * _MUCH_LARGER <= log.largest:
        x.why = Why.SMALLER
        return
    was, x.held = x.held, None
    walk = Walk(log, v, 0, takes=takes)
    can, taken = walk.is_available(v), walk.taken
    if not can:  # keep instead smaller values that no node saves, such as a cast's source
        again = Walk(log, v, x.storage_bytes * 3 // 4)
        can, taken = again.is_available(v), again.taken
    x.held = was
    call = log.calls[x.call]
    if not can:
        x.why, x.cause = Why.CHECKPOINTED if call.in_checkpoint else walk.why, walk.cause
        return
    assert was is not None
    inputs = log.inputs_of(call)
    for i in inputs:
        add_reader(log, i, taken)
    other = has_other_bits(log, v)
    if other != Why.NONE:
        for i in inputs:
            log.remove_reader(i)
        x.why = other
        return
    x.sample = sample_of(shown(was, x.made))
    x.state, x.why, x.held = DROPPED, Why.NONE, None
