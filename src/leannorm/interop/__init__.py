"""How do other frameworks' checkpoints come in and go out, and how do their trainers call us?"""

from typing import TYPE_CHECKING

from leannorm._lazy import later

if TYPE_CHECKING:
    from leannorm.interop import lightning, transformers
    from leannorm.interop.checkpoints.conventions import CONVENTIONS, Convention
    from leannorm.interop.checkpoints.loading import Loaded, load
    from leannorm.interop.checkpoints.saving import save
    from leannorm.interop.checkpoints.settings import ConventionWarning
else:
    __getattr__ = later(
        __name__,
        {
            "lightning": "",
            "transformers": "",
            "CONVENTIONS": "checkpoints.conventions",
            "Convention": "checkpoints.conventions",
            "Loaded": "checkpoints.loading",
            "load": "checkpoints.loading",
            "save": "checkpoints.saving",
            "ConventionWarning": "checkpoints.settings",
        },
    )

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
__dir__ = __all__.copy
