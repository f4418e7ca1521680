"""Was a node made in this pass, when, under which flags? Told by the node, or by what it saved in the pass.

Autograd numbers the nodes of every thread by themselves, so a node's number alone may be that of another
thread's node. Where the C++ nodes are built, a node also tells its thread. Elsewhere a node was made in this
pass if it saved something in it, or if it reads what a node made in it has put out; of any other node nothing
is known, and a step that depends on it is compared every time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from leannorm.autograd.nodes import NODES
from leannorm.saving.flags import Flags, current
from leannorm.saving.graph import saved_values
from leannorm.saving.values import Value

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # of this thread's next node

_MOST_READ = 64  # nodes, looked at for one
_FARTHEST = 1 << 14  # numbers of nodes between two


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

    def made(self, node: Any) -> bool:
        """Was the node made in this pass? False where that is not known."""
        if NODES is not None and self._thread is not None:
            of_thread: bool = NODES.thread_of(node) == self._thread
            return of_thread and bool(node._sequence_nr() >= self._since)
        return self.saved_since(node, 0)

    def made_after(self, node: Any, value: Value) -> bool | None:
        """Was the node made after this value was packed? None where that is not known."""
        if value.provenance is not self:
            return None
        if self._thread is not None:
            return bool(node._sequence_nr() >= value.seen_at) if self.made(node) else None
        return self.saved_since(node, value.order + 1) or None

    def saved_since(self, node: Any, order: int) -> bool:
        """Did the node, or one that was made before it as it reads it, save what was packed then or later?"""
        saved = (value for one in _with_read(node) for value in saved_values(one))
        return any(value.provenance is self and value.order >= order for value in saved)

    def comes_to(self, root: Any, value: Value) -> bool:
        """Does a backward pass that begins at this node come to the one that saved the value first? False
        where that is far away, or not known."""
        if NODES is not None:
            found: bool = NODES.comes_to(root, value.seen_at)
            return found
        first, last = value.seen_at - 1, root._sequence_nr()
        if not first <= last < first + _FARTHEST:
            return False
        nodes, seen = [root], set[int]()
        for node in nodes:  # which grows
            if node._sequence_nr() == first:
                return node is root or any(
                    one.seen_at == value.seen_at and one.provenance is value.provenance
                    for one in saved_values(node)
                )
            for before in (producer for producer, _ in node.next_functions if producer is not None):
                number = before._sequence_nr()  # a leaf's is larger than all
                if first <= number < last and number not in seen:
                    seen.add(number)
                    nodes.append(before)
        return False


def _with_read(node: Any) -> Iterator[Any]:
    """The node and those that it was made of, the nearest first, whatever the number of paths to them."""
    nodes = [node]
    for one in nodes:
        yield one
        if len(nodes) < _MOST_READ:
            nodes += [p for p, _ in one.next_functions if p is not None and p not in nodes]


_RECENT = 2048  # nodes that are being made, and many before them


class FlagLog:
    """The flags during one forward pass, by the sequence numbers of its nodes.

    A norm or a product saves its inputs while it runs. So the flags read at each save are those under which
    the saving node ran.
    """

    def __init__(self, provenance: Provenance) -> None:
        self._provenance = provenance
        self._from, self._flags = [-1], [current()]
        self._order = 0  # of the first tensor that was packed under the last of them
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
        if len(self._while_next) > 2 * _RECENT:  # a pass around many steps
            for old in [*islice(self._while_next, _RECENT)]:
                del self._while_next[old]
        now = self._while_next[number] = current()
        if now is not self._flags[-1]:
            self._from.append(number)
            self._flags.append(now)
            self._order = self._provenance.order

    def of(self, node: Any) -> tuple[Flags, bool]:
        """The flags under which the node ran, and True. If that is not sure: the flags now, and False.

        While a node runs, the next number is 1 above the node's, or a little more if it made inner nodes.
        """
        if not self._provenance.made(node):
            return self._flags[-1], False
        if len(self._flags) == 1:
            return self._flags[0], True
        if not self._provenance.orders_nodes:
            return self._flags[-1], self._provenance.saved_since(node, self._order)
        made = node._sequence_nr()
        if made + 1 in self._while_next:
            return self._while_next[made + 1], True
        i = bisect_right(self._from, made + 1) - 1
        sure = i + 1 == len(self._from) or self._from[i + 1] > made + 3
        return self._flags[i if sure else -1], sure


class Edits:
    """Sees which operators work in place, in a pass that had to compare, and in all later ones: it takes time
    at each operator. Without the C++ nodes nothing is seen."""

    wanted = False

    def __init__(self) -> None:
        self._watches = False
        if self.wanted:
            self.watch()

    def watch(self) -> None:
        """From the next node on."""
        Edits.wanted = True
        if not self._watches and NODES is not None:
            NODES.watch_edits()
            self._watches = True

    def close(self) -> None:
        """At the end of the pass."""
        if self._watches:
            NODES.stop_watching()
            self._watches = False
