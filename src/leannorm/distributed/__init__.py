"""Statistics shared by the ranks of a process group: one sum in each direction, and no silent hang."""

from leannorm.distributed.collective import checkpoint_contexts
from leannorm.distributed.joining import join
from leannorm.distributed.membership import no_sync

__all__ = ["checkpoint_contexts", "join", "no_sync"]
__dir__ = __all__.copy
