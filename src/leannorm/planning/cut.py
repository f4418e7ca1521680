"""Which values to keep and which to make again, at the least cost, as minimum cuts of a network.

At a rate of seconds per byte a choice costs (bytes kept)·rate + (seconds of making again). The cheapest
choice is a minimum cut of this network: each value has two nodes, its way in and its way out. An edge from
the source to the way in has the price of making the value again. An edge from the way in to the way out has
the price of keeping it. From the way out, edges that are never cut lead to the values made of it, and to the
sink if the backward pass reads it.

At a higher rate, every value that was made again is still made again. So the choices of all rates are one
chain (Gallo, Grigoriadis and Tarjan, 1989). It is found by solving for a rate between two neighbours until
nothing new lies there. Prices are whole numbers, so the result is exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from copy import copy
from typing import NamedTuple

from leannorm.planning.timeline import Step

_PICO = 10**12


class Choice(NamedTuple):
    """What is made again, and what that costs.

    `held` is the bytes kept, and `price` the picoseconds of making `again` again. `side` says of each value's
    way in and way out whether it is on the sink's side of the cut.
    """

    again: frozenset[int]
    held: int
    price: int
    side: bytes


def price(seconds: float | None) -> int | None:
    """Seconds as whole picoseconds."""
    return None if seconds is None else round(seconds * _PICO)


class Cuts:
    """The cuts of a step. Values in `fixed` are never made again, nor those without a price."""

    def __init__(self, step: Step, fixed: Collection[int] = ()) -> None:
        self.held = [value.nbytes for value in step.values]
        self.price = [price(v.seconds) if i not in fixed else None for i, v in enumerate(step.values)]
        self.made_of = [value.made_of for value in step.values]
        self.read = {i for moment in step.backward for i in moment.reads}

    def chain(self, least: int = 0) -> list[Choice]:
        """Every choice that is the cheapest at some rate, from the fewest seconds to the fewest bytes.

        Between neighbours that differ by at most `least` bytes nothing is looked for.
        """
        everything = sum(p for p in self.price if p is not None)
        first, last = self._solve(0, 1), self._solve(everything + 1, 1)
        whole: Sequence[int] = range(len(self.held))
        choices, left = [first], [(first, last, whole)] if last.held < first.held else []
        while left:
            low, high, free = left.pop()
            free = [i for i in free if low.side[2 * i : 2 * i + 2] != high.side[2 * i : 2 * i + 2]]
            between = self._between(low, high, free) if low.held - high.held > least else None
            if between is None:
                choices.append(high)
            else:
                left += [(between, high, free), (low, between, free)]
        return choices

    def weighed(self, held: Sequence[int | None], prices: Sequence[int | None]) -> frozenset[int]:
        """What the cheapest choice makes again if a value costs `held` to keep and `prices` to make again."""
        other = copy(self)
        other.held, other.price = list(held), list(prices)
        return other._solve(1, 1).again

    def _between(self, low: Choice, high: Choice, free: Sequence[int]) -> Choice | None:
        """A choice that is cheaper than both, at the rate at which both cost the same."""
        of_bytes, of_seconds = high.price - low.price, low.held - high.held
        if of_bytes <= 0 or of_seconds <= 0:
            return None
        between = self._solve(of_bytes, of_seconds, low, high, free)
        cost, before = (of_bytes * c.held + of_seconds * c.price for c in (between, low))
        return between if cost < before else None

    def _solve(
        self,
        of_bytes: int,
        of_seconds: int,
        low: Choice | None = None,
        high: Choice | None = None,
        free: Sequence[int] | None = None,
    ) -> Choice:
        """The cheapest cut with the smallest sink's side, which contains that of `low` and lies in that of
        `high`. `free`: the values by which these differ; no edge that is never cut leads from others to them.
        """
        count = len(self.held)
        low = low or Choice(frozenset(), 0, 0, bytes(2 * count))
        beyond = b"\1" * (2 * count) if high is None else high.side
        free = range(count) if free is None else free
        nodes = [node for i in free for node in (2 * i, 2 * i + 1) if not low.side[node] and beyond[node]]
        place = {node: number for number, node in enumerate(nodes, 2)}
        most = (of_bytes * (self.held[i] or 0) + of_seconds * (self.price[i] or 0) for i in free)
        wide = 1 + sum(most)
        network = _Network(2 + len(nodes))
        for i in free:
            of_making, of_keeping = self.price[i], self.held[i]
            way_in = place.get(2 * i, low.side[2 * i])
            way_out = place.get(2 * i + 1, low.side[2 * i + 1])
            network.add(0, way_in, wide if of_making is None else of_seconds * of_making)
            network.add(way_in, way_out, wide if of_keeping is None else of_bytes * of_keeping)
            for source in self.made_of[i]:
                network.add(place.get(2 * source + 1, 1), way_in, wide)
            if i in self.read:
                network.add(way_out, 1, wide)
        network.saturate()
        steps, side, again = network.steps_to_sink(), bytearray(low.side), set(low.again)
        for node, number in place.items():
            side[node] = steps[number] >= 0
        held, price = low.held, low.price
        for i in free:
            makes, keeps = side[2 * i], side[2 * i + 1] > side[2 * i]
            held += (keeps - (low.side[2 * i + 1] > low.side[2 * i])) * (self.held[i] or 0)
            price += (makes - low.side[2 * i]) * (self.price[i] or 0)
            if makes:
                again.add(i)
        return Choice(frozenset(again), held, price, bytes(side))


class _Network:
    """The maximum flow from node 0, the source, to node 1, the sink, by Dinic's method."""

    def __init__(self, nodes: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(nodes)]
        self.to: list[int] = []
        self.room: list[int] = []  # the capacity left on an edge and, next to it, on its reverse

    def add(self, a: int, b: int, room: int) -> None:
        if a != b and a != 1 and b != 0 and room:
            self.edges[a].append(len(self.to))
            self.edges[b].append(len(self.to) + 1)
            self.to += [b, a]
            self.room += [room, 0]

    def steps_to_sink(self) -> list[int]:
        """For each node, the number of edges with capacity left that lead to the sink; -1 if none do."""
        to, room, edges = self.to, self.room, self.edges
        steps = [-1] * len(edges)
        steps[1] = 0
        left = deque([1])
        while left:
            node = left.popleft()
            for edge in edges[node]:
                if steps[to[edge]] < 0 and room[edge ^ 1]:
                    steps[to[edge]] = steps[node] + 1
                    left.append(to[edge])
        return steps

    def saturate(self) -> None:
        while (steps := self.steps_to_sink())[0] >= 0:
            self._fill(steps)

    def _fill(self, steps: list[int]) -> None:
        """Send flow along all shortest paths, until none of that length is left."""
        to, room, edges = self.to, self.room, self.edges
        following, path, node = [0] * len(edges), list[int](), 0
        while True:
            if node == 1:
                least = min(room[edge] for edge in path)
                for edge in path:
                    room[edge] -= least
                    room[edge ^ 1] += least
                full = next(i for i, edge in enumerate(path) if not room[edge])
                node = to[path[full] ^ 1]
                del path[full:]
                continue
            mine, i = edges[node], following[node]
            while i < len(mine) and not (room[mine[i]] and steps[to[mine[i]]] == steps[node] - 1):
                i += 1
            following[node] = i
            if i < len(mine):
                path.append(mine[i])
                node = to[mine[i]]
            elif path:
                node = to[path.pop() ^ 1]
                following[node] += 1
            else:
                return
