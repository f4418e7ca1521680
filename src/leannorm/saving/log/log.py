"""The log of the calls of one thread's open passes: what they read and make."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from leannorm.saving.log.spent import Spent
from leannorm.saving.log.tensors import Geometry, beside, counter_of, geometry_of, over, stream_of
from leannorm.saving.log.values import DROPPED, FREE, Call, Memory, Read, Value
from leannorm.saving.policy import LEANEST


@dataclass(slots=True, eq=False)
class Alive:
    """How many of one pass's saved tensors nodes still have."""

    now: int = 0
    noted: int = 0  # how many there were when a backward pass last began within the pass
    then: int = 0  # how many of these are left
    backward_passes: int = 0  # how many have begun within the pass

    def is_over(self) -> bool:
        """Whether a backward pass has freed what was noted: what is saved from then on is another step's."""
        return self.noted > 0 and self.then * 8 < self.noted


class Log:
    """The log that all open passes of one thread share."""

    def __init__(self, subclasses: bool) -> None:
        self.unsettled: list[tuple[int, int]] = []  # values just written, and those before them
        self.packs = 0  # how many tensors were packed
        self.others: list[Any] = []  # weak references to tensors that the log cannot read
        self.policy = LEANEST
        self.passes: list[Any] = []  # the open ones, the innermost last
        self.may_plan = True  # whether a plan may be made from an open pass, as of the last call
        self.measures = False  # whether an open pass has a goal, so that calls are timed
        self.spent: Spent | None = None  # what the step takes, if so
        self.recorder: Any = None  # the mode that writes the log, and later watches `exposed`
        self.exposed: dict[int, int] = {}  # by value, the address of memory that other code can still write
        self.behind = -1  # torch's count of nodes when the log began within an operator that still runs
        self.subclasses = subclasses  # whether there may be any, such as DTensors
        self.stamp = 0
        self.alive = 0  # how many saved tensors nodes still have
        self.task = -1  # the engine's number of the last backward pass that began before the passes closed
        self.noted_packs = 0  # how many tensors had been packed before that
        self.busy = False  # whether the log itself makes calls in this thread, which are not recorded
        self.closed = False
        self.gone: list[tuple[int, Alive, int]] = []  # saved objects to forget at the end of `with self`
        self._lock, self._depth = threading.RLock(), 0
        self._begin()

    def _begin(self) -> None:
        self.values: list[Value] = []
        self.calls: list[Call] = []
        self.memories: list[Memory] = []
        self.by_storage: dict[int, int] = {}
        self.living: list[Memory] = []  # those that had not been freed when the last call began
        # what nodes have saved: the pass, the place in it, the value, and the node's call
        self.saved: list[tuple[Alive, int, int, int]] = []
        self.listed: list[int] = []  # values that nodes have saved, in order
        self.saved_by = set[tuple[int, int]]()  # values, and the calls whose nodes have saved them
        self.leaves = Counter[int]()  # by value: how many `Saved` objects refer to its tensor themselves
        self.to_move: list[int] = []  # values that a user's hooks may get
        self.seconds: dict[int, float] = {}  # by call what it took, once a pass with a goal is open
        self.largest = 0  # elements of the largest saved tensor
        self.failed = False  # in the middle of a change: nothing else is dropped

    def __enter__(self) -> Log:
        """Lock the log. Two threads may enter, and one twice, as a tensor freed here may free a saved one."""
        self._lock.acquire()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._depth == 1 and self.gone:
            self.forget_saved(*self.gone.pop())
        self._depth -= 1
        self._lock.release()
        if self.closed and not self.exposed and self.recorder is not None:
            self.recorder.rest()

    def forget_saved(self, v: int, of: Alive, backward_passes: int) -> None:
        """Note that a node has released what it saved after so many backward passes within the pass."""
        self.values[v].saves -= 1
        self.alive -= 1
        of.now -= 1
        of.then -= backward_passes < of.backward_passes
        self.remove_reader(v)
        if not self.alive and self.spent is not None:
            self.spent.end()

    def remove_reader(self, v: int) -> None:
        """Count one reader of the value less, and free it after the last one."""
        left = [v]
        while left:
            v = left.pop()
            x = self.values[v]
            x.refs -= 1
            if x.refs <= x.saves:
                self.exposed.pop(v, None)
            if x.refs > 0:
                x.left = min(x.left, x.refs)  # the reader may have read it before
                continue
            dropped = x.state == DROPPED
            x.held = x.elsewhere = x.rebuilt = x.shown = x.sample = None
            x.state, x.left, x.copied = FREE, 0, False
            if dropped:
                left += self.inputs_of(self.calls[x.call])

    def let_go(self) -> None:
        """Release the memories, so that their addresses may be used again."""
        self.memories, self.living, self.by_storage = [], [], {}

    def start_over(self) -> None:
        """Forget the calls of a pass whose saved tensors are all gone, such as one around a training loop."""
        self.settle()
        self._begin()
        self.others = [one for one in self.others if one() is not None]

    def backward_begins(self) -> None:
        """Have each open pass note what a backward pass, which runs before they close, is going to free."""
        task = torch._C._current_graph_task_id()
        if task < 0 or task == self.task or self.packs == self.noted_packs:
            return
        with self:
            self.task, self.noted_packs = task, self.packs
            for one in self.passes:
                one.note()

    def note_freed(self) -> None:
        """Note the memories that are gone when the next call begins, if a plan may be made."""
        self.may_plan = any(one.may_plan for one in self.passes)
        if self.may_plan:
            for memory in self.living:
                memory.died = len(self.calls) if memory.expired() else -1
            self.living = [memory for memory in self.living if memory.died < 0]

    def waits(self) -> bool:
        """Whether calls are not recorded yet, until the next node is made: they are parts of an operator that
        had begun before the log."""
        if self.behind >= 0 and self.behind != torch._C._autograd._get_sequence_nr():
            self.behind = -1
        return self.behind >= 0

    def meets(self, what: int) -> None:
        """Have each open pass note what it met."""
        for one in self.passes:
            one.met |= what

    # ------------------------------------------------------------ values

    def new_value(self, memory: int, tensor: Tensor, call: int) -> int:
        """A new version of the memory. Call it within `beside()`."""
        counter, nbytes, on = counter_of(tensor), tensor.untyped_storage().nbytes(), stream_of(tensor.device)
        of, outside = geometry_of(tensor), call < 0
        made = Value(memory, call, of, nbytes, counter, counter._version, outside, not outside, on)
        if memory < len(self.memories):
            before = self.values[self.memories[memory].current]
            made.outlives, made.logged, made.weight = before.outlives, before.logged, before.weight
        self.values.append(made)
        return len(self.values) - 1

    def new_memory(self, tensor: Tensor, call: int) -> int:
        with beside():
            v = self.new_value(len(self.memories), tensor, call)
        memory = Memory(tensor.untyped_storage(), v)
        self.by_storage[memory.cdata] = len(self.memories)
        self.memories.append(memory)
        self.living.append(memory)
        return v

    def value_of(self, tensor: Tensor, moved: int = 0) -> int:
        """The value that the tensor shows now, or -1 if its memory is new. `moved`: by how much a call that
        is about to write may already have moved its counter."""
        number = self.by_storage.get(tensor.untyped_storage()._cdata)
        if number is None:
            return -1
        memory = self.memories[number]
        x = self.values[memory.current]
        now = x.counter._version
        if x.version == now:
            return memory.current
        if x.version + moved == now or x.is_marked(self):
            x.marked, x.version = x.marked or not moved, now
            return memory.current
        x.lost = True  # the counter moved, but no recorded operator wrote
        with beside():
            memory.current = self.new_value(number, tensor, -1)
        return memory.current

    def value_or_new(self, tensor: Tensor, moved: int = 0) -> int:
        known = self.value_of(tensor, moved)
        if known < 0:
            known, base = self.new_memory(tensor, -1), tensor if tensor._base is None else tensor._base
            self.values[known].weight = base.is_leaf and base.requires_grad
        return known

    def written(self, number: int, tensor: Tensor, call: int) -> None:
        """Note that the call has written the memory, whose version counter moves later."""
        memory, one = self.memories[number], self.calls[call]
        before = memory.current
        old = self.values[before]
        if one.rule.reshapes:  # the contents have not changed
            self.unsettled.append((before, before))
            return
        with beside():
            memory.current = made = self.new_value(
                number, tensor, call if one.rule.edits or one.rule.sends else -1
            )
        self.values[made].made = old.made
        if one.rule.edits:  # else the memory is not the call's result
            one.outs.append(made)
            one.before = before
        if old.saves and not old.elsewhere and old.shown is None:
            storage = memory.storage()  # nodes read what is there now, if autograd has not seen the write
            if storage is not None and storage.nbytes() >= old.made.extent:
                old.shown = over(storage, old.made)
        self.unsettled.append((made, before))

    def settle(self) -> None:
        """Take over the counters of what was written, which have moved by now."""
        for made, before in self.unsettled:
            x, old = self.values[made], self.values[before]
            moved = x.counter._version - x.version
            if 0 <= moved <= 2 - (x.call < 0 or self.calls[x.call].grad_mode):
                x.version = x.counter._version
            if made != before and old.counter._version != old.version:
                old.shown = None
        self.unsettled.clear()

    def is_there(self, v: int) -> bool:
        number = self.values[v].memory
        return number < len(self.memories) and self.memories[number].current == v

    def at_hand(self, v: int) -> torch.UntypedStorage | None:
        """The memory of a value that is still what the call made; None if it was freed or written."""
        x = self.values[v]
        if not self.is_there(v) or x.counter._version != x.version:
            return None
        storage = self.memories[x.memory].storage()
        return None if storage is None or storage.nbytes() < x.made.extent else storage

    def shape_of(self, read: Read) -> Geometry:
        return self.values[read.value].made if read.shape is None else read.shape

    def inputs_of(self, call: Call) -> list[int]:
        """The values that are read when the call is made again, each as often as it is read."""
        inputs = [read.value for i, read in enumerate(call.reads) if self.is_read(call, i)]
        return inputs + [self.result_of(call, out) for out in call.results_read]

    def made_again_for(self, v: int, known: Collection[int] = ()) -> Iterator[int]:
        """The value, and all that are made again before it, without `known` ones and their sources."""
        left, seen = [v], set(known)
        while left:
            one = left.pop()
            if one not in seen and (one == v or self.values[one].held is None):
                seen.add(one)
                yield one
                left += self.inputs_of(self.calls[self.values[one].call])

    def is_read(self, call: Call, i: int) -> bool:
        """Whether this argument is read when the call is made again."""
        rule, read = call.rule, call.reads[i]
        if call.by_result and rule.sources:
            return read.at in rule.sources
        if rule.gate >= 0 and call.args[rule.gate] and read.at in rule.writes:
            return False  # it is a statistic that the call itself has updated
        return i > 0 or not self.fills_all(call)

    def fills_all(self, call: Call) -> bool:
        """Whether the call fills all of the memory that it writes."""
        if not call.rule.fills or call.before < 0 or not call.reads:
            return False
        first, x = call.reads[0], self.values[call.before]
        return first.at == 0 and first.shape is None and x.made.nbytes == x.storage_bytes

    def result_of(self, call: Call, out: int) -> int:
        return next((v for v in call.outs if self.values[v].out == out), -1)
