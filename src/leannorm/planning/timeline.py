"""One training step as the planner sees it, in integers and seconds, without torch.

A step is a sequence of moments: first those of the forward pass, then those of the backward pass. Values are
what the backward pass reads from the forward pass. Each is kept until its last reader, or made again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Value(NamedTuple):
    """What the backward pass may read.

    - `nbytes`: the bytes that keeping it takes, 0 if it is in memory anyway; None if it cannot be kept.
    - `seconds`: the price of making it again, once; None if it cannot be made again.
    - `made_of`: the values that it is made of, by index.
    - `made`, `until`: the moments of the forward pass that make it, and that read it last. If `until` is
      before `made`, it is never in memory there.
    - `again`: its bytes while it is in memory without being kept, as a rule `nbytes`.
    - `fused`: whether each reader can compute it, so that it is in memory only if a reader needs that.
    - `whole`: whether making it needs the values that it is made of in memory.
    - `spares`: the bytes that its last reader saves if the value is made again only for that reader.
    - `ready`: the moment after which it may be moved to the host; -1 if it may not.
    """

    nbytes: int | None
    seconds: float | None
    made_of: tuple[int, ...] = ()
    made: int = 0
    until: int = 0
    again: int = 0
    fused: bool = False
    whole: bool = True
    spares: int = 0
    ready: int = -1


class Moment(NamedTuple):
    """A moment of the backward pass.

    `reads` has the values that it reads, and `whole` says whether it needs them in memory. `writes` is the
    size of a result that overwrites a value of that size, if this moment is the last to read that value.
    """

    reads: Collection[int]
    whole: bool = True
    writes: int = 0


@dataclass(frozen=True, eq=False)
class Step:
    """A training step.

    - `values`: in the order in which they are made: each is made of earlier ones.
    - `forward`: the number of moments of the forward pass.
    - `beside`: for every moment of both passes, the bytes in use other than values: gradients, temporaries.
    - `stock`: the values that are kept without a plan. The others are made again.
    - `seconds`: the price of the step without a plan.
    - `held`: the bytes that are kept whatever is chosen, in addition to the values.
    - `taken`: the seconds of each moment, and `link`: bytes per second to the host; only if values may move.
    """

    values: Sequence[Value]
    forward: int
    backward: Sequence[Moment]
    beside: Sequence[int]
    stock: frozenset[int]
    seconds: float
    held: int = 0
    taken: Sequence[float] = ()
    link: float = 0.0

    @cached_property
    def read(self) -> tuple[list[int], list[int], list[bool]]:
        """For each value, the first and the last moment that reads it, and whether one needs it in memory."""
        count, never = len(self.values), len(self.beside)
        first, last, whole = [never] * count, [-1] * count, [False] * count
        for moment, (reads, in_memory, _) in enumerate(self.backward, self.forward):
            for i in reads:
                first[i], last[i] = min(first[i], moment), moment
                whole[i] |= in_memory
        return first, last, whole

    @cached_property
    def unkept(self) -> frozenset[int]:
        """The values that cannot be kept, and are made again wherever they are needed."""
        return frozenset(i for i, value in enumerate(self.values) if value.nbytes is None)

    @cached_property
    def free(self) -> list[int]:
        """The values that could be kept, and could also be made again from values that could be either."""
        possible: list[bool] = []
        for value in self.values:
            made_of_possible = all(possible[s] or self.values[s].nbytes is not None for s in value.made_of)
            possible.append(value.seconds is not None and made_of_possible)
        return [i for i, value in enumerate(self.values) if possible[i] and value.nbytes is not None]

    @cached_property
    def change(self) -> list[int]:
        """For each moment, how many bytes of values come into use in the forward pass, less those whose use
        ends there."""
        change = [0] * (len(self.beside) + 1)
        for value in self.values:
            if value.made <= value.until:
                change[value.made] += value.again
                change[value.until + 1] -= value.again
        return change
