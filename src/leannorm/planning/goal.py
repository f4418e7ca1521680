"""The goal that a plan is made for, and the rules of the arguments that name it."""

from __future__ import annotations

import re
from math import isfinite
from numbers import Real
from typing import NamedTuple

from leannorm._errors import InputError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_LEAST_PEAK = 2**20  # bytes: a smaller number was meant as gigabytes, or as a share


class Goal(NamedTuple):
    """What a plan has to reach: one of these fields, or one of two pairs.

    `worth` with `overhead`: at most `overhead` is spent. `budget` with `overhead`: the budget is reached if
    that costs at most `overhead`; what costs at most `free` more is dropped as well.

    `budget` is a share of the bytes that the baseline keeps. `overhead` is a share of the step's seconds, and
    so is `free`, which is small enough to be neglected. `peak` is a share of the baseline's peak (a float up
    to 1), or bytes (an integer). `limit` is the memory that the process may have, in bytes, or "device".
    `worth` is what it would be worth to free all bytes of the baseline, in shares of the step's seconds: a
    byte is freed if that costs less. `moves`: values may also wait on the host.
    """

    worth: float | None = None
    budget: float | None = None
    overhead: float | None = None
    peak: float | int | None = None
    limit: int | str | None = None
    free: float | None = None
    moves: bool = False

    @property
    def promises_time(self) -> bool:
        """Whether time was asked for, so that `overhead` is not just the most that bytes may cost."""
        return self.overhead is not None and self.budget is None


HALF = Goal(budget=0.5, overhead=0.1, free=0.01)
NORM = Goal(worth=0.3, overhead=0.03)
CONV = Goal(worth=0.6, overhead=0.12)


def goal(
    recompute: str | None,
    budget: float | None,
    overhead: float | None,
    peak: float | int | str | None,
    limit: int | str | None = None,
) -> Goal:
    """The goal that these arguments of `lean()` and `compile_options()` ask for. Raises InputError."""
    if recompute not in (None, "norm", "conv"):
        meant = f": for a share of the bytes write budget={recompute!r}" if _is_number(recompute) else ""
        raise InputError(f'recompute is "norm" or "conv"; got {recompute!r}{meant}')
    asked = {"budget": budget, "overhead": overhead, "peak": peak, "limit": limit}
    named = [f"{name}={value!r}" for name, value in asked.items() if value is not None]
    if len(named) > 1:
        goals = "budget, overhead and peak" if limit is None else "budget, overhead, peak and limit"
        raise InputError(f"one of {goals}; got {' and '.join(named)}")
    if named and recompute not in (None, "norm"):
        raise InputError(
            f"{named[0]} chooses itself what to rebuild, in place of recompute; got {recompute!r} too: leave"
            " one of them out"
        )
    if overhead is not None and not (_is_number(overhead) and overhead >= 0):
        raise InputError(f"overhead is a share of a step's time, 0 or more; got {overhead!r}")
    if budget is not None and not (_is_number(budget) and 0 < budget <= 1):
        raise InputError(
            f"budget is a share of the bytes that plain PyTorch keeps, in (0, 1]; got {budget!r}"
        )
    if named:
        budget, overhead = (None if share is None else float(share) for share in (budget, overhead))
        return Goal(
            None,
            budget,
            overhead,
            None if peak is None else _peak(peak),
            None if limit is None else _limit(limit),
        )
    return HALF if recompute is None else NORM if recompute == "norm" else CONV


def _peak(peak: float | int | str) -> float | int:
    if isinstance(peak, str):
        return bytes_of(peak)
    if _is_number(peak) and 1 < peak < _LEAST_PEAK and peak == int(peak):
        raise InputError(
            f'peak={peak!r} is a number of bytes, and no step is as small; write "{peak:g}GiB", or a share of'
            " plain PyTorch's peak in (0, 1]"
        )
    if _is_number(peak) and (0 < peak <= 1 or (isfinite(peak) and peak == int(peak) > 1)):
        return float(peak) if peak <= 1 else int(peak)
    raise InputError(
        f'peak is a share of plain PyTorch\'s, in (0, 1], or bytes, as 8 * 2**30 or "8GiB"; got {peak!r}'
    )


def _limit(limit: int | str) -> int | str:
    if isinstance(limit, str):
        return limit if limit == "device" else bytes_of(limit)
    if _is_number(limit) and isfinite(limit) and limit == int(limit) >= _LEAST_PEAK:
        return int(limit)
    raise InputError(
        'limit is the memory that the process may have: bytes, as 8 * 2**30 or "8GiB", or "device"; got'
        f" {limit!r}"
    )


def bytes_of(text: str) -> int:
    """Parses `24GiB`, `24GB`, `500M`, `2048B`. Raises InputError for anything else, such as a bare number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)\s*", text, re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        unit = " without its unit" if re.fullmatch(r"\s*\d+(\.\d+)?\s*", text) else ""
        raise InputError(f"a memory is written like 24GiB, 24GB or 500MB; got {text!r}{unit}")
    unit = (match[2] or "").upper()
    return int(float(match[1]) * (_BINARY[unit] if match[3] else _UNITS[unit]))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and value == value
