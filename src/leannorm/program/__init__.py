"""One program with a training and an inference branch, from one model."""

from leannorm.program.forking import fork as fork
from leannorm.program.program import Program as Program

__all__ = ["Program", "fork"]
