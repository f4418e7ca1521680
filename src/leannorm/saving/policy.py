"""What to rebuild: norms and what is as cheap, cheap convolutions too, or as much as a budget asks."""

from __future__ import annotations

from torch import Tensor

from leannorm._errors import InputError
from leannorm.saving.values import Step

FLOPS_PER_BYTE = 160.0


class Policy:
    def __init__(self, flops_per_byte: float) -> None:
        self.flops_per_byte = flops_per_byte

    def considers(self, node: str) -> bool:
        return self.flops_per_byte > 0 or node != "ConvolutionBackward0"

    def rebuilds(self, step: Step, tensor: Tensor | None, seconds: float) -> bool:
        return step.kind != "conv" or tensor is None or step.flops <= self.flops_per_byte * tensor.nbytes


def policy(recompute: str, budget: float | None) -> Policy:
    if recompute not in ("norm", "conv"):
        raise InputError(f'recompute must be "norm" or "conv", got {recompute!r}')
    return Policy(FLOPS_PER_BYTE if recompute == "conv" else 0.0)
