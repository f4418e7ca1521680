"""The unpack hook of passes that are not recorded: it gets tensors, and a timed pass's first one."""

from __future__ import annotations

from torch import Tensor

from leannorm._torch import left_to_python
from leannorm.saving.small import Kept, read
from leannorm.saving.timing import Timed


@left_to_python
def unpack(packed: Kept | Timed) -> Tensor:
    """The unpack hook."""
    if not isinstance(packed, Timed):
        return read(packed)
    packed.timer.reach()
    tensor: Tensor = packed.unpack()
    return tensor
