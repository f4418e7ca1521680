"""The Triton kernels: the verbs of `reference.py` on CUDA tensors, at the speed of memory.

`channel.py`, `channel_gradients.py`, `rows.py` and `between.py` hold an implementation of every operator of
`schema.py`, under its name. They are registered for CUDA here and imported by the first call, since Triton
takes longer to import than all of this package. With TRITON_INTERPRET=1 in the environment the kernels are
interpreted: then they serve tensors of the CPU as well, called directly, but only by name
(`use_backend("triton")`), as that is slow.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from shutil import which
from typing import Any

import torch
from torch import Tensor

from leannorm.ops import schema
from leannorm.ops.backends.reference import (  # noqa: F401  (verbs that need no kernel)
    channel_means,
    rstd_of,
)
from leannorm.ops.verbs import Verbs, why_not_these

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
_OLDEST = 8  # compute capability; what Triton itself supports


def _find() -> str | None:
    """Is Triton there, and what it needs? The reason why not, where it is not; nothing is imported."""
    try:
        found = find_spec("triton") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        return "Triton is not installed"
    if torch.version.hip is not None:
        return "the kernels are written for NVIDIA's GPUs, this torch is built for AMD's"
    if not (INTERPRETED or os.environ.get("CC") or which("gcc") or which("clang")):
        return "Triton compiles what launches kernels: install a C compiler (gcc), or name one in CC"
    return None


_UNAVAILABLE = _find()


def why_not(*tensors: Tensor | None, named: bool = False) -> list[str]:
    """The reasons why the kernels cannot serve these tensors: none, if they can.

    Interpreted kernels serve tensors of the CPU where the backend was `named`.
    """
    if _UNAVAILABLE is not None:
        return [_UNAVAILABLE]
    if not tensors and not torch.cuda.is_available() and not (named and INTERPRETED):
        return ["the kernels run on CUDA, torch finds no such device"]
    reasons = []
    for t in tensors:
        if t is None:
            continue
        if t.device.type != "cuda" and not (named and INTERPRETED and t.device.type == "cpu"):
            reasons.append(f"the kernels run on CUDA, a tensor is on {t.device}")
        elif t.device.type == "cuda" and not torch.compiler.is_compiling():
            found = torch.cuda.get_device_properties(t.device)
            if found.major < _OLDEST:
                has = f"the device has {found.major}.{found.minor}"
                reasons.append(f"the kernels need compute capability {_OLDEST}.0, {has}")
    return list(dict.fromkeys(reasons + why_not_these(*tensors)))


def _room(operator: str) -> str:
    if operator in schema.BETWEEN:
        return "between"
    if operator.startswith("row"):
        return "rows"
    return "channel_gradients" if "grad" in operator or "backward" in operator else "channel"


_OPERATORS = (*schema.OPERATORS, *schema.BETWEEN)


class _Kernels:
    """The implementations by their operators' names, as `torch.ops.leannorm` offers the operators."""

    def __getattr__(self, operator: str) -> Callable[..., Any]:
        if operator not in _OPERATORS:  # asked by whoever looks for what all objects may have
            raise AttributeError(f"no operator of leannorm is called {operator}")
        if INTERPRETED:
            import_module(f"{__name__}.interpreted").mend()
        found: Callable[..., Any] = getattr(import_module(f"{__name__}.{_room(operator)}"), operator)
        return found


_kernels = _Kernels()


def _register() -> None:
    """Hand CUDA tensors of every operator to the kernel of its name."""

    def first_look_up(operator: str) -> Callable[..., Any]:
        return lambda *arguments: getattr(_kernels, operator)(*arguments)

    for operator in _OPERATORS:
        schema.LIBRARY.impl(operator, first_look_up(operator), "CUDA")


if _UNAVAILABLE is None:
    _register()

_verbs = Verbs(_kernels if INTERPRETED else schema.OPS)
move_running = _verbs.move_running
constants_of = _verbs.constants_of
sums_of = _verbs.sums_of
moments_of = _verbs.moments_of
means_of = _verbs.means_of
channel_moments = _verbs.channel_moments
channel_normalize = _verbs.channel_normalize
channel_grad_sums = _verbs.channel_grad_sums
channel_input_grad = _verbs.channel_input_grad
channel_forward = _verbs.channel_forward
channel_backward = _verbs.channel_backward
row_forward = _verbs.row_forward
row_backward = _verbs.row_backward
