"""What `lean()` remembers from one pass to the next: forgotten between programs, so that each stands alone.

The names of its caches stand here and nowhere else in the fuzzer.
"""

from __future__ import annotations

import os

from leannorm.autograd.nodes import NODES
from leannorm.saving import log, recorded_pass, remembered

if os.environ.get("PROGRAMS_LOG") == "python":  # as where the C++ nodes are not built
    recorded_pass.LOG = log
elif os.environ.get("PROGRAMS_LATE"):
    NODES.set_waits_from(0)


def forget():
    """As in a fresh process."""
    remembered.forget()
    os.environ["LEANNORM_SMALL_BYTES"] = "-1"  # except where a program asks for it
    recorded_pass.LOG.forget_trials()
