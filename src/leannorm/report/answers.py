"""Is a result correct: within an error budget of the float64 result, and is every element written?"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import log2, sqrt
from typing import NamedTuple

import torch
from torch import Tensor


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within it, `torch.empty` returns memory full of NaN, so elements that a kernel does not write show."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about operations that are not deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)  # without it torch does not fill memory
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class Error(NamedTuple):
    """The largest error of one output against float64, and the largest that is allowed."""

    found: float
    allowed: float

    @property
    def within(self) -> bool:
        """Is the error within the budget? False for a NaN."""
        return self.found <= self.allowed


def largest_error(answer: Tensor, exact: Tensor) -> float:
    """The largest difference from the float64 result; NaN if there is one anywhere."""
    return float((answer.detach().double() - exact.detach()).abs().max()) if exact.numel() else 0.0


def allowed_error(torchs_error: float, dtype: torch.dtype, largest: float, roundings: float = 1) -> float:
    """The budget: twice torch's own error in the same dtype, plus roundings of a number of this size.

    >>> allowed_error(0.25, torch.float32, 0.0)
    0.5
    """
    return 2 * torchs_error + roundings * torch.finfo(dtype).eps / 2 * largest


def error_of(ours: Tensor, exact: Tensor, torchs_error: float, summands: int = 0) -> Error:
    """The error of `ours` and its budget: twice torch's error in the same dtype, plus one output rounding.

    A sum of `summands` values of about 1 may be near 0 while its partial sums are not. For it, the budget
    also has one rounding of a partial sum of size sqrt(n) for each of the log2(n) levels of the sum.

    >>> error_of(torch.ones(2), torch.ones(2).double(), 0.0).within
    True
    >>> error_of(torch.full((2,), float("nan")), torch.ones(2).double(), 0.0).within
    False
    """
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    allowed = allowed_error(torchs_error, ours.dtype, largest)
    if summands > 1:
        allowed += torch.finfo(torch.float32).eps / 2 * log2(summands) * sqrt(summands)
    return Error(largest_error(ours, exact), allowed)


def within_budget(ours: Sequence[Tensor], torchs: Sequence[Tensor], exact: Sequence[Tensor]) -> bool:
    """Is every output within the budget of `error_of`?"""
    outputs = zip(ours, torchs, exact, strict=True)
    return all(error_of(a, e, largest_error(b, e)).within for a, b, e in outputs)
