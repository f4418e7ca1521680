"""Checkpoints of other frameworks: their conventions in one table, loading and saving by it."""

from leannorm.interop import lightning as lightning
from leannorm.interop import transformers as transformers
from leannorm.interop.checkpoints import Loaded as Loaded
from leannorm.interop.checkpoints import load as load
from leannorm.interop.conventions import CONVENTIONS as CONVENTIONS
from leannorm.interop.conventions import Convention as Convention
from leannorm.interop.export import save as save
from leannorm.interop.settings import ConventionWarning as ConventionWarning

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
