"""How is a model changed, and changed back? Norms swapped, fused, folded, frozen, their statistics pooled."""

from leannorm.transforms.converting.conversion import convert as convert
from leannorm.transforms.converting.conversion import preview as preview
from leannorm.transforms.folding.fold import FoldReport as FoldReport
from leannorm.transforms.folding.fold import fold as fold
from leannorm.transforms.statistics.freezing import freeze as freeze
from leannorm.transforms.statistics.freezing import unfreeze as unfreeze
from leannorm.transforms.statistics.pooling import Recalibrated as Recalibrated
from leannorm.transforms.statistics.pooling import RecalibrationReport as RecalibrationReport
from leannorm.transforms.statistics.pooling import accumulate_stats as accumulate_stats
from leannorm.transforms.statistics.pooling import recalibrate as recalibrate

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
