"""Layers, drop-in for torch.nn's."""

from leannorm.nn.batch import BatchNorm1d as BatchNorm1d
from leannorm.nn.batch import BatchNorm2d as BatchNorm2d
from leannorm.nn.batch import BatchNorm3d as BatchNorm3d
from leannorm.nn.conv import ConvBatchNorm1d as ConvBatchNorm1d
from leannorm.nn.conv import ConvBatchNorm2d as ConvBatchNorm2d
from leannorm.nn.conv import ConvBatchNorm3d as ConvBatchNorm3d
from leannorm.nn.layer import LayerNorm as LayerNorm
from leannorm.nn.layer import RMSNorm as RMSNorm
from leannorm.nn.sync import SyncBatchNorm as SyncBatchNorm

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "ConvBatchNorm1d",
    "ConvBatchNorm2d",
    "ConvBatchNorm3d",
    "LayerNorm",
    "RMSNorm",
    "SyncBatchNorm",
]
