"""The log of what passes of one thread, that are open at once, call, read and make."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from leannorm.saving.log.tensors import Geometry, beside, counter_of, geometry_of, over
from leannorm.saving.log.values import DROPPED, FREE, Call, Memory, Policy, Read, Value, results_read


class Log:
    """What passes of one thread that are open at once write into."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.calls: list[Call] = []
        self.memories: list[Memory] = []
        self.listed: list[int] = []  # values that nodes have saved, in order
        self.by_storage: dict[int, int] = {}
        self.unsettled: list[tuple[int, int]] = []  # values just written, and those before them
        self.leaves: dict[int, int] = {}  # of a value: how many saved objects hold it themselves
        self.packs = 0  # tensors that were packed
        self.others: list[Any] = []  # weak references
        self.policy = Policy()
        self.passes: list[Any] = []  # that are open, the innermost last
        self.to_move: list[int] = []  # values that may be held elsewhere
        self.times: Any = None  # if a plan is to be made of the pass
        self.recorder: Any = None  # the mode that writes it
        self.behind = -1  # torch's count of nodes when the log began within an operator, which goes on
        self.subclasses = False  # may there be any, such as DTensors?
        self.stamp = 0
        self.alive = 0  # saved tensors
        self.task = (
            -1
        )  # the last backward pass that began before the passes had closed, by the engine's number
        self.noted_packs = 0  # all that was saved before it
        self.largest = 0  # of what was saved
        self.busy = False  # does this thread make calls itself, which are none of the log's?
        self.closed = False
        self.gone: list[tuple[int, Any, int]] = []  # saved objects that are to be let go of
        self._lock, self._depth = threading.RLock(), 0

    def __enter__(self) -> Log:
        """Two threads may come here, and one twice: what is freed in here may free what was saved."""
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

    def forget_saved(self, v: int, of: Any, backward_passes: int) -> None:
        """A node has let go of what it saved, in this pass behind so many backward passes."""
        self.values[v].saves -= 1
        self.alive -= 1
        of.alive -= 1
        of.alive_then -= backward_passes < of.backward_passes
        self.release(v)

    def release(self, v: int) -> None:
        """One reader of the value less."""
        left = [v]
        while left:
            x = self.values[left.pop()]
            x.refs -= 1
            if x.refs > 0:
                x.left = min(x.left, x.refs)  # its reader may have had it
                continue
            dropped = x.state == DROPPED
            x.held = x.elsewhere = x.rebuilt = x.shown = x.sample = None
            x.state, x.left, x.copied = FREE, 0, False
            if dropped:
                left += self.inputs_of(self.calls[x.call])

    def __del__(self) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Of the memories, whose addresses may come again."""
        for memory in self.memories:
            torch.UntypedStorage._free_weak_ref(memory.weak)
        self.memories, self.by_storage = [], {}

    def begin_anew(self) -> None:
        """A pass in which all that was saved is gone, such as one around a whole training."""
        self.settle()
        self.let_go()
        for kept in (self.values, self.calls, self.listed, self.to_move):
            kept.clear()
        self.leaves.clear()
        self.others = [one for one in self.others if one() is not None]
        self.largest = 0

    def backward_begins(self) -> None:
        """A backward pass runs before the passes that are open have closed: what it is going to free is
        noted."""
        task = torch._C._current_graph_task_id()
        if task < 0 or task == self.task or self.packs == self.noted_packs:
            return
        with self:
            self.task, self.noted_packs = task, self.packs
            for one in self.passes:
                one.note()

    def waits(self) -> bool:
        """Until the next node is made: a kernel that had begun before the log calls operators itself."""
        if self.behind >= 0 and self.behind != torch._C._autograd._get_sequence_nr():
            self.behind = -1
        return self.behind >= 0

    def meets(self, what: int) -> None:
        """Each open pass notes what it met."""
        for one in self.passes:
            one.meet(what)

    # ------------------------------------------------------------ values

    def new_value(self, memory: int, tensor: Tensor, call: int) -> int:
        """Called `beside` the program."""
        nbytes = tensor.untyped_storage().nbytes()
        self.values.append(Value(memory, call, geometry_of(tensor), nbytes, counter_of(tensor)))
        return len(self.values) - 1

    def new_memory(self, tensor: Tensor, call: int) -> int:
        with beside():
            v = self.new_value(len(self.memories), tensor, call)
        weak: Any = tensor.untyped_storage()._weak_ref()
        self.by_storage[weak] = len(self.memories)
        self.memories.append(Memory(weak, v))
        return v

    def value_of(self, tensor: Tensor, moved: int = 0) -> int:
        """The value that the tensor shows now; -1: its memory is new. `moved`: by how much a call that is
        about to write may have moved its counter."""
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
        x.lost = True  # the counter has moved, and no operator has written
        with beside():
            memory.current = self.new_value(number, tensor, -1)
        return memory.current

    def value_or_new(self, tensor: Tensor, moved: int = 0) -> int:
        known = self.value_of(tensor, moved)
        return self.new_memory(tensor, -1) if known < 0 else known

    def written(self, number: int, tensor: Tensor, call: int) -> None:
        """The call has written the memory; its version counter moves behind it."""
        memory, one = self.memories[number], self.calls[call]
        before = memory.current
        old = self.values[before]
        if one.rule.reshapes:  # the contents are as they were
            self.unsettled.append((before, before))
            return
        with beside():
            memory.current = made = self.new_value(
                number, tensor, call if one.rule.edits or one.rule.sends else -1
            )
        self.values[made].made = old.made
        if one.rule.edits:  # else it is written beside the result
            one.outs.append(made)
            one.before = before
        if old.saves and not old.elsewhere and old.shown is None:
            storage = (
                memory.storage()
            )  # whoever has saved it reads what is there, if autograd has not seen it
            if storage is not None and storage.nbytes() >= old.made.extent:
                old.shown = over(storage, old.made)
        self.unsettled.append((made, before))

    def settle(self) -> None:
        """The counters of what was written have moved."""
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

    def shape_of(self, read: Read) -> Geometry:
        return self.values[read.value].made if read.shape is None else read.shape

    def inputs_of(self, call: Call) -> list[int]:
        """What the call is made again from, each as often as it is read."""
        inputs = [read.value for i, read in enumerate(call.reads) if self.is_read(call, i)]
        return inputs + [self.result_of(call, out) for out in results_read(call)]

    def is_read(self, call: Call, i: int) -> bool:
        """Is this argument read when the call is made again?"""
        rule, read = call.rule, call.reads[i]
        if call.by_result and rule.instead is not None:
            return read.at in rule.sources
        if rule.gate >= 0 and call.args[rule.gate] and read.at in rule.writes:
            return False  # what the call itself has moved since
        return i > 0 or not self.fills_all(call)

    def fills_all(self, call: Call) -> bool:
        """Does the call fill all of the memory that it writes?"""
        if not call.rule.fills or call.before < 0 or not call.reads:
            return False
        first, x = call.reads[0], self.values[call.before]
        return first.at == 0 and first.shape is None and x.made.nbytes == x.storage_bytes

    def result_of(self, call: Call, out: int) -> int:
        return next((v for v in call.outs if self.values[v].out == out), -1)
