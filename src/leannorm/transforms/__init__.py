"""Model to model: layers swapped in place, everything restored on error."""

from leannorm.transforms.convert import convert as convert
from leannorm.transforms.convert import preview as preview
from leannorm.transforms.fold import FoldReport as FoldReport
from leannorm.transforms.fold import fold as fold

__all__ = ["FoldReport", "convert", "fold", "preview"]
