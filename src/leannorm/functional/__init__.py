"""Norms as functions: checks, then the shapes as a plan, then a backend."""

from leannorm.functional.layer import add_layer_norm as add_layer_norm
from leannorm.functional.layer import add_rms_norm as add_rms_norm
from leannorm.functional.layer import layer_norm as layer_norm
from leannorm.functional.layer import rms_norm as rms_norm

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]
