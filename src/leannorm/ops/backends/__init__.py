"""The backends in order of preference; `backend.py` defines what a backend is."""

from leannorm.ops.backends.aten import ATEN as ATEN
from leannorm.ops.backends.backend import REFERENCE as REFERENCE
from leannorm.ops.backends.backend import Backend as Backend
from leannorm.ops.backends.cpu import CPU as CPU
from leannorm.ops.backends.triton import TRITON as TRITON

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (TRITON, CPU, ATEN, REFERENCE)}
