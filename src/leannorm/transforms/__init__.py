"""Model to model: swap norm layers in place (`convert`), fold batch norms for inference (`fold`)."""

from leannorm.transforms.conversion import convert as convert
from leannorm.transforms.conversion import preview as preview
from leannorm.transforms.folding import FoldReport as FoldReport
from leannorm.transforms.folding import fold as fold
from leannorm.transforms.freezing import freeze as freeze
from leannorm.transforms.freezing import unfreeze as unfreeze

__all__ = ["FoldReport", "convert", "fold", "freeze", "preview", "unfreeze"]
