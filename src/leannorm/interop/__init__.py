"""How do other frameworks' checkpoints come in and go out, and how do their trainers call us?"""

from leannorm.interop import lightning as lightning
from leannorm.interop import transformers as transformers
from leannorm.interop.checkpoints.conventions import CONVENTIONS as CONVENTIONS
from leannorm.interop.checkpoints.conventions import Convention as Convention
from leannorm.interop.checkpoints.loading import Loaded as Loaded
from leannorm.interop.checkpoints.loading import load as load
from leannorm.interop.checkpoints.saving import save as save
from leannorm.interop.checkpoints.settings import ConventionWarning as ConventionWarning

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
