"""What `lean()` remembers from one pass to the next: forgotten between programs, so that each stands alone.

The names of its caches stand here and nowhere else in the fuzzer.
"""

from __future__ import annotations

import os

from leannorm.saving import log, plans, recorded_pass, small, watched

if os.environ.get("PROGRAMS_LOG") == "python":  # as where the C++ nodes are not built
    recorded_pass.LOG = log


def forget():
    """As in a fresh process."""
    plans._KNOWN.clear()
    watched._WATCHED.clear()
    small._LEFT_ALONE.clear()
    small.SMALL = -1  # but where a program asks for it
    recorded_pass.LOG.forget_trials()
