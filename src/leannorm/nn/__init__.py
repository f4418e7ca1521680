"""Norms as layers: drop-in for torch.nn's, and derived from them."""

from leannorm.nn.layer import LayerNorm as LayerNorm
from leannorm.nn.layer import RMSNorm as RMSNorm

__all__ = ["LayerNorm", "RMSNorm"]
