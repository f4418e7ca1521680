"""With which releases of torch does leannorm work, and with which were its tests run?"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])

OLDEST = "2.10"
TESTED = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""The whole suite has run beside them; docs/compatibility.md has what came of it."""


def why_refused(release: str) -> str | None:
    """Why leannorm does not work with this release of torch, in one sentence; None if it does.

    >>> why_refused("2.15.0+cpu")
    >>> why_refused("2.9.1")
    'leannorm needs torch >= 2.10, found torch 2.9.1: pip install --upgrade "torch>=2.10"'
    """
    if _numbers(release) >= _numbers(OLDEST):
        return None
    return f'leannorm needs torch >= {OLDEST}, found torch {release}: pip install --upgrade "torch>={OLDEST}"'


def is_tested(release: str) -> bool:
    """Whether the suite was run with this release; its builds (for CPUs, for CUDA) count as one.

    >>> is_tested("2.13.0+cpu"), is_tested("2.13.1"), is_tested("2.15.0a0+git1234")
    (True, False, False)
    """
    return release.split("+")[0] in TESTED


def left_to_python(function: _F) -> _F:
    """Keep torch's compiler from compiling this function and what it calls when a graph break calls it from
    Python, since there it watches every call."""
    try:
        frames: Any = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    except AttributeError:  # a release with another name for it
        pass
    return function


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])


RELEASE = _numbers(torch.__version__)
"""Of the torch at hand, as (2, 13); for the few places where nothing else tells what it does."""

if (_why := why_refused(str(torch.__version__))) is not None:
    raise ImportError(_why)  # before the packages, which would fail on what that release lacks
