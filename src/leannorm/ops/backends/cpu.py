"""The C++ kernels (csrc/): dense CPU tensors at the speed of memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from leannorm.ops.backends.compiled_modulated import CompiledModulated


def _load() -> str | None:
    """Load the library; the reason if that is not possible, else None."""
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


class Cpu(CompiledModulated):
    """The C++ kernels, on the CPU."""

    name = "cpu"

    def why_not(self, *tensors: Tensor | None, named: bool = False) -> list[str]:
        if _UNAVAILABLE is not None:
            return [_UNAVAILABLE]
        reasons = [
            f"the kernels run on the CPU, a tensor is on {t.device}"
            for t in tensors
            if t is not None and t.device.type != "cpu"
        ]
        return list(dict.fromkeys(reasons + super().why_not(*tensors)))


CPU = Cpu()
