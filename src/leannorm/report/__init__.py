"""What does it cost, is it right, what is wrong with a model? Data first, then text and HTML."""

from typing import TYPE_CHECKING

from leannorm._lazy import later

if TYPE_CHECKING:
    from leannorm.report import memory as memory
else:
    __getattr__ = later(__name__, {"memory": ""})  # which docs/memory.md names
