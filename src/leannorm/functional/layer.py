"""Layer norm and RMS norm: statistics of every row."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function_variadic

from leannorm.autograd import fast
from leannorm.functional import jagged
from leannorm.functional.door import public, run
from leannorm.functional.rows import dtype_of_cast, normalized_rows
from leannorm.functional.valid import Lengths


@public(normalized_rows, F.layer_norm, jagged.rows)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dim: int | None = None,
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
) -> Tensor:
    """Normalize every row to mean 0 and variance 1, then scale and shift it.

        y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    E and the biased Var are over the normalized axes: the last ones, whose sizes are `normalized_shape`, or
    with `dim` that single axis, which is not moved (`dim=1` of (N, C, H, W) is the channel norm of ConvNeXt).
    Everything else is as in `torch.nn.functional.layer_norm`.

    `mask` (bool) says which rows are data, and broadcasts against the input without its normalized axes;
    `lengths` (N,) says how many of each sample's rows are data, if a row has two indices, as in (N, L, C).
    The other rows are not read; output and input gradient are 0 there, and they do not enter the gradients of
    weight and bias.

    Shapes: any input, weight and bias `normalized_shape`; output as input, in its layout if it is dense.
    A jagged `torch.nested` tensor whose rows are whole gives one with the same offsets.
    Dtypes: as `batch_norm`, but statistics are computed in float32 (float64 for float64).
    Kept: the input (4 bytes per element in float32) and 8 bytes per row (16 in float64), with a mask 1 more.
    Raises: `DtypeError` if a tensor is not floating; `InputError` if `normalized_shape`, a parameter's shape,
    `mask` or `lengths` does not fit, or `eps` is negative.
    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, arXiv:1607.06450.

    >>> import torch
    >>> from leannorm import functional as F
    >>> F.layer_norm(torch.tensor([[1.0, 3.0], [10.0, 30.0]]), (2,), eps=0.0)
    tensor([[-1.,  1.],
            [-1.,  1.]])
    """
    if mask is None and lengths is None and not has_torch_function_variadic(input, weight, bias):
        y: Tensor | None = fast.row_norm(input, weight, bias, normalized_shape, eps, False, dim)
        if y is not None:
            return y
    return run(layer_norm, (input, normalized_shape, weight, bias, eps, dim, mask, lengths))


@public(normalized_rows, F.rms_norm, jagged.rows, dtype=dtype_of_cast)
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dim: int | None = None,
    weight_offset: float = 0.0,
    cast: str = "after",
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
) -> Tensor:
    """Divide every row by its root mean square, then scale it.

        y = x / sqrt(E[x^2] + eps) * (weight + weight_offset)

    E is over the normalized axes, which are those of `layer_norm`. `eps=None` is the machine epsilon of the
    arithmetic (float64's for float64 input, otherwise float32's). The sum with `weight_offset` is computed
    in the arithmetic's dtype; Gemma uses 1.0. With `cast="before"` the normalized value is rounded to the
    input's dtype before it is multiplied by the weight, as in Llama. `mask` and `lengths` are those of
    `layer_norm`. Everything else is as in `torch.nn.functional.rms_norm`.

    Shapes: as `layer_norm`.
    Dtypes: as `layer_norm`; with `cast="before"` the output has the dtype that torch promotes input and
    weight to.
    Kept: the input (4 bytes per element in float32) and 4 bytes per row (8 in float64).
    Raises: as `layer_norm`, and `InputError` if `weight_offset` is not finite or `cast` is unknown.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467.

    >>> import torch
    >>> from leannorm import functional as F
    >>> F.rms_norm(torch.tensor([[3.0, 4.0]]), (2,), eps=0.0) * 12.5**0.5
    tensor([[3., 4.]])
    """
    if mask is None and lengths is None and not has_torch_function_variadic(input, weight):
        y: Tensor | None = fast.row_norm(
            input, weight, None, normalized_shape, eps, True, dim, weight_offset, cast
        )
        if y is not None:
            return y
    return run(rms_norm, (input, normalized_shape, weight, eps, dim, weight_offset, cast, mask, lengths))


@public(normalized_rows, packed=jagged.rows)
def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dim: int | None = None,
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the residual, then layer-normalize the sum: the step between two blocks of a transformer.

        r = input + residual
        y = layer_norm(r, ...)

    Returns y and r. The other arguments are those of `layer_norm`; in rows that are not data r is 0 too.

    Shapes: as `layer_norm`; residual, y and r as input.
    Dtypes: as `layer_norm`; y and r have the input's dtype.
    Kept: r (an output, so 0 bytes per element) and 8 bytes per row (16 in float64).
    Raises: as `layer_norm`, and `InputError` if the residual's shape is not the input's.
    Source: as `layer_norm`.

    >>> import torch
    >>> from leannorm import functional as F
    >>> y, r = F.add_layer_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]]), (2,), eps=0.0)
    >>> y, r
    (tensor([[-1.,  1.]]), tensor([[1., 3.]]))
    """
    usual = mask is None and lengths is None and residual is not None
    if usual and not has_torch_function_variadic(input, residual, weight, bias):
        how = normalized_shape, eps, False, dim
        both: tuple[Tensor, Tensor] | None = fast.row_norm(input, weight, bias, *how, residual=residual)
        if both is not None:
            return both
    values = input, residual, normalized_shape, weight, bias, eps, dim, mask, lengths
    return run(add_layer_norm, values)


@public(normalized_rows, packed=jagged.rows, dtype=dtype_of_cast)
def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dim: int | None = None,
    weight_offset: float = 0.0,
    cast: str = "after",
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the residual, then RMS-normalize the sum: the step between two blocks of a transformer.

        r = input + residual
        y = rms_norm(r, ...)

    Returns y and r. The other arguments are those of `rms_norm`; in rows that are not data r is 0 too.

    Shapes: as `add_layer_norm`.
    Dtypes: y as `rms_norm`, r as the input.
    Kept: r (an output, so 0 bytes per element) and 4 bytes per row (8 in float64).
    Raises: as `rms_norm`, and `InputError` if the residual's shape is not the input's.
    Source: as `rms_norm`.

    >>> import torch
    >>> from leannorm import functional as F
    >>> y, r = F.add_rms_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), (2,), eps=0.0)
    >>> r
    tensor([[3., 4.]])
    """
    usual = mask is None and lengths is None and residual is not None
    if usual and not has_torch_function_variadic(input, residual, weight):
        how = normalized_shape, eps, True, dim, weight_offset, cast, residual
        both: tuple[Tensor, Tensor] | None = fast.row_norm(input, weight, None, *how)
        if both is not None:
            return both
    values = input, residual, normalized_shape, weight, eps, dim, weight_offset, cast, mask, lengths
    return run(add_rms_norm, values)
