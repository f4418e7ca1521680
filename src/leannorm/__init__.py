"""Normalization layers for PyTorch, and `lean()`, which trains models in half of the activation memory.

Less memory       lean, make_lean, unmake_lean, compile_options, keep_freed_memory
Whole models      convert, fold, freeze, unfreeze
Statistics        recalibrate, accumulate_stats, no_stats_update
Measuring         profile, fit, doctor, bench
Kernels           backends, use_backend
Padding           conv_lengths

Layers            leannorm.nn, and as functions leannorm.functional
Several ranks     leannorm.distributed
One graph         leannorm.program, which trains and infers
In and out        leannorm.interop, other frameworks' checkpoints and trainers
Model to model    leannorm.transforms, and what its functions return

Results           MemoryReport, FitReport, DoctorReport, BenchReport, FoldReport, RecalibrationReport,
                  FreedMemory
Errors            LeannormError: InputError, DtypeError, FoldError, SyncError, BackendUnavailableError,
                  MissingDependencyError
"""

from typing import TYPE_CHECKING

from leannorm import _torch as _torch  # first, so that an old torch is reported in one line

# isort: split
from leannorm import distributed, functional, nn, transforms
from leannorm._errors import (
    BackendUnavailableError,
    DtypeError,
    FoldError,
    InputError,
    LeannormError,
    MissingDependencyError,
    SyncError,
)
from leannorm._freed_memory import FreedMemory, keep_freed_memory
from leannorm._lazy import later
from leannorm._version import __version__ as __version__
from leannorm.compiled import compile_options
from leannorm.nn.lengths import conv_lengths
from leannorm.ops.running import no_stats_update
from leannorm.ops.select import backends, use_backend
from leannorm.saving import lean, make_lean, unmake_lean
from leannorm.transforms import RecalibrationReport, accumulate_stats, convert, freeze, recalibrate, unfreeze

if TYPE_CHECKING:
    from leannorm import interop, program
    from leannorm import report as report
    from leannorm.report.bench import BenchReport, bench
    from leannorm.report.doctor.examine import doctor
    from leannorm.report.doctor.findings import DoctorReport
    from leannorm.report.fit import FitReport, fit
    from leannorm.report.memory_report import MemoryReport
    from leannorm.report.profile import profile
    from leannorm.transforms.folding.fold import FoldReport, fold
else:
    __getattr__ = later(
        __name__,
        {
            "interop": "",
            "program": "",
            "report": "",
            "BenchReport": "report.bench",
            "bench": "report.bench",
            "doctor": "report.doctor.examine",
            "DoctorReport": "report.doctor.findings",
            "FitReport": "report.fit",
            "fit": "report.fit",
            "MemoryReport": "report.memory_report",
            "profile": "report.profile",
            "FoldReport": "transforms.folding.fold",
            "fold": "transforms.folding.fold",
        },
    )

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
    """The public names; importing them also sets the inner packages as attributes."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
