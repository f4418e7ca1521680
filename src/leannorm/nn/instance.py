"""InstanceNorm1d, 2d and 3d: torch's layers, with leannorm's kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.instancenorm import _InstanceNorm

from leannorm import _checks
from leannorm.autograd import fast
from leannorm.functional.group import layer_instance_norm
from leannorm.functional.valid import UNMASKED, Masking
from leannorm.nn._base import without_bias
from leannorm.nn._layer import MaskedLayer, parameter_of
from leannorm.nn._statistics import HasStatistics
from leannorm.ops.activation import ACTIVATIONS


class _InstanceNormBase(HasStatistics, MaskedLayer, _InstanceNorm):
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        stats_dtype: torch.dtype | None = None,
    ) -> None:
        _checks.stats_dtype(stats_dtype)
        arguments = num_features, eps, momentum, affine, track_running_stats, device, dtype
        super().__init__(*arguments, **without_bias(bias))
        self.keep_statistics_in(stats_dtype)

    def _fast(self, input: Tensor, act: str = "identity") -> Tensor | None:
        """The fast path, if there are no running statistics."""
        parameters = self._parameters
        if self.track_running_stats or self._buffers.get("running_mean", input) is not None:
            return None
        if not ("weight" in parameters and "bias" in parameters):  # with a parametrization they are elsewhere
            return None
        rank, weight, bias = self._get_no_batch_dim() + 1, parameters["weight"], parameters["bias"]
        return fast.instance_norm(input, weight, bias, self.eps, act, rank, self.num_features)

    def _normalize(self, input: Tensor, act: str = "identity", masking: Masking = UNMASKED) -> Tensor:
        """With `track_running_stats` evaluation uses the running statistics, which training updates."""
        if act != "identity":
            activation = ACTIVATIONS[act]
            y: Tensor = activation.module(**activation.parameters)(self._normalize(input, masking=masking))
            return y
        # nothing here may depend on the input, which may be a proxy of torch.fx
        if self.stats_dtype is not None:
            self._cast_back()
        return layer_instance_norm(
            input,
            self.running_mean,
            self.running_var,
            parameter_of(self, "weight"),
            parameter_of(self, "bias"),
            self.training or not self.track_running_stats,
            self.momentum,
            self.eps,
            self._get_no_batch_dim() + 1,
            self.num_features,
            mask=masking[0],
            lengths=masking[1],
            fill=masking[2],
        )


class InstanceNorm1d(_InstanceNormBase, torch.nn.InstanceNorm1d):
    """Instance norm over (N, C, L) or (C, L); replaces `torch.nn.InstanceNorm1d`, same state_dict both ways.

        y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    E and the biased Var are over all positions of one channel of one sample. With `track_running_stats=True`
    training updates `running_mean` and `running_var` (unbiased) with the averages over the samples by
    `momentum`, and evaluation uses them; they keep `stats_dtype` whatever the layer is cast to. Parameters
    and defaults (no weight, no bias, no running statistics) are torch's.

    Shapes: input (N, C, L) or (C, L), in any memory layout; output as input.
    Dtypes: as `functional.batch_norm`.
    Kept: the input (4 bytes per element in float32) and 16 bytes per channel of a sample.
    Raises: as `functional.instance_norm`, and `InputError` for another number of axes or of channels.
    Source: Ulyanov, Vedaldi and Lempitsky, 2016, arXiv:1607.08022.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.InstanceNorm1d(3)(torch.randn(4, 3, 8)).shape
    torch.Size([4, 3, 8])
    """


class InstanceNorm2d(_InstanceNormBase, torch.nn.InstanceNorm2d):
    """Instance norm over (N, C, H, W) or (C, H, W); replaces `torch.nn.InstanceNorm2d`, same state_dict.

        y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    Statistics are those of `InstanceNorm1d`.

    Shapes: input (N, C, H, W) or (C, H, W), in any memory layout; output as input.
    Dtypes: as `functional.batch_norm`.
    Kept, Raises, Source: as `InstanceNorm1d`.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.InstanceNorm2d(3)(torch.randn(4, 3, 8, 8)).shape
    torch.Size([4, 3, 8, 8])
    """


class InstanceNorm3d(_InstanceNormBase, torch.nn.InstanceNorm3d):
    """Instance norm over (N, C, D, H, W) or (C, D, H, W); replaces `torch.nn.InstanceNorm3d`.

        y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    Statistics are those of `InstanceNorm1d`.

    Shapes: input (N, C, D, H, W) or (C, D, H, W), in any memory layout; output as input.
    Dtypes: as `functional.batch_norm`.
    Kept, Raises, Source: as `InstanceNorm1d`.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.InstanceNorm3d(3)(torch.randn(4, 3, 2, 8, 8)).shape
    torch.Size([4, 3, 2, 8, 8])
    """
