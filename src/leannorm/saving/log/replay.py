"""Rebuilds values by the calls that made them, from values that are kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from leannorm.saving.log.log import Log
from leannorm.saving.log.recorder import IN_LIST
from leannorm.saving.log.tensors import (
    below,
    copy_of,
    empty_as,
    geometry_of,
    matches,
    over,
    share,
    shown,
    stream_of,
)
from leannorm.saving.log.values import DROPPED, Call, Value

_aten = torch.ops.aten


def is_of_program(call: Call) -> bool:
    """Whether the operator is neither torch's nor leannorm's."""
    return call.rule.op.namespace not in ("aten", "leannorm")


class Replay:
    """One rebuild. `is_trial`: the log keeps nothing that it makes."""

    def __init__(self, log: Log, is_trial: bool = False) -> None:
        self.log, self.is_trial = log, is_trial
        self.made: dict[int, Tensor] = {}

    def value(self, top: int) -> Tensor:
        """The value, as its call made it, or an alias of its memory."""
        log, values = self.log, self.log.values
        order, uses, seen, left = list[int](), Counter[int](), set[int](), [top]
        while left:  # depth first, so that a value comes after all that it is made from
            v = left.pop()
            if v < 0:
                order.append(~v)
            elif v not in seen:
                seen.add(v)
                there = None if self.is_trial and v == top else self.available(v)
                if there is not None:
                    self.made[v] = there
                    continue
                inputs = log.inputs_of(log.calls[values[v].call])
                left += [~v, *inputs]
        uses.update(i for call in {values[v].call for v in order} for i in log.inputs_of(log.calls[call]))
        uses[top] += 1
        for v in order:
            if v in self.made:
                continue
            call = log.calls[values[v].call]
            self._run(call)
            for i in log.inputs_of(call):
                self.used(i)
                uses[i] -= 1
                if not uses[i] and not self.is_trial:
                    self.made.pop(i, None)
        return self.made[top]

    def available(self, v: int) -> Tensor | None:
        x = self.log.values[v]
        if x.held is not None and (x.copied or x.elsewhere is None):
            share(x.held, x.on)
            return self._checked(x, x.held)
        if x.rebuilt is not None:
            share(x.rebuilt, x.rebuilt_on)
            return x.rebuilt
        if x.elsewhere is None:
            # A trial takes the memory that the pass has made, so that it needs little more
            storage = self.log.at_hand(v) if self.is_trial else None
            return None if storage is None else over(storage, x.made)
        brought: Tensor = x.elsewhere.bring(x)
        if not self.is_trial:
            x.rebuilt, x.rebuilt_on = brought, stream_of(x.made.device)
        return brought if x.elsewhere.is_other else self._checked(x, brought)

    def used(self, v: int) -> None:
        """Note that one reader has the value, which is freed after the last one."""
        x = self.log.values[v]
        if self.is_trial:
            return
        x.left -= 1
        if x.left <= 0:
            x.rebuilt, x.left = None, x.refs

    def _checked(self, x: Value, tensor: Tensor) -> Tensor:
        edited = not x.copied and (x.lost or not x.is_unedited(self.log))
        if edited or not matches(x.sample, x.as_made(tensor)):
            raise RuntimeError(
                f"a tensor of shape {list(x.made.sizes)} has been modified by an inplace operation after"
                " leannorm.lean()'s forward pass had read it, and is needed to rebuild another one: edit it"
                " after backward(), edit a copy of it, or leave lean() out of this step"
            )
        return tensor

    # ------------------------------------------------------------ calls

    def _given(self, call: Call, v: int) -> Tensor:
        """What the call reads. In a trial an operator of the program gets copies, as it might write into what
        the program has unseen."""
        made, is_copied = self.made[v], self.is_trial and is_of_program(call)
        return copy_of(made, self.log.values[v].made) if is_copied else made

    def _run(self, call: Call) -> None:
        log = self.log
        read = [
            shown(self._given(call, one.value), log.shape_of(one)) if log.is_read(call, i) else None
            for i, one in enumerate(call.reads)
        ]
        busy, log.busy = log.busy, True
        try:
            with call.flags.set(), below(), torch.set_grad_enabled(call.grad_mode):
                if call.by_result:
                    results = {out: self.made[log.result_of(call, out)] for out in call.results_read}
                    self._keep(log.result_of(call, 0), self._by_results(call, read, results))
                elif call.before >= 0:
                    self._edit(call, read)
                else:
                    self._make(call, read)
        finally:
            log.busy = busy

    @staticmethod
    def _arguments(call: Call, read: list[Any]) -> list[Any]:
        full = [list(one) if isinstance(one, list) else one for one in call.args]
        for one, tensor in zip(call.reads, read, strict=True):
            tensor = tensor.detach() if tensor is not None and tensor.requires_grad else tensor
            if one.place < 0:
                full[one.at] = tensor
            else:
                full[one.at][one.place] = tensor
        return full

    def _called(self, call: Call, op: Any, read: list[Any]) -> Any:
        full = self._arguments(call, read)
        named = {name: full[call.rule.places[name]] for name in call.named}
        return op(*full[: call.positional], **named)

    def _may_share(self, call: Call, read: list[Any]) -> bool:
        """Whether it copies a value that only the replay has. Nothing is written into either."""
        if self.is_trial or call.rule.name != "aten::clone" or len(call.outs) != 1:
            return False
        x, copy = self.log.values[call.reads[0].value], self.log.values[call.outs[0]]
        has_all = read[0].untyped_storage().nbytes() == copy.storage_bytes
        is_ours = x.held is None and x.elsewhere is None
        return is_ours and has_all and geometry_of(read[0]) == copy.made

    def _make(self, call: Call, read: list[Any]) -> None:
        shares = self._may_share(call, read)
        result = read[0].detach() if shares else self._called(call, call.rule.again, read)
        for v in call.outs:
            out = self.log.values[v].out
            one = result[out % IN_LIST] if isinstance(result, (tuple, list)) else result
            if self._is_wanted(v):
                self._keep(v, one)

    def _is_wanted(self, v: int) -> bool:
        x = self.log.values[v]
        return self.is_trial or (x.state == DROPPED and x.refs > 0 and x.held is None and x.rebuilt is None)

    def _keep(self, v: int, tensor: Tensor) -> None:
        x = self.log.values[v]
        if geometry_of(tensor) != x.made:
            if tensor.shape != x.made.sizes or tensor.dtype != x.made.dtype:
                name = self.log.calls[x.call].rule.name
                raise RuntimeError(
                    f"leannorm.lean(): {name} gave another shape or dtype when it was called again"
                )
            tensor = empty_as(x.made).copy_(tensor)
        self.made[v] = tensor
        if not self.is_trial:
            x.rebuilt, x.rebuilt_on = tensor, stream_of(tensor.device)

    def _by_results(self, call: Call, read: list[Any], results: dict[int, Tensor]) -> Tensor:
        """The call's first result, by another operator that reads the call's other results."""
        full = self._arguments(call, read)
        if call.rule.instead is not None:
            given = (
                results[int(at)] if isinstance(at, str) else None if at is None else full[at]
                for at in call.rule.sources
            )
            made = call.rule.instead(*given)
            return made if isinstance(made, Tensor) else made[0]
        # torch's kernel computes fma(x, scale, fma(-mean, scale, bias)), with these arguments too
        x, weight, bias = full[:3]
        mean, rstd = results[1], results[2]
        scale = rstd if weight is None else torch.mul(rstd, weight)
        shift = torch.addcmul(torch.zeros_like(mean) if bias is None else bias, mean, scale, value=-1)
        statistics = torch.zeros_like(mean), torch.ones_like(mean)
        made = _aten.native_batch_norm.default(x, scale, shift, *statistics, False, 0.0, 0.0)
        return made[0]  # type: ignore[no-any-return]

    def _edit(self, call: Call, read: list[Any]) -> None:
        """Repeat a call that writes in place: by its functional variant, or on a copy of what was there."""
        v = call.outs[0]
        x, rule, first = self.log.values[v], call.rule, call.reads[0]
        fills = self.log.fills_all(call)
        if rule.functional and first.shape is None and not fills:
            return self._keep(v, self._called(call, rule.again, read))
        base = empty_as(x.made) if fills else copy_of(read[0], x.made)
        read[0] = base if first.shape is None else shown(base, first.shape)
        self._called(call, rule.op, read)
        self._keep(v, base)
