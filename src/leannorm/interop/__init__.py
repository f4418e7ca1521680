"""How do other frameworks' checkpoints come in and go out, and how do their trainers call us?"""

from leannorm.interop import lightning, transformers
from leannorm.interop.checkpoints.conventions import CONVENTIONS, Convention
from leannorm.interop.checkpoints.loading import Loaded, load
from leannorm.interop.checkpoints.saving import save
from leannorm.interop.checkpoints.settings import ConventionWarning

__all__ = [
    "CONVENTIONS",
    "Convention",
    "ConventionWarning",
    "Loaded",
    "lightning",
    "load",
    "save",
    "transformers",
]


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__]
