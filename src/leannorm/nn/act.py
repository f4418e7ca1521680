"""BatchNormAct1d, 2d and 3d: batch norm, a residual and an activation as one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm import _checks
from leannorm.functional.valid import Lengths
from leannorm.nn._base import BatchNormBase
from leannorm.nn.batch import BatchNorm1d, BatchNorm2d, BatchNorm3d
from leannorm.ops.activation import lists_activations


class BatchNormActBase(BatchNormBase):
    """`forward` of the three; `activation` is a name of `leannorm.functional.batch_norm_act`'s `act`."""

    activation: str

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        stats_dtype: torch.dtype | None = None,
        group_size: int | None = None,
        act: str = "relu",
    ) -> None:
        _checks.activation(act)
        arguments = num_features, eps, momentum, affine, track_running_stats, device, dtype
        super().__init__(*arguments, bias=bias, stats_dtype=stats_dtype, group_size=group_size)
        self.activation = act

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        fill: str = "zero",
    ) -> Tensor:
        """act(norm(input) + residual) in one pass; `residual`, if given, has the shape of `input`.

        `mask` or `lengths` leave out padding, as in `functional.batch_norm`.
        """
        if mask is None and lengths is None and fill == "zero":
            y = self._fast(input, self.activation, residual)
            if y is not None:
                return y
        return self._normalize(input, self.activation, residual, (mask, lengths, fill))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, act={self.activation}"


class BatchNormAct1d(BatchNormActBase, BatchNorm1d):
    """Batch norm over (N, C) or (N, C, L), plus a residual, through an activation, in one pass.

        layer(x, residual) = act(batch_norm(x) + residual)

    The activations are those of `BatchNormAct2d`; the residual may be left out.

    Shapes: input (N, C) or (N, C, L); residual and output as input.
    Dtypes: as `functional.batch_norm_act`.
    Kept: as `BatchNormAct2d`.
    Raises, Source: as `BatchNorm1d`.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.BatchNormAct1d(4, act="silu")(torch.randn(16, 4)).shape
    torch.Size([16, 4])
    """


@lists_activations
class BatchNormAct2d(BatchNormActBase, BatchNorm2d):
    """Batch norm over (N, C, H, W), plus a residual, through an activation, in one pass.

        layer(x) = act(batch_norm(x))
        layer(x, residual) = act(batch_norm(x) + residual)

    `act` is one of <activations>. All other arguments and the state_dict keys are those of `BatchNorm2d`.

    Shapes: input (N, C, H, W); residual and output as input.
    Dtypes: as `functional.batch_norm_act`.
    Kept: as `functional.batch_norm_act`; torch's two or three layers keep the activation's input or output as
    well.
    Raises, Source: as `BatchNorm1d`.

    >>> import torch
    >>> from leannorm import nn
    >>> x, shortcut = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8)
    >>> bool((nn.BatchNormAct2d(4)(x, shortcut) >= 0).all())
    True
    """


class BatchNormAct3d(BatchNormActBase, BatchNorm3d):
    """Batch norm over (N, C, D, H, W), plus a residual, through an activation, in one pass.

        layer(x, residual) = act(batch_norm(x) + residual)

    The activations are those of `BatchNormAct2d`; the residual may be left out.

    Shapes: input (N, C, D, H, W); residual and output as input.
    Dtypes: as `functional.batch_norm_act`.
    Kept: as `BatchNormAct2d`.
    Raises, Source: as `BatchNorm1d`.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.BatchNormAct3d(4)(torch.randn(2, 4, 2, 8, 8)).shape
    torch.Size([2, 4, 2, 8, 8])
    """
