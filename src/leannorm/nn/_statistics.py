"""Running statistics with a dtype of their own: `stats_dtype`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leannorm import _checks

if TYPE_CHECKING:
    from typing_extensions import Self


class HasStatistics(torch.nn.Module):
    """Mixed into the layers that have running statistics; `statistics` are their names.

    With a `stats_dtype` they keep it whatever the layer is cast to, and are never rounded in between. If
    something casts a buffer without the layer's knowledge (FSDP does), the next forward pass casts it back.
    """

    statistics: tuple[str, ...] = ("running_mean", "running_var")
    stats_dtype: torch.dtype | None = None

    def keep_statistics_in(self, dtype: torch.dtype | None) -> None:
        """Set `stats_dtype`, and cast the running statistics to it."""
        _checks.stats_dtype(dtype)
        if dtype is not None:  # otherwise the class's attribute says so
            self.stats_dtype = dtype
            self._cast_back()

    def _cast_back(self) -> None:
        """Give the running statistics their dtype again, if they have lost it."""
        for name in self.statistics:
            buffer = self._buffers.get(name)
            if buffer is not None and buffer.dtype is not self.stats_dtype and self.stats_dtype is not None:
                self._buffers[name] = buffer.to(self.stats_dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: self._buffers.get(name) for name in self.statistics}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            now = self._buffers.get(name)
            if buffer is None or now is None or self.stats_dtype in (None, now.dtype):
                continue
            self._buffers[name] = buffer.to(now.device, self.stats_dtype)  # not from a rounded copy
        return self

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """As torch does, even with `assign=True`, which takes the tensors of the state_dict as they are."""
        super()._load_from_state_dict(*arguments)
        self._cast_back()

    def extra_repr(self) -> str:
        said = super().extra_repr()
        return said if self.stats_dtype is None else f"{said}, stats_dtype={self.stats_dtype}"
