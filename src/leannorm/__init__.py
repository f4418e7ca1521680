"""Normalization layers for PyTorch that train in about half the memory."""

__version__ = "0.1.0"
