"""What to rebuild: norms and what is as cheap, also cheap convolutions, or as much as a budget asks."""

from __future__ import annotations

from leannorm.saving.evidence import is_parameter
from leannorm.saving.recipes.attention import ATTENTIONS
from leannorm.saving.recipes.products import MANY_OPERATIONS, PRODUCTS, ends_in_matrix_product, groups_of
from leannorm.saving.recipes.views import cast_to
from leannorm.saving.steps import Step, behind
from leannorm.saving.values import MUCH_LARGER, Value, products_of, size_of

FEW_PARTS = 4
"""A concatenation of at most so many parts is rebuilt even if a part has no value yet and must be copied."""

SUMS_IN_A_ROW = 2
"""Behind so many sums that are rebuilt, and several convolutions, one is held: all between would be there at
once."""


class Policy:
    """Decides by the kind of step and by size; with `everything`, all that can be rebuilt is.

    Convolutions and matrix products: with `products`, and none that is `costly`. What is left of a
    transformer costs a quarter of its step by the table of prices at any width, and up to 0.4 in bfloat16
    where products are fast.
    Convolutions in a row: one, with `everything` as many as the recipes allow (`IN_A_ROW`); which of them is
    held a plan decides.
    Attention: with `products`, and none that is `costly` without `everything`. Of 197 keys it takes 30 times
    as long as a norm for the same bytes.
    Sums: of inputs that need no norm. Rebuilding a sum of norms' outputs (a residual connection) would run
    those norms again for one tensor; a sum of held tensors, their views or multiples takes one addition. So
    does a smaller tensor that shifts a norm's output; it is rebuilt if no product comes before. Of tensors of
    one size (a residual connection) at most one product in a row: all that follows up to the next sum is
    larger, and would be held in its place. Not so behind convolutions alone, with `everything`, for two
    sums in a row: most networks of them narrow behind a sum. A bias is part of the product that it is added
    to.
    Norms added in their own pass: with `products`, unless the sum must be compared each time.
    Concatenations: of parts that have values, or of few parts, which are copied. A dense block concatenates
    ever more parts, of which one is new, and would spend more time on copies than on its norms.
    """

    def __init__(self, products: bool, everything: bool = False) -> None:
        self.products, self.everything = products, everything

    @property
    def reads_weights(self) -> bool:
        """Do rebuilds read the weights of convolutions and linear layers in the backward pass?"""
        return self.products

    def considers(self, node: str) -> bool:
        """May outputs of this kind of node be rebuilt at all?"""
        return self.products or not (node in PRODUCTS or node in ATTENTIONS)

    def may_add(self, kind: str, value: Value | None) -> bool:
        """May a sum with this input, put out by such a node, be rebuilt? None: it has no value yet."""
        in_own_pass = self.products and kind == "NativeBatchNormBackward0"  # whether it can, its step tells
        return self.everything or in_own_pass or (value is not None and needs_no_norm(value))

    def is_worth(self, size: int, largest: int) -> bool:
        """Is a tensor of `size` elements large enough, compared with the largest one so far?

        For a small one a rebuild takes as many calls, and saves little memory.
        """
        return self.everything or size * MUCH_LARGER > largest

    def may_copy(self, parts: int) -> bool:
        """May parts without a value be copied, in a concatenation of so many?"""
        return self.everything or parts <= FEW_PARTS

    def allows(self, step: Step) -> bool:
        """Is this step cheap enough?"""
        if step.kind == "sum":
            products = products_of(step.inputs)
            if len(set(map(size_of, step.inputs))) > 1:
                return not products or all(needs_no_norm(v) or is_bias(v) for v in step.inputs)
            few = self._few(step) or any(map(is_bias, step.inputs))
            return few and (self.everything or all(map(needs_no_norm, step.inputs)))
        if step.kind == "added norm":
            cheap = self.products and step.proved and all(map(needs_no_norm, step.inputs))
            return self._few(step) and (self.everything or cheap)
        if groups_of(step) and step.inputs[0].products:  # a convolution behind a product that is rebuilt
            return self.everything
        return self.everything or not step.costly

    def _few(self, step: Step) -> bool:
        """Does a sum have few enough products behind it?"""
        if products_of(step.inputs) <= 1:
            return True
        if not self.everything or any(map(ends_in_matrix_product, step.inputs)):
            return False
        return max(map(sums_before, step.inputs)) < SUMS_IN_A_ROW


NORM, CONV, LEANEST = Policy(products=False), Policy(products=True), Policy(products=True, everything=True)


def needs_no_norm(value: Value) -> bool:
    """Is it held, a product (whose operations were checked), or made of such by views, multiples and sums?"""
    kinds = *MANY_OPERATIONS, "held", "view", "copy", "scale", "sum"
    steps = (one.step for one in behind([value], MANY_OPERATIONS))
    return all(step is None or step.kind in kinds for step in steps)


def sums_before(value: Value) -> int:
    """The most sums in a row in its rebuild."""
    sums = dict[Value, int]()
    left = [value]
    while left:
        one, step = left[-1], left[-1].step
        inputs = () if step is None else step.inputs
        missing = [before for before in inputs if before not in sums]
        if missing:
            left += missing
            continue
        is_sum = step is not None and step.kind in ("sum", "added norm")
        sums[one] = is_sum + max((sums[before] for before in inputs), default=0)
        left.pop()
    return sums[value]


def is_bias(value: Value) -> bool:
    """A parameter, rows of it (an expert's bias) or a cast of it: added to a product, it is part of that."""
    while value.step is not None:
        is_cast = value.step.function is cast_to
        is_of_one = value.step.view or value.step.kind == "scale" or is_cast
        if value.products or not value.step.inputs or not is_of_one:
            return False
        value = value.step.inputs[0]
    return value.tensor is not None and is_parameter(value.tensor)
