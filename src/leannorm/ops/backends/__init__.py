"""The implementations, in order of preference: the verbs of `reference.py`, `why_not` (reasons) and `serves`."""

from types import ModuleType

from leannorm.ops.backends import cpu, reference, triton

BACKENDS: dict[str, ModuleType] = {"triton": triton, "cpu": cpu, "reference": reference}
