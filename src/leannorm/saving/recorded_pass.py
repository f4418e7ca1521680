"""A forward pass whose operator calls are recorded, so that saved tensors can be rebuilt by the same calls.

The log, the walk and the replay are C++ (`cpp_log.py`), or Python (`log/`) if the C++ nodes are not built.
This module opens and closes a pass of either, and says in words what the pass kept.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from leannorm._torch import left_to_python
from leannorm.autograd.nodes import NODES
from leannorm.saving import cpp_log, log, reasons
from leannorm.saving.evidence import is_parameter
from leannorm.saving.host import Moves
from leannorm.saving.ledger import Record
from leannorm.saving.limit import Limit
from leannorm.saving.moved import Hooks
from leannorm.saving.planned_pass import PlannedPass
from leannorm.saving.plans import Following
from leannorm.saving.policy import Policy
from leannorm.saving.reasons import Cause, Why
from leannorm.saving.shards import PLAIN, as_plain, storage_of
from leannorm.saving.units import Units, wrap_of
from leannorm.saving.verify import Layers

LOG: Any = log if NODES is None else cpp_log
"""What records passes. Both have the same names."""

# bits of `Met` in log.h
_MET = {
    1: reasons.COMPILED_WITHIN,
    2: reasons.HOOKS_WITHIN,
    4: reasons.LIMIT_UNSEEN,
    8: reasons.BENCHMARK,
    16: reasons.FAILED,
}
SMALLEST = 1024  # elements; a smaller tensor is kept, and no reason is given


@left_to_python
def _hold(told: Counter[str], hooks: Hooks, tensor: Tensor) -> Callable[[], Tensor] | None:
    """Give the tensor to the user's hooks alone. Returns a function that gets it back; None if they fail."""
    try:
        return partial(hooks.unpack, hooks.pack(tensor))
    except Exception as error:
        told[reasons.failed(tensor, error)] += 1
        return None


@left_to_python
def _other(told: Counter[str], tensor: Tensor) -> tuple[list[int], int, int] | None:
    """The sizes, place and bytes of a tensor that the log keeps but cannot read; None for a parameter."""
    with as_plain(tensor):
        if is_parameter(tensor):
            return None
        if (
            type(tensor) not in PLAIN
            and tensor.numel() >= SMALLEST
            and not hasattr(type(tensor), "trigger_wait")
        ):
            told[reasons.SUBCLASSES] = 1
        shape = [tensor.numel()] if tensor.is_nested else list(tensor.shape)
        return shape, *storage_of(tensor)


class RecordedPass:
    """One pass, recorded from its creation until `close`."""

    def __init__(
        self,
        policy: Policy,
        following: Following | None,
        hooks: Hooks | Literal["host"] | None,
        layers: Layers | None,
        limit: Limit | None,
        within_a_call: bool = False,
    ) -> None:
        """`hooks`: for what is kept. `layers`: verify rebuilt tensors, and name the layer.
        `within_a_call`: the pass begins while an operator runs."""
        self.reasons = Counter[str]()
        self._moves = Moves(self.reasons) if hooks == "host" else None
        hold = partial(_hold, self.reasons, hooks) if isinstance(hooks, Hooks) else None
        self._timeline: tuple[Any, ...] = ()
        in_cpp = LOG is not log
        self._way = None if following is None else PlannedPass(following, in_cpp, self._moves, self.reasons)
        self._units = Units()
        self._pass = LOG.begin(
            policy._replace(smallest=SMALLEST),
            self._way,
            layer=None if layers is None else layers.at_work,
            hold=hold if self._moves is None else self._moves.hold,
            other=partial(_other, self.reasons),
            subclasses="torch.distributed.tensor" in sys.modules,
            units=self._units,
        )
        if limit is not None:
            self._pass.set_limit(limit.nbytes, limit.learned)
        if within_a_call and LOG is log:  # C++ knows by itself what that operator calls
            self._pass.begins_within_a_call()
        self.recorded = Recorded(self._pass.saved, self._moves)
        self.missed = 0  # bytes that the process needs at least, if that is more than the limit
        self.pack: Callable[[Tensor], Any] = LOG.record_pack

    def close(self) -> None:
        """Stop recording; note what the pass saved, and how much of it is still in memory."""
        if self.following is not None and self.following.whole:
            self._timeline = self._pass.timeline()
        self._pass.close()
        if self._moves is not None and self.following is not None and not self.following.whole:
            self._moves.end()
        self.missed = self._pass.missed
        self.recorded.close()
        if (unit := self._units.freed_first) is not None:
            self.recorded.sharded = reasons.sharded(*wrap_of(unit))
        self.seen, self.places = self._pass.packed, self._pass.places  # the latter: what a plan may drop
        self.is_mostly_gone = len(self.recorded) < self._pass.seen / 8
        met = self._pass.met if self.seen else 0
        self.reasons.update(reason for bit, reason in _MET.items() if met & bit)

    @property
    def following(self) -> Following | None:
        """How the last step of the pass follows plans."""
        return None if self._way is None else self._way.following

    def end(self) -> str | None:
        """Give the pass to the plans; a reason, if it is not as planned."""
        assert self._way is not None
        kept, rebuilt, moved = self.recorded.kept, self.recorded.rebuilt, self.recorded.moved
        return self._way.end(self._pass, self._timeline, (kept - moved) / max(kept + rebuilt, 1))


class Recorded:
    """What one pass keeps now; after `close`, what it kept when it closed."""

    def __init__(self, saved: Callable[[], Any], moves: Moves | None) -> None:
        self._saved, self._moves, self._moved = saved, moves, 0
        self.sharded = Why.FREED.sentence

    def close(self) -> None:
        """Store what is kept now."""
        then, self._moved, self._moves = self._saved(), self.moved, None
        self._saved = lambda: then

    @property
    def kept(self) -> int:
        """Bytes that are kept."""
        nbytes: int = self._saved().held
        return nbytes

    @property
    def moved(self) -> int:
        """Bytes of these that are on the host."""
        return self._moved if self._moves is None else self._moves.nbytes or self._moves.nbytes_then

    @property
    def rebuilt(self) -> int:
        """Bytes that are rebuilt."""
        nbytes: int = self._saved().dropped
        return nbytes

    def __len__(self) -> int:
        return len(self._saved())

    def records(self) -> list[Record]:
        """One record for each tensor."""
        return [
            Record(name, torch.Size(shape), dtype, nbytes, dropped, self._why(Cause(Why(why * by_node), of)))
            for name, shape, dtype, nbytes, dropped, why, by_node, of in self._saved().rows()
        ]

    def _why(self, cause: Cause) -> str:
        return cause.in_words().replace(Why.FREED.sentence, self.sharded)
