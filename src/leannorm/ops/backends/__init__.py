"""The implementations, in order of preference. Each offers the verbs of `reference.py` and `why_not`."""

from types import ModuleType

from leannorm.ops.backends import cpu, reference, triton

BACKENDS: dict[str, ModuleType] = {"triton": triton, "cpu": cpu, "reference": reference}
