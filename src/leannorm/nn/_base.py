"""The parts that all batch-norm layers have: torch's parameters, buffers and state_dict, and one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from leannorm import _checks
from leannorm._types import Pool
from leannorm.autograd import fast
from leannorm.autograd.sync import Sharing
from leannorm.functional.batch import tracked_batch_norm
from leannorm.functional.valid import UNMASKED, Masking
from leannorm.nn._layer import MaskedLayer, parameter_of
from leannorm.nn._statistics import HasStatistics


def without_bias(bias: bool) -> dict[str, bool]:
    """torch's keyword `bias`, passed only if it is False, since older versions of torch do not have it."""
    return {} if bias else {"bias": False}


class BatchNormBase(HasStatistics, MaskedLayer, _BatchNorm):
    """The base of all batch norms; `dims` are the numbers of axes that a subclass accepts."""

    dims: Sequence[int] = (2, 3, 4, 5)
    group_size: int | None = None  # number of samples that are normalized together; None: all
    shares: bool = False  # whether it calls `_sharing`
    _pool: Pool | None = None  # set within `accumulate_stats`

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
    ) -> None:
        _checks.stats_dtype(stats_dtype)
        _checks.group_size(group_size)
        arguments = num_features, eps, momentum, affine, track_running_stats, device, dtype
        super().__init__(*arguments, **without_bias(bias))
        self.keep_statistics_in(stats_dtype)
        if group_size is not None:
            self.group_size = group_size

    def _sharing(self) -> Sharing | None:
        """The ranks that this layer shares its statistics with; None except for SyncBatchNorm."""
        return None

    def _normalize(
        self,
        input: Tensor,
        act: str = "identity",
        residual: Tensor | None = None,
        masking: Masking = UNMASKED,
    ) -> Tensor:
        # nothing here may depend on the input, which may be a proxy of torch.fx
        if self.stats_dtype is not None:
            self._cast_back()
        updates = self.training and self.track_running_stats
        reads = updates or not self.training
        return tracked_batch_norm(
            input,
            self.running_mean if reads else None,
            self.running_var if reads else None,
            self.num_batches_tracked if updates else None,
            parameter_of(self, "weight"),
            parameter_of(self, "bias"),
            self.training,
            self.momentum,
            self.eps,
            self.dims,
            act,
            residual,
            self._sharing() if self.training else None,
            pool=self._pool,
            group_size=self.group_size,
            mask=masking[0],
            lengths=masking[1],
            fill=masking[2],
        )

    def _fast(self, input: Tensor, act: str = "identity", residual: Tensor | None = None) -> Tensor | None:
        """The fast path, with the shortest way to each tensor."""
        if type(input) is not Tensor or input.dim() not in self.dims:
            return None
        if self.group_size is not None or self._pool is not None:
            return None
        if self.stats_dtype is not None:
            self._cast_back()
        try:
            parameters, buffers = self._parameters, self._buffers
            weight, bias = parameters["weight"], parameters["bias"]
            mean, var = buffers["running_mean"], buffers["running_var"]
            count = buffers["num_batches_tracked"]
        except KeyError:  # with a parametrization, or in a replica, they are elsewhere
            return None
        if not self.track_running_stats and mean is not None:  # only read in evaluation
            return None
        sharing = self._sharing() if self.shares and self.training else None
        norm = 0, self.eps, act, self.training or mean is None, self.momentum, True, False
        return fast.batch_norm((input, weight, bias, residual, mean, var, count, None), norm, sharing)

    def extra_repr(self) -> str:
        said = super().extra_repr()
        return said if self.group_size is None else f"{said}, group_size={self.group_size}"
