"""The implementations, in order of preference. Each offers the verbs of `reference.py` and `why_not`."""

from types import ModuleType

from leannorm.ops.backends import cpu, reference

BACKENDS: dict[str, ModuleType] = {"cpu": cpu, "reference": reference}
