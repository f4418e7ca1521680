"""Model to model: swap norm layers in place (`convert`), fold batch norms for inference (`fold`)."""

from leannorm.transforms.conversion import convert as convert
from leannorm.transforms.conversion import preview as preview
from leannorm.transforms.folding import FoldReport as FoldReport
from leannorm.transforms.folding import fold as fold
from leannorm.transforms.freezing import freeze as freeze
from leannorm.transforms.freezing import unfreeze as unfreeze
from leannorm.transforms.pooling import Recalibrated as Recalibrated
from leannorm.transforms.pooling import RecalibrationReport as RecalibrationReport
from leannorm.transforms.pooling import accumulate_stats as accumulate_stats
from leannorm.transforms.pooling import recalibrate as recalibrate

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
