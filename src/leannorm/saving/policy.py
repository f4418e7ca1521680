"""What a setting rebuilds: norms and other cheap calls, products too, or all that can be rebuilt."""

from __future__ import annotations

from typing import NamedTuple


class Policy(NamedTuple):
    """`products`: also outputs of convolutions, matrix products and attention that take few operations per
    byte. `everything`: whatever the log can call again, as a plan decides what to keep."""

    products: bool
    everything: bool = False


NORM, CONV, LEANEST = Policy(products=False), Policy(products=True), Policy(products=True, everything=True)
