"""SyncBatchNorm: batch norm by the statistics of all ranks."""

from __future__ import annotations

import itertools
from collections import deque
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from leannorm import _checks
from leannorm.autograd.sync import Shared, Sharing
from leannorm.distributed.group import note_evaluation
from leannorm.distributed.membership import SharesStatistics, connected_group
from leannorm.functional.valid import UNMASKED, Masking
from leannorm.nn._base import BatchNormBase
from leannorm.ops.modes import traced

_constructed = itertools.count(1)
# forward passes that checkpointing may recompute: micro-batches in flight, at 64 bytes per channel
_REMEMBERED = 32

# the attributes that `share` sets
SHARING = ("process_group", "timeout", "debug_consistency", "layer_name", "_seen")


class Synchronized(SharesStatistics, BatchNormBase):
    """Base of the batch norms that share their statistics over ranks; see `SyncBatchNorm`."""

    shares = True
    timeout: float | None = None
    debug_consistency = False
    layer_name = "SyncBatchNorm"

    def share(
        self,
        process_group: dist.ProcessGroup | str | None = None,
        timeout: float | None = None,
        debug_consistency: bool = False,
        name: str | None = None,
    ) -> None:
        """Set the ranks to share with; `name` is the layer's name in errors, instead of its number."""
        _checks.timeout(timeout)
        self.process_group, self.timeout = process_group, timeout
        self.debug_consistency = debug_consistency
        self.layer_name = f"#{next(_constructed)}" if name is None else name
        self._seen: deque[Shared] = deque(maxlen=_REMEMBERED)

    def _sharing(self) -> Sharing | None:
        seen = None if traced() else vars(self).get("_seen")
        return Sharing(
            "", self.layer_name, self.timeout or 0.0, self.debug_consistency, seen, self.process_group
        )

    def _normalize(
        self,
        input: Tensor,
        act: str = "identity",
        residual: Tensor | None = None,
        masking: Masking = UNMASKED,
    ) -> Tensor:
        self._note_evaluation()
        return super()._normalize(input, act, residual, masking)

    def _fast(self, input: Tensor, act: str = "identity", residual: Tensor | None = None) -> Tensor | None:
        y = super()._fast(input, act, residual)
        if y is not None:  # otherwise `_normalize` notes it
            self._note_evaluation()
        return y

    def _note_evaluation(self) -> None:
        """Note it for the other ranks, which may be waiting for this one, without connecting to them."""
        if not (self.training or traced()):
            group = connected_group(self.process_group)
            if group is not None:
                note_evaluation(group, self.layer_name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Synchronized:
        """A copy shares with the same ranks (a process group cannot be copied) and remembers no forward
        passes."""
        copy = self.__class__.__new__(self.__class__)
        memo[id(self)] = copy
        memo[id(self.process_group)] = self.process_group
        for name, value in self.__dict__.items():
            copy.__dict__[name] = deque(maxlen=_REMEMBERED) if name == "_seen" else deepcopy(value, memo)
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": deque(maxlen=_REMEMBERED)}


class SyncBatchNorm(Synchronized):
    """Batch norm over (N, C, *) whose statistics are those of all ranks' inputs together.

        y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    E and Var are over the batches of all ranks in `process_group`: a group of torch.distributed, a
    `DeviceMesh` (`mesh["dp"]`), "node" (the ranks on one host), or None (all). The ranks' batches and image
    sizes may differ, and a batch may be empty. With one rank, or without a process group, it equals
    `BatchNorm` bit for bit. Works on any device whose backend has `all_reduce`: gloo on CPU, NCCL on GPU.
    Replaces `torch.nn.SyncBatchNorm`, same state_dict both ways; derives from `_BatchNorm`, since
    DistributedDataParallel rejects torch's class on CPU.

    It costs one `all_reduce` forward and one backward, of 8 (4 C + 7) bytes with the C of the widest layer,
    rounded up to a multiple of 4 KiB, for any number of ranks (over gloo on CPUs a gather, if that is small).
    The host does not wait for the device. Evaluation does not communicate, even without running statistics.

    Within `leannorm.distributed.no_sync()` each rank uses its own statistics;
    `leannorm.distributed.join(model)` lets ranks run out of batches. A pass repeated by
    `torch.utils.checkpoint` neither communicates nor updates.

    `stats_dtype` is that of `BatchNorm1d`. With `group_size` every group is of one rank's samples, so only
    the running statistics, of all ranks' batches, need an `all_reduce`, one forward.

    Shapes: input (N, C, *), in any memory layout; output as input.
    Dtypes: as `functional.batch_norm`.
    Kept: the input (4 bytes per element in float32), 16 bytes per channel, and 8 bytes.
    Raises: as `functional.batch_norm`. `SyncError`, the same on all ranks, if they disagree (another layer,
    mode, number of channels, eps, momentum or tracking of statistics): on an accelerator at one of the next
    calls, or at once with `debug_consistency`. `SyncError` on the other ranks, with its name, if a rank is
    missing for `timeout` seconds (default and at most: the group's own); NCCL needs `debug_consistency` for
    this, otherwise torch's watchdog ends the process.
    Source: Ioffe and Szegedy, 2015, arXiv:1502.03167; the merge: Chan, Golub and LeVeque, 1983.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.SyncBatchNorm(4)(torch.randn(16, 4)).shape
    torch.Size([16, 4])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        stats_dtype: torch.dtype | None = None,
        group_size: int | None = None,
        timeout: float | None = None,
        debug_consistency: bool = False,
    ) -> None:
        arguments = num_features, eps, momentum, affine, track_running_stats, device, dtype
        super().__init__(*arguments, bias=bias, stats_dtype=stats_dtype, group_size=group_size)
        self.share(process_group, timeout, debug_consistency)
