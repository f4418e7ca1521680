"""How is a model changed, and changed back? Norms swapped, fused, folded, frozen, their statistics pooled."""

from leannorm.transforms.converting.conversion import convert, preview
from leannorm.transforms.folding.fold import FoldReport, fold
from leannorm.transforms.statistics.freezing import freeze, unfreeze
from leannorm.transforms.statistics.pooling import (
    Recalibrated,
    RecalibrationReport,
    accumulate_stats,
    recalibrate,
)

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


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__]
