"""Layer norm and RMS norm: statistics of every row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function_variadic

from leannorm import _checks
from leannorm._types import Maybe, Rows, RowTensors
from leannorm.autograd import fast
from leannorm.autograd.rows import row_norm
from leannorm.functional import jagged, stock
from leannorm.functional.declare import Arguments
from leannorm.functional.door import hand_over, public
from leannorm.functional.jagged import NestedTensor
from leannorm.functional.shards import by_row, modulation
from leannorm.functional.valid import Lengths, valid_positions
from leannorm.ops.modes import exporting, sharded
from leannorm.ops.plan import row_statistics_shape
from leannorm.ops.precision import compute_dtype


def dtype_of_cast(arguments: Arguments) -> torch.dtype:
    """The dtype of a row norm's output: wider than the input if it is rounded before it is multiplied by a
    wider weight."""
    x, weight, cast = arguments["input"], arguments["weight"], arguments.get("cast", "after")
    if weight is None or cast == "after" or arguments.get("norm_before_gate", False):
        return x.dtype  # type: ignore[no-any-return]
    return torch.promote_types(x.dtype, weight.dtype)


def checked_row_norm(
    tensors: RowTensors,
    normalized_shape: Sequence[int],
    form: stock.RowForm,
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
) -> tuple[Tensor, Tensor]:
    """y and x + gate * residual (else x), of any row norm; every rule on its arguments is checked first."""
    if exporting():
        return stock.row_norm(tensors, normalized_shape, form, mask, lengths)
    input, residual, gate, scale, shift, weight, bias = tensors
    eps, dim, rms, weight_offset, cast_before = form
    _checks.floating("input", input)
    start, stop = _checks.normalized_axes(input, normalized_shape, dim)
    _checks.row_parameters(input, normalized_shape, weight=weight, bias=bias)
    if scale is not None:
        _checks.modulations(input, start, scale=scale, shift=shift, gate=gate)
        _checks.same_modulation(scale, shift)
        weight_offset = 1.0 if weight is None and bias is None else 0.0
    _checks.like_input("residual" if scale is None else "branch", residual, input)
    if eps is None:
        eps = torch.finfo(compute_dtype(input)).eps
    _checks.non_negative_eps(eps)
    rows = Rows(start, stop, eps, rms, float(weight_offset), cast_before)
    if sharded(*tensors):
        return _of_shards(tensors, rows, mask, lengths)
    return row_norm(tensors, rows, _valid_rows(input, mask, lengths, start, stop))


def _of_shards(
    tensors: RowTensors, rows: Rows, mask: Tensor | None, lengths: Lengths | None
) -> tuple[Tensor, Tensor]:
    x, _, *of_scale, _, _ = tensors
    elements, normalized = range(x.dim()), (rows.start, rows.stop)
    if lengths is not None:
        _checks.lengths_of_rows(x, *normalized)

    def run(*parts: Any) -> tuple[Tensor, Tensor]:
        local = RowTensors(*parts[:-1])
        return row_norm(local, rows, _valid_rows(local.x, parts[-1], None, *normalized))

    axes = elements, elements, *(modulation(v, x, rows.start) for v in of_scale), *(range(*normalized),) * 2
    made: tuple[Tensor, Tensor] = by_row(run, tensors, axes, normalized, (mask, lengths, "zero"))
    return made


def _valid_rows(input: Tensor, mask: Maybe, lengths: Lengths | None, start: int, stop: int) -> Maybe:
    """Which rows are data, in the statistics' shape; None if all are."""
    if lengths is not None:
        _checks.lengths_of_rows(input, start, stop)
    valid = valid_positions(input, mask, lengths, kept=(start, stop))
    return None if valid is None else valid.mask.view(row_statistics_shape(input.shape, start, stop))


@public(F.layer_norm, jagged.rows)
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
    if has_torch_function_variadic(input, weight, bias, mask, lengths) or type(input) is NestedTensor:
        values = input, normalized_shape, weight, bias, eps, dim, mask, lengths
        return hand_over(layer_norm, values)
    if dim is None and mask is None and lengths is None:
        y = fast.row_norm(input, weight, bias, normalized_shape, eps, rms=False)
        if y is not None:
            return y
    form = stock.RowForm(eps, dim)
    tensors = RowTensors(input, None, None, None, None, weight, bias)
    return checked_row_norm(tensors, normalized_shape, form, mask, lengths)[0]


@public(F.rms_norm, jagged.rows, dtype=dtype_of_cast)
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
    if has_torch_function_variadic(input, weight, mask, lengths) or type(input) is NestedTensor:
        values = input, normalized_shape, weight, eps, dim, weight_offset, cast, mask, lengths
        return hand_over(rms_norm, values)
    if dim is None and mask is None and lengths is None and weight_offset == 0 and cast == "after":
        y = fast.row_norm(input, weight, None, normalized_shape, eps, rms=True)
        if y is not None:
            return y
    _checks.weight_offset(weight_offset)
    _checks.cast(cast)
    form = stock.RowForm(eps, dim, True, weight_offset, cast == "before")
    tensors = RowTensors(input, None, None, None, None, weight)
    return checked_row_norm(tensors, normalized_shape, form, mask, lengths)[0]


@public(packed=jagged.rows)
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
    tensors = RowTensors(input, residual, None, None, None, weight, bias)
    if has_torch_function_variadic(*tensors, mask, lengths) or type(input) is NestedTensor:
        values = input, residual, normalized_shape, weight, bias, eps, dim, mask, lengths
        return hand_over(add_layer_norm, values)
    return checked_row_norm(tensors, normalized_shape, stock.RowForm(eps, dim), mask, lengths)


@public(packed=jagged.rows, dtype=dtype_of_cast)
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
    if has_torch_function_variadic(input, residual, weight, mask, lengths) or type(input) is NestedTensor:
        values = (
            *(input, residual, normalized_shape, weight, eps),
            *(dim, weight_offset, cast, mask, lengths),
        )
        return hand_over(add_rms_norm, values)
    _checks.weight_offset(weight_offset)
    _checks.cast(cast)
    form = stock.RowForm(eps, dim, True, weight_offset, cast == "before")
    tensors = RowTensors(input, residual, None, None, None, weight)
    return checked_row_norm(tensors, normalized_shape, form, mask, lengths)
