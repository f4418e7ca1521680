"""Was a node made in this pass, when, under which flags? Told by the node, or by what it saved in the pass.

Autograd numbers the nodes of every thread by themselves, so a node's number alone may be that of another
thread's node. Where the C++ nodes are built, a node also tells its thread. Elsewhere a node was made in this
pass if it saved something in it, or if it reads what a node made in it has put out; of any other node nothing
is known, and a step that depends on it is compared every time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch

from leannorm.autograd.nodes import NODES
from leannorm.saving.flags import Flags, current
from leannorm.saving.graph import saved_values
from leannorm.saving.values import Value

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # of this thread's next node

_MOST_PRODUCERS = 20  # in a row, that saved nothing


class Provenance:
    """One forward pass, from this object's creation on, in the thread that creates it."""

    def __init__(self) -> None:
        self.order = 0  # of the tensor that is packed now
        self._since = sequence_number()
        self._thread = None if NODES is None else NODES.this_thread()

    @property
    def orders_nodes(self) -> bool:
        """Is it known of any two nodes of this pass which of them came first?"""
        return self._thread is not None

    def made(self, node: Any, most: int = _MOST_PRODUCERS) -> bool:
        """Was the node made in this pass? False where that is not known."""
        if NODES is not None and self._thread is not None:
            of_thread: bool = NODES.thread_of(node) == self._thread
            return of_thread and bool(node._sequence_nr() >= self._since)
        if any(value.provenance is self for value in saved_values(node)):
            return True
        if most == 0:
            return False
        producers = (producer for producer, _ in node.next_functions)
        return any(producer is not None and self.made(producer, most - 1) for producer in producers)

    def made_after(self, node: Any, value: Value) -> bool | None:
        """Was the node made after this value was packed? None where that is not known."""
        if value.provenance is not self:
            return None
        if self._thread is not None:
            return bool(node._sequence_nr() >= value.seen_at) if self.made(node) else None
        saved = saved_values(node)
        return any(v.provenance is self and v.order > value.order for v in saved) or None


class FlagLog:
    """The flags during one forward pass, by the sequence numbers of its nodes.

    A norm or a product saves its inputs while it runs. So the flags read at each save are those under which
    the saving node ran.
    """

    def __init__(self, provenance: Provenance) -> None:
        self._provenance = provenance
        self._from, self._flags = [-1], [current()]
        self._while_next: dict[int, Flags] = {}  # flags at saves, by the number of the next node
        self._last = -1

    @property
    def only(self) -> Flags | None:
        """The flags of the pass until now; None where they have changed."""
        return self._flags[0] if len(self._flags) == 1 else None

    def record(self, number: int) -> None:
        """Record the flags while a tensor is saved; `number` is the next node's sequence number."""
        if number == self._last:  # the same node saves another tensor
            return
        self._last = number
        now = self._while_next[number] = current()
        if now is not self._flags[-1]:
            self._from.append(number)
            self._flags.append(now)

    def of(self, node: Any) -> tuple[Flags, bool]:
        """The flags under which the node ran, and True. If that is not sure: the flags now, and False.

        While a node runs, the next number is 1 above the node's, or a little more if it made inner nodes.
        """
        if not self._provenance.made(node):
            return self._flags[-1], False
        if len(self._flags) == 1:
            return self._flags[0], True
        if not self._provenance.orders_nodes:
            return self._flags[-1], False
        made = node._sequence_nr()
        if made + 1 in self._while_next:
            return self._while_next[made + 1], True
        i = bisect_right(self._from, made + 1) - 1
        sure = i + 1 == len(self._from) or self._from[i + 1] > made + 3
        return self._flags[i if sure else -1], sure
