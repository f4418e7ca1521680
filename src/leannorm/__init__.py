"""Normalization layers for PyTorch that train in about half the memory."""

from leannorm import _torch as _torch  # first: says in one line which torch is too old

# isort: split
from leannorm import distributed as distributed
from leannorm import functional as functional
from leannorm import interop as interop
from leannorm import nn as nn
from leannorm import program as program
from leannorm import transforms as transforms
from leannorm._errors import BackendUnavailableError as BackendUnavailableError
from leannorm._errors import DtypeError as DtypeError
from leannorm._errors import FoldError as FoldError
from leannorm._errors import InputError as InputError
from leannorm._errors import LeannormError as LeannormError
from leannorm._errors import MissingDependencyError as MissingDependencyError
from leannorm._errors import SyncError as SyncError
from leannorm._freed_memory import FreedMemory as FreedMemory
from leannorm._freed_memory import keep_freed_memory as keep_freed_memory
from leannorm.compiled import compile_options as compile_options
from leannorm.nn.lengths import conv_lengths as conv_lengths
from leannorm.ops.running import no_stats_update as no_stats_update
from leannorm.ops.select import backends as backends
from leannorm.ops.select import use_backend as use_backend
from leannorm.report.bench import BenchReport as BenchReport
from leannorm.report.bench import bench as bench
from leannorm.report.doctor.examine import doctor as doctor
from leannorm.report.doctor.findings import DoctorReport as DoctorReport
from leannorm.report.fit import FitReport as FitReport
from leannorm.report.fit import fit as fit
from leannorm.report.memory_report import MemoryReport as MemoryReport
from leannorm.report.profile import profile as profile
from leannorm.saving import lean as lean
from leannorm.saving import make_lean as make_lean
from leannorm.saving import unmake_lean as unmake_lean
from leannorm.transforms import FoldReport as FoldReport
from leannorm.transforms import RecalibrationReport as RecalibrationReport
from leannorm.transforms import accumulate_stats as accumulate_stats
from leannorm.transforms import convert as convert
from leannorm.transforms import fold as fold
from leannorm.transforms import freeze as freeze
from leannorm.transforms import recalibrate as recalibrate
from leannorm.transforms import unfreeze as unfreeze

__version__ = "0.1.0"
__all__ = [
    "BackendUnavailableError",
    "BenchReport",
    "DoctorReport",
    "DtypeError",
    "FitReport",
    "FoldError",
    "FoldReport",
    "FreedMemory",
    "InputError",
    "LeannormError",
    "MemoryReport",
    "MissingDependencyError",
    "RecalibrationReport",
    "SyncError",
    "accumulate_stats",
    "backends",
    "bench",
    "compile_options",
    "conv_lengths",
    "convert",
    "distributed",
    "doctor",
    "fit",
    "fold",
    "freeze",
    "functional",
    "interop",
    "keep_freed_memory",
    "lean",
    "make_lean",
    "nn",
    "no_stats_update",
    "profile",
    "program",
    "recalibrate",
    "transforms",
    "unfreeze",
    "unmake_lean",
    "use_backend",
]


def __dir__() -> list[str]:
    """The public names; importing them makes attributes of the inner rooms too."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
