"""Model to model: layers swapped in place, everything restored on error."""

from leannorm.transforms.convert import convert as convert

__all__ = ["convert"]
