"""What to rebuild: norms and what is as cheap, cheap convolutions too, or as much as a budget asks."""

from __future__ import annotations

from leannorm._errors import InputError
from leannorm.saving.recipes.products import PRODUCTS
from leannorm.saving.values import Step, Value

FLOPS_PER_BYTE = 192.0
"""`recompute="conv"`: what a convolution or a matrix product puts out is rebuilt if it takes no more
operations per byte: in float32, of a layer with up to 384 inputs to each output."""


FEW_PARTS = 4
"""A concatenation of so many parts is rebuilt even where a part, not at hand, must be copied for it."""


MUCH_LARGER = 32
"""A tensor is held if the largest one so far is so many times its size: a rebuild takes as many calls for
little memory."""


class Policy:
    """Decides by the kind of step and by size, or for `everything` that can be rebuilt.

    Convolutions and matrix products: up to `flops_per_byte`, and no linear layer of fewer outputs than
    inputs, which takes more operations than the tensor that it was made of and brings less.
    Sums: of what is held. A sum of norms' outputs (a residual connection) would take those norms' time again
    for one tensor; one of tensors that are held, scaled or seen from another side takes an addition.
    Concatenations: of parts that are at hand, or can be copied. A dense block concatenates ever more parts,
    one of them new, and would spend more time on this than on its norms.
    """

    def __init__(self, flops_per_byte: float, everything: bool = False) -> None:
        self.flops_per_byte, self.everything = flops_per_byte, everything

    @property
    def reads_weights(self) -> bool:
        """Do rebuilds read the weights of layers in the backward pass?"""
        return self.flops_per_byte > 0

    def considers(self, node: str) -> bool:
        return self.reads_weights or node not in PRODUCTS

    def may_add(self, value: Value | None) -> bool:
        """May a sum take this input? None: it is not at hand, and would first have to be rebuilt itself."""
        return self.everything or (value is not None and of_held(value))

    def is_worth(self, size: int, largest: int) -> bool:
        """Has a tensor size enough, beside the largest one so far?"""
        return self.everything or size * MUCH_LARGER > largest

    def may_copy(self, parts: int) -> bool:
        """May parts be copied for a concatenation of so many?"""
        return self.everything or parts <= FEW_PARTS

    def allows(self, step: Step, nbytes: int) -> bool:
        if step.kind == "sum":
            return self.everything or all(map(of_held, step.inputs))
        if step.kind != "product":
            return True
        return self.everything or (step.flops <= self.flops_per_byte * nbytes and not step.narrows)


NORM, CONV, LEANEST = Policy(0.0), Policy(FLOPS_PER_BYTE), Policy(float("inf"), everything=True)


def of_held(value: Value) -> bool:
    """Does it take no norm or activation to rebuild, but for a product, whose operations were weighed?"""
    step = value.step
    if step is None or step.kind in ("product", "held"):
        return True
    return (step.view or step.kind in ("scale", "sum")) and all(of_held(v) for v in step.inputs)


def check(recompute: str, budget: float | None, overhead: float | None = None) -> None:
    """Raises InputError for settings that there are not."""
    if recompute not in ("norm", "conv"):
        meant = f": for a share of the bytes write budget={recompute!r}" if _is_number(recompute) else ""
        raise InputError(f'recompute is "norm" or "conv"; got {recompute!r}{meant}')
    if budget is not None and overhead is not None:
        raise InputError(f"budget or overhead, not both; got budget={budget!r} and overhead={overhead!r}")
    if overhead is not None and not (_is_number(overhead) and overhead >= 0):
        raise InputError(f"overhead is a share of stock's step time, 0 or more; got {overhead!r}")
    if budget is not None and not 0 < budget <= 1:
        raise InputError(
            f"budget is a share of the bytes that stock autograd keeps, in (0, 1]; got {budget!r}"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
