"""What a setting rebuilds: norms and other cheap calls, products too, or all that can be rebuilt."""

from __future__ import annotations

from typing import NamedTuple


class Policy(NamedTuple):
    """What a rebuild may call. `products`: convolutions, matrix products and attention that take few
    operations per byte. `everything`: whatever the log can call again, as a plan decides what to keep.
    `sums` and `row`: the most sums and products in a row. `runs`: the most calls for one value; with a plan,
    the longest chain of them.
    """

    products: bool
    everything: bool = False
    sums: int = 2
    runs: int = 32
    row: int = 2
    smallest: int = 1  # elements; a smaller tensor is kept
    by_plan: bool = False

    def with_plan(self) -> Policy:
        """The same, where a plan decides how much is made again in a row."""
        return self._replace(sums=1 << 20, row=1 << 20, runs=2048, by_plan=True)


NORM, CONV, LEANEST = Policy(False), Policy(True), Policy(True, everything=True, row=6)
