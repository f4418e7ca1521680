"""From a joint graph (forward and backward pass in one) to the step that the planner reads.

The compiler fuses: an elementwise result is written to memory only if a kernel of another kind reads it, or
if several kernels read it and each would have to read many tensors to compute it. So each moment of the step
is a node whose result is in memory, and its inputs are found through the nodes whose results are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from leannorm.compiled import operators
from leannorm.planning.outcome import Outcome, outcome
from leannorm.planning.timeline import Moment, Step, Value
from leannorm.saving.rates import Rates

MOST_READS = 4
"""A result that several kernels read is written to memory if computing it reads more large tensors."""
NEGLIGIBLE = 4096
"""Values of less than the largest one's bytes over this are left to torch."""
_FUSED_SHARE = 0.1
"""Computing a fused value again, in passes over its bytes: it takes no memory, but arithmetic."""
_CACHED, _IN_CACHES = 8 << 20, 0.75
"""A value of up to so many bytes, made again on a CPU, is read in its caches, as is what it was made of: this
is the share of its kernel's price that it takes, at most (`benchmarks.lean_compiled`)."""
BY_ELEMENT = ("fused", "reduced")
"""Kinds of kernels that can compute for themselves, element by element, what they read."""
SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


class Joint(NamedTuple):
    """`nodes`: the node of each value. `kept`: `nbytes` of values that torch may keep and a plan may not.
    `kinds`: of every node, by `operators.kind`. `forward`: what the forward pass itself needs."""

    step: Step
    nodes: Sequence[fx.Node]
    kept: dict[int, int]
    kinds: dict[fx.Node, str]
    forward: Collection[fx.Node]

    def saving(self, names: Iterable[str]) -> Outcome:
        """What happens if these nodes are saved."""
        known = {node.name: node for node in self.kinds}
        index = {node: i for i, node in enumerate(self.nodes)}
        saved = {operators.behind_views(known[name]) for name in names if name in known}
        values = list(self.step.values)
        for i, nbytes in self.kept.items():
            if self.nodes[i] in saved:
                values[i] = values[i]._replace(nbytes=nbytes)
        kept = {index[n] for n in saved if n in index} | {
            i for i, v in enumerate(values) if v.seconds is None
        }
        return outcome(replace(self.step, values=values), frozenset(range(len(values))) - kept)


class Reader:
    """Reads one joint graph; `step` returns the result."""

    def __init__(
        self, graph: fx.Graph, num_fwd_outputs: int, rates: Rates, channels_last: bool = False
    ) -> None:
        """`channels_last`: whether the compiler will lay out convolutions so."""
        self.rates, self.channels_last = rates, channels_last
        self.nodes = [n for n in graph.nodes if n.op != "output"]
        returned = tree_leaves(graph.output_node().args)
        self.outputs = {n for n in returned[:num_fwd_outputs] if isinstance(n, fx.Node)}
        self.gradients = [n for n in returned[num_fwd_outputs:] if isinstance(n, fx.Node)]
        self.kinds = {n: operators.kind(n) for n in self.nodes}
        self.sizes = {n: operators.nbytes(n) for n in self.nodes}
        self.backward = self._backward()
        self.forward = self._ancestors(self.outputs)
        self.copied = set(self._laid_out_anew()) if channels_last else set()
        self.below: dict[fx.Node, tuple[fx.Node, ...]] = {}  # what is in memory and is read to compute a node
        self.stored: set[fx.Node] = set()
        for node in self.nodes:
            self._place(node)
        runs = [
            n for n in self.nodes if n in self.stored and n.op != "placeholder" and self.kinds[n] != "part"
        ]
        self.runs = [n for n in runs if n in self.forward], [n for n in runs if n in self.backward]
        self.start, self.end = len(self.runs[0]), len(self.runs[0]) + len(self.runs[1])
        self.moment = {n: i for i, n in enumerate([*self.runs[0], *self.runs[1]])}
        for node in self.nodes:
            if self.kinds[node] == "part" and node.all_input_nodes[0] in self.moment:
                self.moment[node] = self.moment[node.all_input_nodes[0]]

    def _backward(self) -> set[fx.Node]:
        """The nodes that depend on incoming gradients."""
        backward: set[fx.Node] = set()
        for node in self.nodes:
            if node.op == "placeholder":
                if any(word in str(node.target) for word in ("tangents", "bwd_", "backward_state")):
                    backward.add(node)
            elif node.meta.get("partitioner_tag") == "must_be_in_backward" or not backward.isdisjoint(
                node.all_input_nodes
            ):
                backward.add(node)
        return backward

    def _ancestors(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """These nodes and everything that they are computed from, in the forward pass."""
        ancestors = set(nodes) - self.backward
        for node in reversed(self.nodes):
            if node in ancestors:
                ancestors.update(n for n in node.all_input_nodes if n not in self.backward)
        return ancestors

    def _laid_out_anew(self) -> Iterator[fx.Node]:
        """Weights and inputs of convolutions in another layout, of each of which the compiler saves a
        copy."""
        convolutions = (n for n in self.forward if operators.formula(n) == "convolution")
        for node in self._ancestors(convolutions):
            for value in operators.tensors(node) if node.op == "placeholder" else ():
                if value.dim() == 4 and not value.is_contiguous(memory_format=torch.channels_last):
                    yield node

    def _place(self, node: fx.Node) -> None:
        kind = self.kinds[node]
        below = tuple(dict.fromkeys(s for n in node.all_input_nodes for s in self.below[n]))
        if kind == "view" or (kind == "fused" and not self._lies_in_memory(node, below)):
            self.below[node] = below
        else:
            self.stored.add(node)
            self.below[node] = (node,)

    def _lies_in_memory(self, node: fx.Node, below: Sequence[fx.Node]) -> bool:
        readers = self._readers(node)
        if node in self.outputs or any(self.kinds.get(n) not in BY_ELEMENT for n in readers):
            return True
        large = [n for n in below if self.sizes[n] * 4 >= self.sizes[node]]
        return len(readers) > 1 and len(large) > MOST_READS

    def _readers(self, node: fx.Node) -> list[fx.Node]:
        """The users of a node, through views."""
        readers, left = [], list(node.users)
        while left:
            user = left.pop()
            if self.kinds.get(user) == "view" and user.users:
                left += list(user.users)
            else:
                readers.append(user)
        return readers

    def joint(self, pinned: Collection[fx.Node]) -> Joint:
        """The step, and what its values are. `pinned`: nodes that may not run again."""
        reads = self._reads()
        significant = self._significant(n for r in reads for n in r)
        shows = self._shown(significant)
        wanted = {v for r in reads for n in r for v in shows[n]}
        for node in reversed(self.nodes):
            if node in wanted:
                wanted.update(v for n in node.all_input_nodes for v in shows[n])
        nodes = [n for n in self.nodes if n in wanted]
        index = {n: i for i, n in enumerate(nodes)}

        def indices(sources: Iterable[fx.Node]) -> tuple[int, ...]:
            return tuple(dict.fromkeys(index[v] for n in sources for v in shows[n]))

        made, until = self._in_forward()
        values = [
            self._value(n, n in pinned)._replace(
                made_of=indices(n.all_input_nodes), made=made[n], until=until.get(n, made[n] - 1)
            )
            for n in nodes
        ]
        beside, writes = self._beside(reads, wanted, made, until)
        step = Step(
            values,
            self.start,
            [
                Moment(
                    indices(n for n in r if n not in self.backward), self.kinds[run] not in BY_ELEMENT, free
                )
                for run, r, free in zip(self.runs[1], reads, writes, strict=True)
            ],
            beside,
            frozenset(),
            sum(self._seconds(n) for runs in self.runs for n in runs),
        )
        kept = {
            i: self.sizes[n]
            for i, n in enumerate(nodes)
            if values[i].nbytes is None and operators.is_tensor(n)
        }
        return Joint(step, nodes, kept, self.kinds, self.forward)

    def _reads(self) -> list[list[fx.Node]]:
        """What each moment of the backward pass reads: nodes of the forward pass, and gradients in memory."""
        through: dict[fx.Node, tuple[fx.Node, ...]] = {}
        reads: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            read = tuple(dict.fromkeys(r for n in node.all_input_nodes for r in through[n]))
            through[node] = read if node in self.backward and node not in self.stored else (node,)
            if node in self.backward:
                reads[node] = list(read)
        moments = [reads[n] for n in self.runs[1]]
        if moments:
            returned = (r for n in self.gradients for r in through[n])
            moments[-1] = list(dict.fromkeys([*moments[-1], *returned]))
        return moments

    def _significant(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """The nodes large enough to be planned, and those that a user's checkpoint runs again."""
        before = self._ancestors(nodes)
        least = max((self.sizes[n] for n in before if operators.is_tensor(n)), default=0) // NEGLIGIBLE
        return {
            n
            for n in before
            if (n.op == "call_function" or n in self.copied)
            and (self.sizes[n] > least or n.meta.get("recompute") in RECOMPUTED)
        }

    def _shown(self, significant: Collection[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """For each node the values that reading it reads: itself, the source of a view, or none."""
        shows: dict[fx.Node, tuple[fx.Node, ...]] = {}
        for node in self.nodes:
            if self.kinds[node] == "view":
                shows[node] = tuple(dict.fromkeys(v for n in node.all_input_nodes for v in shows[n]))
            else:
                shows[node] = (node,) if node in significant else ()
        return shows

    def _in_forward(self) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
        """When the forward pass makes each node, and when it last reads it (of those in memory there)."""
        made: dict[fx.Node, int] = {}
        until: dict[fx.Node, int] = {}
        for node in self.nodes:
            if node in self.backward:
                continue
            made[node] = max((made[n] for n in node.all_input_nodes), default=0)
            if node in self.moment:
                made[node] = self.moment[node]
                until[node] = max(until.get(node, 0), made[node])
                for source in (s for n in node.all_input_nodes for s in self.below[n]):
                    until[source] = max(until.get(source, 0), made[node])
        for node in self.outputs:
            for source in self.below.get(node, ()):
                until[source] = self.start - 1
        return made, {n: m for n, m in until.items() if n in self.forward and n in self.moment}

    def _seconds(self, node: fx.Node) -> float:
        read, written = self._bytes_read(node), self.sizes[node]
        return operators.seconds(node, read, written, self.rates, self.channels_last)

    def _bytes_read(self, node: fx.Node) -> int:
        return sum(
            self.sizes[s] for s in dict.fromkeys(s for n in node.all_input_nodes for s in self.below[n])
        )

    def _value(self, node: fx.Node, pinned: bool) -> Value:
        kind, size, policy = self.kinds[node], self.sizes[node], node.meta.get("recompute")
        one = operators.is_tensor(node)
        keep = size if one else None
        value = Value(
            keep, None, again=size if one else 0, fused=kind == "fused", whole=kind not in BY_ELEMENT
        )
        made_by = node.all_input_nodes[0] if kind == "part" else node
        if policy in RECOMPUTED or (made_by not in self.forward and policy not in SAVED):
            return value._replace(
                nbytes=None, seconds=0.0
            )  # a user's checkpoint; the backward pass has it anyway
        small = kind == "reduced" and 4 * size <= self._bytes_read(node)
        if policy in SAVED or pinned or kind == "once" or small:
            return value
        if kind == "part":
            return value._replace(seconds=0.0)
        if node not in self.stored:
            return value._replace(seconds=_FUSED_SHARE * size / self.rates.memory)
        seconds = self._seconds(node)
        if one and size <= _CACHED and node.meta["val"].device.type == "cpu":
            # a kept value would be read from memory, this one was just written
            seconds = _IN_CACHES * (seconds - size / self.rates.memory)
        return value._replace(seconds=seconds)

    def _beside(
        self,
        reads: Sequence[Sequence[fx.Node]],
        wanted: Collection[fx.Node],
        made: dict[fx.Node, int],
        until: dict[fx.Node, int],
    ) -> tuple[list[int], list[int]]:
        """Bytes of everything alive at each moment that is not a value; and the bytes that each moment of the
        backward pass may write over a value, since no freed gradient has made space for them."""
        change = [0] * (self.end + 1)
        writes = [self.sizes[n] if self.kinds[n] == "fused" else 0 for n in self.runs[1]]

        def alive(node: fx.Node, first: int, last: int) -> None:
            change[first] += self.sizes[node]
            change[last + 1] -= self.sizes[node]

        last_read: dict[fx.Node, int] = defaultdict(lambda: -1)
        for moment, read in enumerate(reads, self.start):
            for node in read:
                last_read[node] = moment
        for node in self.nodes:
            if node not in self.stored or not operators.is_tensor(node):
                continue
            if node in self.backward:
                first, last = self.moment.get(node, self.start), last_read[node]
                if (
                    last > first
                    and node.op != "placeholder"
                    and writes[last - self.start] == self.sizes[node]
                ):
                    writes[last - self.start] = 0
                    last -= 1
                alive(node, first, max(first, last))
            elif node in until and node not in wanted:
                alive(node, made[node], until[node])
        for moment, node in enumerate(self.runs[1], self.start):
            working = operators.working_bytes(node, channels_last=self.channels_last)
            change[moment] += working
            change[moment + 1] -= working
        return list(accumulate(change[: self.end])), writes
