"""Launching a kernel on the device where its tensors are."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch


@cache
def processors(device: torch.device) -> int:
    """The device's multiprocessors; 2 for the interpreter on a CPU, so that there are parts to merge."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(
    kernel: Any,
    programs: int,
    device: torch.device,
    *arguments: Any,
    warps: int = 4,
    registers: int | None = None,
    **constants: Any,
) -> None:
    """Run a kernel, with a limit of `registers` for a thread where one is given.

    The compiler fuses a product and a sum only where the kernel says so: what a backward pass recomputes is
    then rounded as in the forward pass.
    """
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    options = {"num_warps": warps, "enable_fp_fusion": False}
    if registers is not None:
        options["maxnreg"] = registers
    with torch.cuda.device(device) if elsewhere else nullcontext():
        kernel[(programs,)](*arguments, **constants, **options)
