"""`held=`: tensors that are kept go through a user's hooks: to the host, to a file, compressed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from leannorm.saving.log.log import Log
from leannorm.saving.log.tensors import below, beside, empty_as, geometry_of, over, sample_of
from leannorm.saving.log.values import HELD, Value


class Elsewhere:
    """A tensor that a user's hooks keep. `is_other`: whether they return it in other memory."""

    def __init__(self, bring: Callable[[], Tensor], memory: StorageWeakRef) -> None:
        self._bring, self.memory, self.is_other = bring, memory, True
        # its memory is about to be written, and a copy that is under way must not see that
        self.settle: Callable[[], None] = getattr(bring, "settle", lambda: None)

    def bring(self, x: Value) -> Tensor:
        """The tensor, in its old layout."""
        made = x.made
        with _disable_current_modes(), torch.no_grad():
            tensor = self._bring()
        with below():
            flat = not made.fills(x.storage_bytes)
            fits = (
                tensor.numel() == x.storage_bytes // made.dtype.itemsize
                if flat
                else tensor.shape == made.sizes
            )
            if tensor.dtype != made.dtype or tensor.device != made.device or not fits:
                raise RuntimeError(
                    "leannorm.lean(held=...): the second hook returns the tensor that the first one got, of"
                    f" shape {list(made.sizes)} and dtype {made.dtype} on {made.device}; got shape"
                    f" {list(tensor.shape)} and dtype {tensor.dtype} on {tensor.device}"
                )
            self.is_other = StorageWeakRef(tensor.untyped_storage()) != self.memory
            tensor = tensor.detach() if tensor.requires_grad else tensor
            if flat:
                whole = tensor.is_contiguous() and not tensor.storage_offset()
                return over((tensor if whole else tensor.contiguous().clone()).untyped_storage(), made)
            return tensor if geometry_of(tensor) == made else empty_as(made).copy_(tensor)


def hand_over(log: Log) -> None:
    """Give the values in `to_move` to the innermost pass's hooks. This waits until the call that reads them
    has ended, as it may write them."""
    waiting, log.to_move = log.to_move, []
    hold = log.passes[-1].hold if log.passes else None
    if hold is None:
        return
    for v in waiting:
        x = log.values[v]
        item = x.made.dtype.itemsize
        placed = x.saves or not log.passes[-1].chooses  # otherwise the plan has no place for it
        taken = not placed or x.elsewhere is not None or x.copied or x.lost or x.shown is not None
        if (
            x.held is None
            or not x.refs
            or taken
            or x.state != HELD
            or not log.is_there(v)
            or x.storage_bytes % item
        ):
            continue
        shape = x.made
        if not shape.fills(x.storage_bytes):
            shape = shape._replace(sizes=(x.storage_bytes // item,), strides=(1,), offset=0)
        given = over(x.held.untyped_storage(), shape)
        busy, log.busy = log.busy, True
        try:
            with beside(), torch.no_grad():
                bring = hold(given)
        finally:
            log.busy = busy
        if bring is None or not x.refs or x.state != HELD:
            continue
        x.sample = sample_of(x.as_made(given)) if x.sample is None else x.sample
        x.elsewhere = Elsewhere(bring, StorageWeakRef(given.untyped_storage()))
        with below():
            x.held = given.new_empty(0)
