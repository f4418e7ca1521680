"""The C++ kernels (csrc/): the verbs of `reference.py` on dense CPU tensors, at the speed of memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from leannorm._types import Moments
from leannorm.ops import running
from leannorm.ops.backends.reference import (  # noqa: F401  (verbs that need no kernel)
    channel_means,
    rstd_of,
)
from leannorm.ops.verbs import Verbs, why_not_these


def _load() -> str | None:
    """Load the library; the reason why not, where it cannot be."""
    library = Path(__file__).parents[2] / "_C.so"
    if not library.exists():
        note = library.with_suffix(".reason")
        why = note.read_text().strip() if note.exists() else "the package was installed without building"
        return f"the C++ kernels are not built: {why}"
    try:
        torch.ops.load_library(library)
    except (OSError, RuntimeError) as error:
        return f"the C++ kernels cannot be loaded: {' '.join(str(error).split())}"
    return None


_UNAVAILABLE = _load()


def why_not(*tensors: Tensor | None, named: bool = False) -> list[str]:
    """The reasons why the kernels cannot serve these tensors: none, if they can."""
    if _UNAVAILABLE is not None:
        return [_UNAVAILABLE]
    reasons = [
        f"the kernels run on the CPU, a tensor is on {t.device}"
        for t in tensors
        if t is not None and t.device.type != "cpu"
    ]
    return list(dict.fromkeys(reasons + why_not_these(*tensors)))


_ops = torch.ops.leannorm


def move_running(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches: Tensor | None,
    momentum: float | None,
    mean: Tensor,
    m2: Tensor,
    count: int | Tensor,
) -> None:
    """`ops.running.move_running` as one call, where nobody takes a gradient of the buffers."""
    buffers = [b for b in (running_mean, running_var, num_batches) if b is not None]
    if running_mean is None or running_var is None or any(b.requires_grad for b in buffers):
        running.move_running(running_mean, running_var, num_batches, momentum, mean, m2, count)
        return
    given = (count, None) if isinstance(count, int) else (0, count)
    _ops.move_running_(running_mean, running_var, num_batches, momentum, mean, m2, *given)
    # what torch's own in-place operations do, so that autograd notices a buffer it needed
    torch.autograd.graph.increment_version([b for b in buffers if not b.is_inference()])


def constants_of(running_mean: Tensor, running_var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`ops.running.constants_of`"""
    constants: tuple[Tensor, Tensor] = _ops.constants_of(running_mean, running_var, eps)
    return constants


def sums_of(moments: Moments) -> Tensor:
    """`ops.sums.sums_of`"""
    sums: Tensor = _ops.sums_of(moments.mean, moments.m2, moments.count)
    return sums


def moments_of(total: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`ops.sums.moments_of`"""
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _ops.moments_of(total, eps)
    return found


def means_of(total: Tensor, weight: Tensor | None, count: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.sums.means_of`"""
    means: tuple[Tensor, Tensor] = _ops.means_of(total, weight, count)
    return means


_verbs = Verbs(_ops)
channel_moments = _verbs.channel_moments
channel_normalize = _verbs.channel_normalize
channel_grad_sums = _verbs.channel_grad_sums
channel_input_grad = _verbs.channel_input_grad
channel_forward = _verbs.channel_forward
channel_backward = _verbs.channel_backward
row_forward = _verbs.row_forward
row_backward = _verbs.row_backward
