"""Batch norm as an operator with explicit state, as a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from leannorm import _checks
from leannorm.functional.operator import DATA_LAYOUTS, batch_norm_op
from leannorm.nn._layer import Layer
from leannorm.nn._statistics import HasStatistics
from leannorm.ops.modes import rebuilding
from leannorm.ops.running import frozen


class BatchNormOp(HasStatistics, Layer):
    """Batch norm as an operator with explicit state: owns scale, bias, both estimates and a counter.

        y = (x - E[x]) / sqrt(Var[x] + epsilon) * scale + bias
        estimate = estimate * momentum + (1 - momentum) * statistic    in training

    This is the `batch_norm_layer` of the operator's design. `train()` runs the training operator, `eval()`
    the inference operator (`is_infer`), on the same variables. The first training batch sets `estimated_mean`
    and `estimated_var` (biased) to its own statistics, each later one updates them. With `use_global_est`
    training normalizes by the updated estimates, as constants.

    Shapes: input (N, C, *) for `data_layout="NCHW"`, (N, *, C) for `"NHWC"`; output as input.
    Dtypes: as `functional.batch_norm`.
    Kept: the input (4 bytes per element in float32) and 16 bytes per channel.
    Raises: as `functional.batch_norm`.
    Source: PaddlePaddle's design document "Batch Normalization" (batch_norm_op.md), 2017.

    >>> import torch
    >>> from leannorm import nn
    >>> layer = nn.BatchNormOp(4, data_layout="NHWC")
    >>> layer(torch.randn(2, 8, 8, 4)).shape, layer.batch_id.item()
    (torch.Size([2, 8, 8, 4]), 1)
    """

    statistics = ("estimated_mean", "estimated_var")
    estimated_mean: Tensor
    estimated_var: Tensor
    batch_id: Tensor

    def __init__(
        self,
        num_features: int,
        use_global_est: bool = False,
        epsilon: float = 1e-6,
        momentum: float = 0.99,
        data_layout: str = "NCHW",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        stats_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _checks.stats_dtype(stats_dtype)
        _checks.one_of("data_layout", data_layout, DATA_LAYOUTS)
        _checks.positive_eps(epsilon)
        self.num_features, self.use_global_est = num_features, use_global_est
        self.epsilon, self.momentum, self.data_layout = epsilon, momentum, data_layout
        self.scale = torch.nn.Parameter(torch.ones(num_features, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(num_features, device=device, dtype=dtype))
        self.register_buffer("estimated_mean", torch.zeros(num_features, device=device, dtype=dtype))
        self.register_buffer("estimated_var", torch.ones(num_features, device=device, dtype=dtype))
        self.register_buffer("batch_id", torch.zeros((), device=device, dtype=torch.int64))
        self.keep_statistics_in(stats_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalized as `functional.batch_norm_op` does; training updates the estimates and the
        counter."""
        if self.stats_dtype is not None:
            self._cast_back()
        result = batch_norm_op(
            x,
            self.estimated_mean,
            self.estimated_var,
            self.scale,
            self.bias,
            is_infer=not self.training,
            use_global_est=self.use_global_est,
            epsilon=self.epsilon,
            momentum=self.momentum,
            batch_id=self.batch_id,
            data_layout=self.data_layout,
        )
        if self.training and x.numel() and not (frozen() or rebuilding()):  # an empty batch updates nothing
            self.batch_id.add_(1)
        return result.y

    def extra_repr(self) -> str:
        kept = "" if self.stats_dtype is None else f", stats_dtype={self.stats_dtype}"
        return (
            f"{self.num_features}, use_global_est={self.use_global_est}, epsilon={self.epsilon}, "
            f"momentum={self.momentum}, data_layout={self.data_layout!r}{kept}"
        )
