"""What a step under `lean()` took, and how much of it went into rebuilding; as spent.h."""

from __future__ import annotations

from time import perf_counter


class Spent:
    """The seconds from the first pass of the log until the backward pass has freed the last saved tensor."""

    _begun = 0  # how many steps have begun

    def __init__(self) -> None:
        Spent._begun += 1
        self._number, self._start, self._seconds = Spent._begun, perf_counter(), 0.0
        self.rebuilding = 0.0
        self.is_one = True  # whether the log is that of one step

    def end(self) -> None:
        """Note that no saved tensor is left. If another step has begun, the time is that of both."""
        self._seconds = perf_counter() - self._start if self._number == Spent._begun else 0.0

    def shares(self) -> tuple[float, float] | None:
        """The time of rebuilds, as a share of the rest of the step, and 0: what recording takes is not
        measured here. None if it is not known."""
        rest = self._seconds - self.rebuilding
        return (self.rebuilding / rest, 0.0) if self.is_one and self.rebuilding > 0 and rest > 0 else None
