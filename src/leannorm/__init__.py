"""Normalization layers for PyTorch that train in about half the memory."""

from leannorm import functional as functional
from leannorm import interop as interop
from leannorm import nn as nn
from leannorm.ops.select import use_backend as use_backend

__version__ = "0.1.0"
__all__ = ["functional", "interop", "nn", "use_backend"]
