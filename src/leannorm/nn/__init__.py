"""Layers, drop-in for torch.nn's."""

from leannorm.nn.act import BatchNormAct1d, BatchNormAct2d, BatchNormAct3d
from leannorm.nn.batch import BatchNorm1d, BatchNorm2d, BatchNorm3d
from leannorm.nn.conv import ConvBatchNorm1d, ConvBatchNorm2d, ConvBatchNorm3d
from leannorm.nn.group import GroupNorm, GroupNormAct
from leannorm.nn.instance import InstanceNorm1d, InstanceNorm2d, InstanceNorm3d
from leannorm.nn.layer import LayerNorm, RMSNorm
from leannorm.nn.modulated import AdaLayerNorm, AdaRMSNorm, RMSNormGated
from leannorm.nn.operator import BatchNormOp
from leannorm.nn.sync import SyncBatchNorm

__all__ = [
    "AdaLayerNorm",
    "AdaRMSNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchNormAct1d",
    "BatchNormAct2d",
    "BatchNormAct3d",
    "BatchNormOp",
    "ConvBatchNorm1d",
    "ConvBatchNorm2d",
    "ConvBatchNorm3d",
    "GroupNorm",
    "GroupNormAct",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "RMSNorm",
    "RMSNormGated",
    "SyncBatchNorm",
]
__dir__ = __all__.copy
