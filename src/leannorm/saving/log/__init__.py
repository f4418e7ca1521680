"""The log in Python, where the C++ nodes are not built: what csrc/nodes/record/ does, by a mode of torch.

Its names are those that C++ has for saving/recorded.py.
"""

from leannorm.saving.log.hooks import alive as alive
from leannorm.saving.log.hooks import record_pack as record_pack
from leannorm.saving.log.hooks import record_unpack as record_unpack
from leannorm.saving.log.passes import RecordedPass as RecordedPass
from leannorm.saving.log.passes import set_operator as set_operator
from leannorm.saving.log.passes import set_recorded as set_recorded
from leannorm.saving.log.plans import Places as Places
from leannorm.saving.log.recorder import own_modes as own_modes
from leannorm.saving.log.trials import forget_trials as forget_trials


class Learned:
    """What a pass under `limit=` leaves to the next ones: nothing, here."""


def bytes_in_use() -> int:
    """Nobody says."""
    return 0
