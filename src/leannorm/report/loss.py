"""The default loss for measuring a model."""

from __future__ import annotations

from torch import Tensor
from torch.utils._pytree import tree_leaves

from leannorm._errors import InputError


def mean_square(output: object) -> Tensor:
    """A loss for any model: the output's own `loss`, else the mean squares of its floating-point tensors."""
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.dim() == 0:
        return own
    tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    if not tensors:
        raise InputError(
            "the model's output has no floating-point tensor to take a loss of: give one with loss="
        )
    total = tensors[0].float().square().mean()
    for tensor in tensors[1:]:
        total = total + tensor.float().square().mean()
    return total
