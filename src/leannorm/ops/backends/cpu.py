"""The C++ kernels (csrc/): the verbs of `reference.py` on dense CPU tensors, at the speed of memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from leannorm.ops.backends.reference import (  # noqa: F401  (verbs that need no kernel)
    channel_means,
    rstd_of,
)
from leannorm.ops.verbs import Verbs, schema, why_not_these


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


_verbs = Verbs(schema.OPS)
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
