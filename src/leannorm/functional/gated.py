"""RMS norm with a gate: the norm of Mamba-2 and of gated linear attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import has_torch_function_variadic

from leannorm import _checks
from leannorm._types import Gating
from leannorm.autograd.gated import gated_norm
from leannorm.functional import stock
from leannorm.functional.door import hand_over, public
from leannorm.functional.layer import dtype_of_cast
from leannorm.functional.shards import by_row
from leannorm.ops.activation import lists_activations
from leannorm.ops.modes import exporting, sharded
from leannorm.ops.precision import compute_dtype


@public(dtype=dtype_of_cast)
@lists_activations
def gated_rms_norm(
    input: Tensor,
    gate: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    act: str = "silu",
    norm_before_gate: bool = True,
    *,
    cast: str = "after",
) -> Tensor:
    """RMS-normalize every row, and multiply by an activated gate: after the norm, or before it.

        y = rms_norm(x) * act(gate)      or, with norm_before_gate=False,      y = rms_norm(x * act(gate))

    `rms_norm` is over the last axes, with weight and eps. `act` is one of <activations>. With `cast="before"`
    the normalized value is rounded to the input's dtype before it is multiplied by the weight, as in
    transformers' `Qwen3NextRMSNormGated` (the norm before the gate) and `MambaRMSNormGated` (after it). The
    gate is applied in float32 (float64 for float64) either way.

    Shapes: input (*, normalized_shape), gate and output as input, weight normalized_shape.
    Dtypes: as `layer_norm`; with `cast="before"` and the gate before the norm the output has the dtype to
    which torch promotes input and weight.
    Kept: input and gate (8 bytes per element in float32) and 4 bytes per row (8 in float64).
    Raises: as `layer_norm`, and `InputError` if the gate's shape is not the input's, or `act` or `cast` is
    unknown.
    Source: Dao and Gu, "Transformers are SSMs", 2024, arXiv:2405.21060.

    >>> import torch
    >>> from leannorm import functional as F
    >>> F.gated_rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([[-1.0, 2.0]]), (2,), act="relu", eps=0.0)
    tensor([[0.0000, 2.2627]])
    """
    if has_torch_function_variadic(input, gate, weight):
        values = input, gate, normalized_shape, weight, eps, act, norm_before_gate, cast
        return hand_over(gated_rms_norm, values)
    if eps is None:
        eps = torch.finfo(compute_dtype(input)).eps
    _checks.activation(act)
    _checks.cast(cast)
    if exporting():
        settings = eps, act, norm_before_gate, cast == "before"
        return stock.gated_rms_norm(input, gate, normalized_shape, weight, *settings)
    _checks.floating("input", input)
    start, _ = _checks.normalized_axes(input, normalized_shape, None)
    _checks.row_parameters(input, normalized_shape, weight=weight)
    _checks.like_input("gate", gate, input)
    _checks.non_negative_eps(eps)
    gating = Gating(start, eps, act, bool(norm_before_gate), cast == "before")
    if not sharded(input, gate, weight):
        return gated_norm(input, gate, weight, gating)
    elements = range(input.dim())
    axes = elements, elements, elements[start:]

    def run(x: Tensor, gate: Tensor, weight: Tensor | None, mask: None) -> Tensor:
        return gated_norm(x, gate, weight, gating)

    y: Tensor = by_row(run, (input, gate, weight), axes, (start, input.dim()))
    return y
