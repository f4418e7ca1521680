"""The log in Python, used if the C++ nodes are not built: a mode of torch does what csrc/nodes/record/ does.

It has the same names as saving/cpp_log.py.
"""

from leannorm.saving.log.hooks import alive as alive
from leannorm.saving.log.hooks import record_first as record_first
from leannorm.saving.log.hooks import record_pack as record_pack
from leannorm.saving.log.hooks import record_unpack as record_unpack
from leannorm.saving.log.passes import begin as begin
from leannorm.saving.log.recorder import exposed as exposed
from leannorm.saving.log.trials import forget_trials as forget_trials

__all__ = ["alive", "begin", "exposed", "forget_trials", "record_first", "record_pack", "record_unpack"]
