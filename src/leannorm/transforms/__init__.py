"""Model to model: layers swapped in place, everything restored on error."""

from leannorm.transforms.convert import convert as convert
from leannorm.transforms.convert import preview as preview

__all__ = ["convert", "preview"]
