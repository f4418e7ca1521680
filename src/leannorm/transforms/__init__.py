"""How is a model changed, and changed back? Norms replaced, fused, folded, frozen, their statistics
pooled."""

from typing import TYPE_CHECKING

from leannorm._lazy import later
from leannorm.transforms.converting.conversion import convert, preview
from leannorm.transforms.statistics.freezing import freeze, unfreeze
from leannorm.transforms.statistics.pooling import (
    Recalibrated,
    RecalibrationReport,
    accumulate_stats,
    recalibrate,
)

if TYPE_CHECKING:
    from leannorm.transforms.folding.fold import FoldReport, fold
else:
    __getattr__ = later(__name__, {"FoldReport": "folding.fold", "fold": "folding.fold"})

__all__ = [
    "FoldReport",
    "Recalibrated",
    "RecalibrationReport",
    "accumulate_stats",
    "convert",
    "fold",
    "freeze",
    "preview",
    "recalibrate",
    "unfreeze",
]
__dir__ = __all__.copy
