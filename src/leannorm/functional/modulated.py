"""Layer and RMS norm with a scale and a shift per sample or token, which the network computes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.overrides import has_torch_function_variadic

from leannorm._types import Maybe
from leannorm.autograd import fast
from leannorm.functional.door import public, run
from leannorm.functional.rows import normalized_rows

_Both = tuple[Tensor, Tensor] | None  # the norm of a sum and that sum


@public(normalized_rows)
def ada_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    scale: Tensor,
    shift: Tensor | None,
    eps: float = 1e-5,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Layer-normalize every row, then scale and shift it by values that the network computes (AdaLN).

        y = layer_norm(x) * (1 + scale) + shift

    `layer_norm` is over the last axes, with weight and bias if given. scale and shift are per sample (N, C),
    per token (N, L, C), or anything between: their last sizes are `normalized_shape`, and the sizes before
    those are the input's first ones, each as large or 1.

    Shapes: input (*, normalized_shape); scale and shift as described, both alike; weight, bias
    normalized_shape; output as input.
    Dtypes: as `layer_norm`; each tensor may have its own floating dtype. The result is rounded once, at the
    end.
    Kept: the input (4 bytes per element in float32), 8 bytes per row (16 in float64), and scale.
    Raises: as `layer_norm`, and `InputError` if scale or shift cannot be broadcast by that rule.
    Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", 2022, arXiv:2212.09748.

    >>> import torch
    >>> from leannorm import functional as F
    >>> x, scale, shift = torch.randn(2, 5, 8), torch.full((2, 8), -1.0), torch.ones(2, 8)
    >>> F.ada_layer_norm(x, (8,), scale, shift).eq(1).all().item()
    True
    """
    if not has_torch_function_variadic(input, scale, shift, weight, bias):
        y: Maybe = fast.row_norm(
            input, weight, bias, normalized_shape, eps, False, None, 0.0, "after", None, None, scale, shift
        )
        if y is not None:
            return y
    return run(ada_layer_norm, (input, normalized_shape, scale, shift, eps, weight, bias))


@public(normalized_rows)
def ada_rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    scale: Tensor,
    eps: float | None = None,
    weight: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """RMS-normalize every row, then scale (and shift) it by values that the network computes.

        y = rms_norm(x) * (1 + scale) + shift

    scale and shift are those of `ada_layer_norm`, weight and eps those of `rms_norm`.

    Shapes, Dtypes: as `ada_layer_norm`.
    Kept: as `ada_layer_norm`, with 4 bytes per row (8 in float64).
    Raises: as `ada_layer_norm`.
    Source: as `ada_layer_norm`.

    >>> import torch
    >>> from leannorm import functional as F
    >>> x, scale = torch.randn(2, 5, 8), torch.full((2, 1, 8), 1.0)
    >>> torch.allclose(F.ada_rms_norm(x, (8,), scale), 2 * F.rms_norm(x, (8,)))
    True
    """
    if not has_torch_function_variadic(input, scale, shift, weight):
        y: Maybe = fast.row_norm(
            input, weight, None, normalized_shape, eps, True, None, 0.0, "after", None, None, scale, shift
        )
        if y is not None:
            return y
    return run(ada_rms_norm, (input, normalized_shape, scale, eps, weight, shift))


@public(normalized_rows)
def add_ada_layer_norm(
    input: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    normalized_shape: Sequence[int],
    scale: Tensor,
    shift: Tensor | None,
    eps: float = 1e-5,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add a gated branch, then modulate the sum's layer norm: the step between two blocks of a DiT.

        r = input + gate * branch
        y = ada_layer_norm(r, ...)

    Returns y and r, which is rounded once. `gate` is broadcast by the same rule as scale, independently: (C,)
    is a layer scale, None is 1. The other arguments are those of `ada_layer_norm`.

    Shapes: as `ada_layer_norm`; branch, y and r as input.
    Dtypes: as `ada_layer_norm`; y and r have the input's dtype.
    Kept: r (an output, so 0 bytes per element), 8 bytes per row (16 in float64), scale and gate, and the
    branch if the gate needs a gradient.
    Raises: as `ada_layer_norm`, and `InputError` if the branch's shape is not the input's.
    Source: as `ada_layer_norm`.

    >>> import torch
    >>> from leannorm import functional as F
    >>> x, branch, gate = torch.zeros(1, 2), torch.tensor([[1.0, 3.0]]), torch.tensor([[0.5, 0.5]])
    >>> F.add_ada_layer_norm(x, branch, gate, (2,), torch.zeros(1, 2), torch.zeros(1, 2), eps=0.0)
    (tensor([[-1.,  1.]]), tensor([[0.5000, 1.5000]]))
    """
    given = branch is not None
    if given and not has_torch_function_variadic(input, branch, gate, scale, shift, weight, bias):
        both: _Both = fast.row_norm(
            input, weight, bias, normalized_shape, eps, False, None, 0.0, "after", branch, gate, scale, shift
        )
        if both is not None:
            return both
    values = input, branch, gate, normalized_shape, scale, shift, eps, weight, bias
    return run(add_ada_layer_norm, values)


@public(normalized_rows)
def add_ada_rms_norm(
    input: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    normalized_shape: Sequence[int],
    scale: Tensor,
    eps: float | None = None,
    weight: Tensor | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add a gated branch, then modulate the sum's RMS norm.

        r = input + gate * branch
        y = ada_rms_norm(r, ...)

    Returns y and r. `gate` is that of `add_ada_layer_norm`, the others are those of `ada_rms_norm`.

    Shapes, Dtypes: as `add_ada_layer_norm`.
    Kept: as `add_ada_layer_norm`, with 4 bytes per row (8 in float64).
    Raises: as `add_ada_layer_norm`.
    Source: as `ada_layer_norm`.

    >>> import torch
    >>> from leannorm import functional as F
    >>> x, branch, gate = torch.ones(1, 2), torch.tensor([[2.0, 3.0]]), torch.ones(2)
    >>> F.add_ada_rms_norm(x, branch, gate, (2,), torch.zeros(2), eps=0.0)[1]
    tensor([[3., 4.]])
    """
    given = branch is not None
    if given and not has_torch_function_variadic(input, branch, gate, scale, shift, weight):
        both: _Both = fast.row_norm(
            input, weight, None, normalized_shape, eps, True, None, 0.0, "after", branch, gate, scale, shift
        )
        if both is not None:
            return both
    return run(add_ada_rms_norm, (input, branch, gate, normalized_shape, scale, eps, weight, shift))
