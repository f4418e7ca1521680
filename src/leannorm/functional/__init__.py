"""Norms as functions: checks, then one call."""

from leannorm.functional import cumulative as _cumulative  # noqa: F401  # declares an operator
from leannorm.functional.batch import batch_norm, batch_norm_act
from leannorm.functional.conv import conv_batch_norm
from leannorm.functional.gated import gated_rms_norm
from leannorm.functional.group import group_norm, group_norm_act, instance_norm
from leannorm.functional.layer import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from leannorm.functional.modulated import ada_layer_norm, ada_rms_norm, add_ada_layer_norm, add_ada_rms_norm
from leannorm.functional.operator import batch_norm_op
from leannorm.functional.sync import sync_batch_norm

__all__ = [
    "ada_layer_norm",
    "ada_rms_norm",
    "add_ada_layer_norm",
    "add_ada_rms_norm",
    "add_layer_norm",
    "add_rms_norm",
    "batch_norm",
    "batch_norm_act",
    "batch_norm_op",
    "conv_batch_norm",
    "gated_rms_norm",
    "group_norm",
    "group_norm_act",
    "instance_norm",
    "layer_norm",
    "rms_norm",
    "sync_batch_norm",
]
__dir__ = __all__.copy
