"""The version, which `leannorm --version` reads without torch."""

__version__ = "0.1.0"
