"""What `lean()` remembers from one pass to the next: forgotten between programs, so that each stands alone.

The names of its caches stand here and nowhere else in the fuzzer.
"""

from __future__ import annotations

import contextlib
import itertools
import os

from leannorm.saving import leaves, log, memo, plans, recorded, small, trial, watched

if os.environ.get("PROGRAMS_LOG") == "python":  # as where the C++ nodes are not built
    recorded.record_in(log)


def forget():
    """As in a fresh process."""
    trial._SEEN.clear()
    plans._KNOWN.clear()
    watched._WATCHED.clear()
    small._LEFT_ALONE.clear()
    small.SMALL = -1  # but where a program asks for it
    leaves.Leaves._asked_at.clear()
    memo.forget()
    recorded.LOG.forget_trials()


@contextlib.contextmanager
def even_clock():
    """Every rebuild takes the same time, so that a budget makes the same plan in every run."""
    clock, ticks = trial.perf_counter, itertools.count()
    trial.perf_counter = lambda: next(ticks) * 1e-6
    try:
        yield
    finally:
        trial.perf_counter = clock
