"""Which cases of a long sweep `make test` runs: one of N, with every value of each parameter that has few.

    @pytest.mark.sampled(of=4)

The others run under `-m conformance`, as do those that are marked so one by one. Each release of torch in
`make matrix` takes another sample (LEANNORM_SAMPLE is the number of its turn).
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import pytest

TURN = int(os.environ.get("LEANNORM_SAMPLE", "0"))
_GOLDEN = (5**0.5 - 1) / 2  # the multiples' fractions lie evenly, whatever the sizes of a product


def leave_samples(items: list[Any]) -> None:
    """Mark the rest of each sampled test for `-m conformance`."""
    tests: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("conformance"):
            tests[item.nodeid.split("[")[0]].append(item)
    for cases in tests.values():
        of = cases[0].get_closest_marker("sampled").kwargs["of"]
        chosen = sample([_values(case) for case in cases], of, TURN)
        for i, case in enumerate(cases):
            if i not in chosen:
                case.add_marker(pytest.mark.conformance)


def sample(cases: list[dict[str, int]], of: int, turn: int = 0) -> set[int]:
    """Which cases are run, of {parameter: which value it has}; in `of` turns each is."""
    share = -(-len(cases) // of)
    values: dict[str, set[int]] = defaultdict(set)
    for case in cases:
        for name, value in case.items():
            values[name].add(value)
    few = {name for name, of_it in values.items() if len(of_it) <= share}
    order = sorted(range(len(cases)), key=lambda i: i * _GOLDEN % 1)
    start = turn % of * share
    order = order[start:] + order[:start]
    chosen: set[int] = set()
    seen: set[tuple[str, int]] = set()
    for place, i in enumerate(order):
        here = {(name, value) for name, value in cases[i].items() if name in few}
        if place < share or not here <= seen:
            chosen.add(i)
            seen |= here
    return chosen


def _values(case: Any) -> dict[str, int]:
    """By identity, as the cases of a test share its parameters' values; `indices` may count cases."""
    return (
        {name: id(value) for name, value in case.callspec.params.items()} if hasattr(case, "callspec") else {}
    )
