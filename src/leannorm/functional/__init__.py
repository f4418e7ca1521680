"""Norms as functions: checks, then one call."""

from leannorm.functional.batch import batch_norm as batch_norm
from leannorm.functional.batch import batch_norm_act as batch_norm_act
from leannorm.functional.conv import conv_batch_norm as conv_batch_norm

__all__ = ["batch_norm", "batch_norm_act", "conv_batch_norm"]
