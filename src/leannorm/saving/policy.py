"""What to rebuild: norms and what is as cheap, cheap convolutions too, or as much as a budget asks."""

from __future__ import annotations

from leannorm._errors import InputError
from leannorm.saving.values import Step, Value

FLOPS_PER_BYTE = 160.0


class Policy:
    def __init__(self, flops_per_byte: float) -> None:
        self.flops_per_byte = flops_per_byte

    def considers(self, node: str) -> bool:
        return self.flops_per_byte > 0 or node != "ConvolutionBackward0"

    def rebuilds(self, step: Step, nbytes: int) -> bool:
        if step.kind == "sum":
            return all(_of_held(value) for value in step.inputs)
        return step.kind != "conv" or step.flops <= self.flops_per_byte * nbytes


def _of_held(value: Value) -> bool:
    """Does it take no norm, activation or convolution to rebuild?"""
    step = value.step
    return step is None or (
        (step.view or step.kind in ("scale", "sum")) and all(_of_held(v) for v in step.inputs)
    )


def policy(recompute: str, budget: float | None) -> Policy:
    if recompute not in ("norm", "conv"):
        raise InputError(f'recompute must be "norm" or "conv", got {recompute!r}')
    return Policy(FLOPS_PER_BYTE if recompute == "conv" else 0.0)
