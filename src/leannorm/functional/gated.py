"""RMS norm with a gate: the norm of Mamba-2 and of gated linear attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.overrides import has_torch_function_variadic

from leannorm.autograd import fast
from leannorm.functional.door import public, run
from leannorm.functional.rows import dtype_of_cast, normalized_rows
from leannorm.ops.activation import lists_activations


@public(normalized_rows, dtype=dtype_of_cast)
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
    if not has_torch_function_variadic(input, gate, weight):
        how = eps, act, norm_before_gate, cast
        y = fast.gated_norm(input, gate, weight, normalized_shape, *how)
        if y is not None:
            return y
    values = input, gate, normalized_shape, weight, eps, act, norm_before_gate, cast
    return run(gated_rms_norm, values)
