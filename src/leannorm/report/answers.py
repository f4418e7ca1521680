"""Is a result correct, within an error budget of the float64 result, and is every element written?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within it, `torch.empty` returns memory full of NaN, which shows elements that a kernel does not
    write."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about nondeterministic operations
        torch.use_deterministic_algorithms(True, warn_only=True)  # without it torch does not fill memory
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class Error(NamedTuple):
    """The largest error of one output against float64, and the largest that is allowed."""

    largest: float
    allowed: float

    @property
    def within(self) -> bool:
        """Whether the error is within the budget; False for a NaN."""
        return self.largest <= self.allowed


def largest_error(answer: Tensor, exact: Tensor) -> float:
    """The largest difference from the float64 result; NaN if there is one anywhere."""
    return float((answer.detach().double() - exact.detach()).abs().max()) if exact.numel() else 0.0


def allowed_error(torchs_error: float, dtype: torch.dtype, largest: float, roundings: float = 1) -> float:
    """The budget: twice torch's own error in the same dtype, plus roundings of a number of this size.

    >>> allowed_error(0.25, torch.float32, 0.0)
    0.5
    """
    return 2 * torchs_error + roundings * torch.finfo(dtype).eps / 2 * largest


def error_of(ours: Tensor, exact: Tensor, torchs_error: float, more: float = 0.0) -> Error:
    """The error of `ours` and its budget: twice torch's error in the same dtype, plus one output rounding.

    `more` is added to the budget.

    >>> error_of(torch.ones(2), torch.ones(2).double(), 0.0).within
    True
    >>> error_of(torch.full((2,), float("nan")), torch.ones(2).double(), 0.0).within
    False
    """
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    return Error(largest_error(ours, exact), allowed_error(torchs_error, ours.dtype, largest) + more)


def with_gradients(run: Callable[..., Tensor], leaves: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """Output and gradients of `run(*leaves)`."""
    y = run(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def within_budget(
    ours: Sequence[Tensor], torchs: Sequence[Tensor], exact: Sequence[Tensor], times: float = 1.0
) -> bool:
    """Whether every output is within `times` the budget of `error_of`."""
    outputs = zip(ours, torchs, exact, strict=True)
    errors = (error_of(a, e, largest_error(b, e)) for a, b, e in outputs)
    return all(error.largest <= times * error.allowed for error in errors)
