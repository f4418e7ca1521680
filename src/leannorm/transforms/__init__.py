"""Model to model: swap norm layers in place (`convert`), fold batch norms for inference (`fold`)."""

from leannorm.transforms.conversion import convert as convert
from leannorm.transforms.conversion import preview as preview
from leannorm.transforms.folding import FoldReport as FoldReport
from leannorm.transforms.folding import fold as fold

__all__ = ["FoldReport", "convert", "fold", "preview"]
