"""The log in Python, used if the C++ nodes are not built: a mode of torch does what csrc/nodes/record/ does.

It has the same names as the C++ library, for saving/recorded.py.
"""

from leannorm.saving.log.hooks import alive as alive
from leannorm.saving.log.hooks import record_pack as record_pack
from leannorm.saving.log.hooks import record_unpack as record_unpack
from leannorm.saving.log.passes import RecordedPass as RecordedPass
from leannorm.saving.log.passes import set_operator as set_operator
from leannorm.saving.log.passes import set_recorded as set_recorded
from leannorm.saving.log.passes import set_varying as set_varying
from leannorm.saving.log.plans import Places as Places
from leannorm.saving.log.recorder import own_modes as own_modes
from leannorm.saving.log.trials import forget_trials as forget_trials


class Learned:
    """What passes under `limit=` have learned: here, nothing."""


def bytes_in_use() -> int:
    """The process's bytes: 0, as the log in Python does not know them."""
    return 0
