"""A forward pass whose operator calls are recorded, so that saved tensors can be rebuilt by the same calls.

The log, the walk and the replay are C++ (csrc/nodes/record/). This module gives them the table of operators,
opens and closes a pass, and says in words what the pass kept.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from leannorm._torch import left_to_python
from leannorm.autograd.nodes import NODES
from leannorm.ops import modes
from leannorm.saving import log, reasons, rows
from leannorm.saving.evidence import is_parameter
from leannorm.saving.flags import Flags, current
from leannorm.saving.host import Moves
from leannorm.saving.ledger import Row
from leannorm.saving.limit import Limit
from leannorm.saving.moved import Hooks
from leannorm.saving.operators import OPERATORS, VARYING, Operator
from leannorm.saving.plan import Call, Pass, Taken
from leannorm.saving.plans import Following, Spent
from leannorm.saving.policy import Policy
from leannorm.saving.recorded_plan import Way
from leannorm.saving.shards import PLAIN, as_plain, has_ranks, local_of, shared_as, spec_of, storage_of
from leannorm.saving.units import Units, wrap_of
from leannorm.saving.unpacking import unpack as unpack_others
from leannorm.saving.verify import Layers, check_equal

LOG: Any = NODES
"""What records: the C++ nodes, or the same in Python if they are not built. `record_in` sets it."""

_SKIP, _ONCE, _CHEAP, _SUM, _PRODUCT = range(5)  # as Kind in rules.h
_KINDS = {"view": _SKIP, "once": _ONCE, "empty": _ONCE, "product": _PRODUCT, "window": _PRODUCT}
_FORMULAS = ("", "matrix", "convolution", "attention")
_NOTHING, _ARGUMENT, _RESULT = range(3)  # as Source in rules.h

# in the order of `Why` in log.h
_WHYS = (
    "",
    reasons.NEVER,
    reasons.NOT_REPEATED,
    reasons.NOT_AT_HAND,
    reasons.TOO_DEEP,
    reasons.OTHER_BITS,
    reasons.EDITED,
    reasons.SMALLER,
    reasons.UNSEEN,
    reasons.OTHER_FLAGS,
    reasons.PLANNED,
    reasons.COLLECTIVE,
    reasons.SHARDED,
    reasons.CHECKPOINTED,
    reasons.KEPT,
    reasons.MODE,
    reasons.UNTRIED,
    reasons.TIMED,
)
# bits of `Met` in log.h
_MET = {
    1: reasons.COMPILED_WITHIN,
    2: reasons.HOOKS_WITHIN,
    4: reasons.LIMIT_UNSEEN,
    8: reasons.BENCHMARK,
    16: reasons.FAILED,
}
SMALLEST = 1024  # elements; a smaller tensor is kept, and no reason is given
_SUMS, _CALLS = 2, 32  # the most in a row that one rebuild calls
_PRODUCTS, _PRODUCTS_OF_A_PLAN = 2, 6


def _kind(row: Operator) -> int:
    return _SUM if row.adds else _KINDS.get(row.kind, _CHEAP)


def _source(source: int | str | None) -> tuple[int, int]:
    if source is None:
        return _NOTHING, 0
    return (_RESULT, int(source)) if isinstance(source, str) else (_ARGUMENT, source)


def _in_rows(tensor: Tensor, flags: Flags) -> bool:
    """Whether the gradient of this log-softmax may read it some rows at a time."""
    try:
        return rows.fits(tensor, flags)
    except Exception:  # then it is rebuilt as a whole
        return False


class _Rows:
    """A log-softmax that was dropped by a pass that C++ records."""

    device = torch.device("cpu")

    def __init__(self, saved: Any, shape: list[int], dtype: torch.dtype) -> None:
        self._saved, self.shape, self.dtype = saved, torch.Size(shape), dtype

    def skip(self) -> None:
        """Note that a reader needed no rebuild."""
        NODES.record_skip(self._saved)

    def read(self) -> Tensor:
        """The whole tensor."""
        tensor: Tensor = NODES.record_unpack_now(self._saved)
        return tensor

    def source_of_rows(self) -> tuple[Tensor, list[torch.dtype]]:
        """The tensor from whose rows these are made, and the casts in between. It can be read once."""
        made: tuple[Tensor, list[torch.dtype]] = NODES.record_rows_of(self._saved)
        return made


def _unbuilt(saved: Any, shape: list[int], dtype: torch.dtype) -> Tensor | None:
    return rows.stand_in(_Rows(saved, shape, dtype))


def _is_captured(tensor: Tensor) -> bool:
    return modes.capturing(tensor)


def record_in(module: Any) -> None:
    """Record all later passes by this module: the C++ nodes, or `leannorm.saving.log`."""
    global LOG
    LOG = module
    for name, row in OPERATORS.items():
        formula, sources = _FORMULAS.index(row.formula), list(map(_source, row.sources))
        LOG.set_operator(
            name, _kind(row), formula, list(row.writes), row.gate, row.fills, row.moves, row.instead, sources
        )
    LOG.set_varying(list(VARYING))
    if module is NODES:
        NODES.set_capturing(_is_captured)
        NODES.set_rows(_in_rows, _unbuilt)
    LOG.set_recorded(unpack_others, local_of, spec_of, shared_as, check_equal)


record_in(log if NODES is None else NODES)


def _fake(mode: Any, meta: Tensor, device: str) -> Tensor:
    """A fake tensor that has the storage of a tensor on the meta device."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor(mode, meta, torch.device(device))


@lru_cache
def _know_fakes() -> None:
    """Have C++ record fake tensors from now on."""
    NODES.set_fakes(sys.modules["torch._subclasses.fake_tensor"].FakeTensor, _fake)


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
        if type(tensor) not in PLAIN and tensor.numel() >= SMALLEST and not reasons.of_collective(tensor):
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
    ) -> None:
        """`hooks`: for what is kept. `layers`: verify rebuilt tensors, and name the layer."""
        self.reasons = Counter[str]()
        self._moves = Moves(self.reasons) if hooks == "host" else None
        hold = partial(_hold, self.reasons, hooks) if isinstance(hooks, Hooks) else None
        self._timeline: tuple[Any, ...] = ()
        self._way = None if following is None else Way(following, _WHYS, LOG, self._moves)
        self._units = units = Units()
        if LOG is NODES and "torch._subclasses.fake_tensor" in sys.modules:
            _know_fakes()
        self._pass = LOG.RecordedPass(
            policy.products,
            policy.everything,
            _SUMS,
            _CALLS,
            _PRODUCTS_OF_A_PLAN if policy.everything else _PRODUCTS,
            current(),
            None if self._way is None else self._way.ask,
            layer=None if layers is None else layers.at_work,
            hold=hold if self._moves is None else self._moves.hold,
            owns=units.owner_runs if units.exist else None,
            other=partial(_other, self.reasons),
            subclasses="torch.distributed.tensor" in sys.modules,
            gathers=has_ranks(),
            smallest=SMALLEST,
        )
        if limit is not None:
            self._pass.set_limit(limit.nbytes, limit.learned)
        self.recorded = Recorded(self._pass.saved, self._moves)
        self.missed = 0  # bytes that the process needs at least, if that is more than the limit
        self.pack: Callable[[Tensor], Any] = LOG.record_pack

    def begins_within_a_call(self) -> None:
        """Note that the pass begins while an operator runs. C++ knows by itself what that operator calls."""
        if isinstance(self._pass, log.RecordedPass):
            self._pass.begins_within_a_call()

    def close(self) -> None:
        """Stop recording; note what the pass saved, and how much of it is still in memory."""
        if self.following is not None and self.following.whole:
            self._timeline = self._pass.timeline()
        self._pass.close()
        if self._moves is not None and self.following is not None and not self.following.whole:
            self._moves.end()
        self.missed = self._pass.missed()
        self.recorded.close()
        if (unit := self._units.freed_first) is not None:
            self.recorded.whys[_WHYS.index(reasons.SHARDED)] = reasons.sharded(*wrap_of(unit))
        self.seen = self._pass.packed()
        self.is_mostly_gone = len(self.recorded) < self._pass.seen() / 8
        met = self._pass.met() if self.seen else 0
        self.reasons.update(reason for bit, reason in _MET.items() if met & bit)
        if self._way is not None:
            self.reasons.update(self._way.reasons)

    @property
    def following(self) -> Following | None:
        """How the last step of the pass follows plans."""
        return None if self._way is None else self._way.following

    @property
    def calls(self) -> list[Call]:
        """The saved tensors that a plan may keep or drop."""
        return [] if self._way is None else self._way.calls(self._pass.places())

    def passed(self) -> Pass:
        """What this pass saved, to make a plan from."""
        assert self._way is not None
        device = torch.device(self._pass.device())
        return self._way.passed(self._timeline, self.seconds(), self._pass.places(), self.reasons, device)

    def seconds(self) -> Taken:
        """What each call of the pass has taken."""
        seconds: Taken = self._pass.seconds()
        return seconds

    @property
    def spent(self) -> Spent | None:
        """What the step is going to take, if the log measures that."""
        spent: Spent | None = self._pass.spent()
        return spent

    def forget(self) -> None:
        """Release what is only used to make a plan."""
        self._timeline = ()


class Recorded:
    """What one pass keeps now; after `close`, what it kept when it closed."""

    def __init__(self, saved: Callable[[], Any], moves: Moves | None) -> None:
        self._now: Callable[[], Any] | None = saved
        self._then: Any = None
        self._moves, self._moved = moves, 0
        self.whys = list(_WHYS)

    def close(self) -> None:
        """Store what is kept now."""
        assert self._now is not None
        self._moved, self._moves = self.moved, None
        self._then, self._now = self._now(), None

    @property
    def _saved(self) -> Any:
        return self._then if self._now is None else self._now()

    @property
    def kept(self) -> int:
        """Bytes that are kept."""
        nbytes: int = self._saved.held
        return nbytes

    @property
    def moved(self) -> int:
        """Bytes of these that are on the host."""
        return self._moved if self._moves is None else self._moves.nbytes or self._moves.nbytes_then

    @property
    def rebuilt(self) -> int:
        """Bytes that are rebuilt."""
        nbytes: int = self._saved.dropped
        return nbytes

    def __len__(self) -> int:
        return len(self._saved)

    def rows(self) -> list[Row]:
        """The fields of a `Record` for each tensor."""
        return [
            (name, torch.Size(shape), dtype, nbytes, dropped, reasons.made_of(self.whys[why * by_node], of))
            for name, shape, dtype, nbytes, dropped, why, by_node, of in self._saved.rows()
        ]
