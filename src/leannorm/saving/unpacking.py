"""What a pass unpacks that is left as it is: tensors, and the first one of a pass that is timed."""

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
