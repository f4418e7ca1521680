"""Layers, drop-in for torch.nn's."""

from leannorm.nn.act import BatchNormAct1d as BatchNormAct1d
from leannorm.nn.act import BatchNormAct2d as BatchNormAct2d
from leannorm.nn.act import BatchNormAct3d as BatchNormAct3d
from leannorm.nn.batch import BatchNorm1d as BatchNorm1d
from leannorm.nn.batch import BatchNorm2d as BatchNorm2d
from leannorm.nn.batch import BatchNorm3d as BatchNorm3d
from leannorm.nn.conv import ConvBatchNorm1d as ConvBatchNorm1d
from leannorm.nn.conv import ConvBatchNorm2d as ConvBatchNorm2d
from leannorm.nn.conv import ConvBatchNorm3d as ConvBatchNorm3d
from leannorm.nn.group import GroupNorm as GroupNorm
from leannorm.nn.group import GroupNormAct as GroupNormAct
from leannorm.nn.instance import InstanceNorm1d as InstanceNorm1d
from leannorm.nn.instance import InstanceNorm2d as InstanceNorm2d
from leannorm.nn.instance import InstanceNorm3d as InstanceNorm3d
from leannorm.nn.layer import LayerNorm as LayerNorm
from leannorm.nn.layer import RMSNorm as RMSNorm
from leannorm.nn.modulated import AdaLayerNorm as AdaLayerNorm
from leannorm.nn.modulated import AdaRMSNorm as AdaRMSNorm
from leannorm.nn.modulated import RMSNormGated as RMSNormGated
from leannorm.nn.operator import BatchNormOp as BatchNormOp
from leannorm.nn.sync import SyncBatchNorm as SyncBatchNorm

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
