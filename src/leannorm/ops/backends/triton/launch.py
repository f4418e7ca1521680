"""Launching a kernel on the device where its tensors are, in as little of the host's time as Triton allows.

Triton's own launch looks up the compiled kernel by every argument, which takes some 10 µs. A `Launch` keeps
the kernels that it found, by which pointers are multiples of 16, and calls them as Triton does; its other
arguments never change. If anything is unknown (another release of Triton, a profiler's hooks, an
interpreter), it launches by Triton's public call.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

KNOWN = ((3, 6), (3, 7), (3, 8), (3, 9))  # releases of Triton whose `JITFunction.run` ends in the same call
_LETTERS = {"i32": "i", "i64": "l", "fp32": "f", "fp64": "d", "constexpr": "-"}
_BITS = {"p": 64, "i": 32, "l": 64, "f": 32, "d": 64, "?": 0}
# for tensors: an argument's position, a slot, and an offset in elements
Places = Sequence[tuple[int, int, int]]


class _Listening(threading.local):
    """The recorder of this thread's launches (`tape.py`)."""

    recorder: Any = None


listening = _Listening()


@cache
def processors(device: torch.device) -> int:
    """The device's multiprocessors; 2 for the interpreter on a CPU, so that there are parts to merge."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def _release() -> tuple[int, ...]:
    import triton

    return tuple(int(n) for n in triton.__version__.split(".")[:2])


@cache
def cache_bytes(device: torch.device) -> int:
    """Half of the device's L2 cache; of an H100's for the interpreter."""
    if device.type != "cuda":
        return 25 << 20
    return int(torch.cuda.get_device_properties(device).L2_cache_size) // 2


@cache
def _runtime() -> tuple[Any, Callable[[int], Any]] | None:
    """Triton's settings and its look-up of the current stream; None if its release is not known."""
    import triton

    if _release() not in KNOWN:
        first, last = (".".join(map(str, r)) for r in (KNOWN[0], KNOWN[-1]))
        warnings.warn(
            f"each launch takes some 10 µs longer: leannorm knows how Triton {first} to {last} launch a "
            f"compiled kernel, found Triton {triton.__version__}; results are the same",
            stacklevel=2,
        )
        return None
    return triton.knobs.runtime, triton.runtime.driver.active.get_current_stream


def _last_step(compiled: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What launches a compiled kernel, and its arguments between the stream and the kernel's own.

    Triton 3.6 puts a method in Python before its launcher in C, for scratch memory. No kernel here needs it.
    """
    run: Any = compiled.run
    if _release() == (3, 6) and not (run.global_scratch_size or run.profile_scratch_size):
        settings = run.launch_cooperative_grid, run.launch_pdl, None, None
        return run.launch, (compiled.function, *settings, compiled.packed_metadata, None, None, None)
    return run, (compiled.function, compiled.packed_metadata, None, None, None)


def _drivers_way(compiled: Any) -> tuple[int, int, int, str] | None:
    """How CUDA's driver launches a compiled kernel: its handle, threads, bytes of shared memory, arguments.

    Each argument is a letter: "p" a pointer, "i", "l", "f" and "d" numbers as in `struct`, "-" what is
    compiled into the kernel, and "0" scratch memory that it does not use. None if the launch has properties
    that only Triton sets, or if the compiled code in PTX takes other arguments.
    """
    of = compiled.metadata
    scratch = of.global_scratch_size or of.profile_scratch_size
    if _release() != (3, 6) or scratch or of.num_ctas != 1 or of.launch_cooperative_grid or of.launch_pdl:
        return None
    letters = [_letter(kind) for kind in compiled.src.signature.values()]
    code = compiled.asm["ptx"]
    head = code[code.index(".entry") : code.index("{", code.index(".entry"))]
    taken = [int(bits) for bits in re.findall(r"\.param \.[a-z](\d+)", head)]
    known = [_BITS[letter] for letter in letters if letter != "-"]
    more = taken[len(known) :]
    if "?" in letters or taken != known + [64] * len(more) or len(more) > 2:
        return None
    return compiled.function, 32 * of.num_warps, of.shared, "".join(letters) + "0" * len(more)


def _letter(kind: Any) -> str:
    """Of an argument's type in Triton's signature; a tuple is one of constants here."""
    if isinstance(kind, tuple):
        return "-" if all(_letter(k) == "-" for k in kind) else "?"
    return "p" if kind.startswith("*") else _LETTERS.get(kind, "?")


class Launch:
    """A launch on one device, with all arguments but its tensors.

    `aligned` is the compiled kernel for pointers that are all multiples of 16, and `others` has those for
    other pointers: what launches it, with which arguments (`_last_step`), and Triton's settings, its function
    for the current stream and the device's index. `driver` is how CUDA's driver launches the first of these,
    for the autograd nodes in C++.
    """

    __slots__ = (
        *("aligned", "constants", "device", "driver", "kernel"),
        *("options", "others", "programs", "values"),
    )

    def __init__(
        self,
        kernel: Any,
        programs: int,
        device: torch.device,
        arguments: Sequence[Any],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self.kernel, self.programs, self.device = kernel, programs, device
        self.constants, self.options = constants, options
        names = kernel.arg_names[len(arguments) :]
        self.values = [None if isinstance(a, Tensor) else a for a in arguments]
        self.values += [constants[name] for name in names]
        self.aligned: tuple[Any, ...] | None = None
        self.driver: tuple[int, int, int, str] | None = None
        self.others: dict[tuple[bool, ...], tuple[Any, ...]] = {}

    def __call__(self, slots: Sequence[Any], places: Places) -> None:
        values: list[Any] = self.values.copy()
        bits = 0
        for position, slot, offset in places:
            t = slots[slot]
            pointer = t.data_ptr() + offset * t.element_size() if offset else t.data_ptr()
            values[position] = pointer
            bits |= pointer
        pattern = None
        if bits & 15:
            pattern = tuple([values[position] & 15 == 0 for position, _, _ in places])
            call = self.others.get(pattern)
        else:
            call = self.aligned
        if call is None:
            self._first(slots, places, pattern)
            return
        run, before, settings, stream_of, index = call
        enter, leave = settings.launch_enter_hook, settings.launch_exit_hook
        if getattr(enter, "calls", True) or getattr(leave, "calls", True):  # a profiler listens
            self._public(slots, places)
        elif index == _current_device():
            run(self.programs, 1, 1, stream_of(index), *before, *values)
        else:
            with torch.cuda.device(index):
                run(self.programs, 1, 1, stream_of(index), *before, *values)

    def _public(self, slots: Sequence[Any], places: Places) -> Any:
        """Launch by Triton's public call; returns what that compiled."""
        values = self.values[: len(self.values) - len(self.constants)]
        for position, slot, offset in places:
            t = slots[slot]
            values[position] = t.view(-1)[offset:] if offset else t
        elsewhere = self.device.type == "cuda" and self.device.index != torch.cuda.current_device()
        with torch.cuda.device(self.device) if elsewhere else nullcontext():
            return self.kernel[(self.programs,)](*values, **self.constants, **self.options)

    def _first(self, slots: Sequence[Any], places: Places, pattern: tuple[bool, ...] | None) -> None:
        compiled = self._public(slots, places)
        if compiled is None or getattr(self.kernel, "pre_run_hooks", None):  # interpreted, or watched
            return
        known = _runtime()
        if known is None:
            return
        index = 0 if self.device.index is None else self.device.index
        call = (*_last_step(compiled), *known, index)
        if pattern is None:
            self.driver = _drivers_way(compiled)
            self.aligned = call
        else:
            self.others[pattern] = call


_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)


def launch(
    kernel: Any,
    programs: int,
    device: torch.device,
    *arguments: Any,
    warps: int = 4,
    registers: int | None = None,
    **constants: Any,
) -> None:
    """Run a kernel, with a limit of `registers` per thread if one is given.

    The compiler fuses a product and a sum only where the kernel says so, so that a value which the backward
    pass recomputes is rounded as in the forward pass.
    """
    options = {"num_warps": warps, "enable_fp_fusion": False}
    if registers is not None:
        options["maxnreg"] = registers
    made = Launch(kernel, programs, device, arguments, constants, options)
    places = [(i, i, 0) for i, a in enumerate(arguments) if isinstance(a, Tensor)]
    made(arguments, places)
    if listening.recorder is not None:
        listening.recorder.note(made, arguments)
