"""The C++ kernels (csrc/): dense CPU tensors at the speed of memory."""

from __future__ import annotations

from torch import Tensor

from leannorm.ops.backends.compiled_gated import CompiledGated
from leannorm.ops.backends.library import load

_UNAVAILABLE = load()


class Cpu(CompiledGated):
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
