"""CPU time per call of a layer on the Triton kernels, measured without a GPU: all but the launch itself.

    python -m benchmarks.host_time [--only NAME] [--turns 30] [--json FILE]

Kernels are compiled for compute capability 9.0, and looked up, prepared and launched as on a device. Only the
last step is replaced by one that does nothing: CUDA's driver (or, without the autograd nodes in C++, Triton's
launcher in C). The tensors are on the CPU and no results are computed. torch's operator runs on the same tiny
tensors, and its time includes the arithmetic. leannorm and torch alternate. The numbers are microseconds of
CPU time per call, for forward with gradients and for forward with backward, as low quantiles over the turns.
The goals are torch's own time, and 6 µs for each further launch.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # must be set before the kernels are imported

import torch

from leannorm import functional, nn
from leannorm.autograd import fast
from leannorm.autograd.nodes import NODES
from leannorm.ops import schema
from leannorm.ops.backends import CPU, TRITON, triton
from leannorm.ops.backends.triton import launch

CALLS = 100
IMAGE, ROWS, TOKENS = (8, 16, 4, 4), (32, 64), (4, 8, 64)
LARGE = (8, 16, 4, 5)  # launched like a large input
SEVERAL = "BatchNorm2d, several launches"
MORE_LAUNCHES = 4  # in forward and backward together (docs/gpu.md)
Call = Callable[[torch.Tensor], torch.Tensor]


class Case(NamedTuple):
    """How the calls of leannorm and torch are made, and the input's shape."""

    ours: Callable[[], Call]
    torchs: Callable[[], Call]
    shape: tuple[int, ...]
    evaluates: bool = False


def behind_a_sum() -> Call:
    layer, residual = nn.BatchNormAct2d(16, act="relu"), torch.randn(IMAGE, requires_grad=True)
    return lambda x: layer(x, residual)


def behind_a_sum_by_torch() -> Call:
    layer, residual = torch.nn.BatchNorm2d(16), torch.randn(IMAGE, requires_grad=True)
    return lambda x: torch.relu(layer(x) + residual)


def over_channels_by_torch() -> Call:
    layer = torch.nn.LayerNorm(16)
    return lambda x: layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def modulation(of_norm: bool) -> tuple[Any, ...]:
    """A scale, a shift and a gate per sample, as networks compute them: chunks of one tensor. A summand, and
    with `of_norm` the norm's own weight and bias."""
    parts = torch.randn(TOKENS[0], 3 * 64, requires_grad=True).chunk(3, 1)
    own = [torch.randn(64, requires_grad=True) if of_norm else None for _ in range(2)]
    return *parts, torch.randn(TOKENS, requires_grad=True), *own


def modulated(of_norm: bool = False, of_sum: bool = False) -> Call:
    scale, shift, gate, branch, *own = modulation(of_norm)
    if of_sum:
        how = (64,), scale, shift, 1e-5, *own
        return lambda x: functional.add_ada_layer_norm(x, branch, gate, *how)[0]
    return lambda x: functional.ada_layer_norm(x, (64,), scale, shift, 1e-5, *own)


def modulated_by_torch(of_norm: bool = False, of_sum: bool = False) -> Call:
    scale, shift, gate, branch, *own = modulation(of_norm)

    def call(x: torch.Tensor) -> torch.Tensor:
        x = x + gate.unsqueeze(1) * branch if of_sum else x
        return torch.layer_norm(x, (64,), *own) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)

    return call


def rows_of_a_sum() -> Call:
    weight, residual = (torch.randn(size, requires_grad=True) for size in ((64,), ROWS))
    return lambda x: functional.add_rms_norm(x, residual, (64,), weight)[0]


def rows_of_a_sum_by_torch() -> Call:
    weight, residual = (torch.randn(size, requires_grad=True) for size in ((64,), ROWS))
    return lambda x: torch.rms_norm(x + residual, (64,), weight)


def gated(affine: bool = True) -> Call:
    layer, gate = nn.RMSNormGated(64, None, affine), torch.randn(TOKENS, requires_grad=True)
    return lambda x: layer(x, gate)


def gated_by_torch(affine: bool = True) -> Call:
    layer, gate = torch.nn.RMSNorm(64, None, affine), torch.randn(TOKENS, requires_grad=True)
    return lambda x: layer(x) * torch.nn.functional.silu(gate)


def around_one() -> Call:
    return nn.RMSNorm(64, weight_offset=1.0)


def around_one_by_torch() -> Call:
    weight = torch.nn.Parameter(torch.zeros(64))
    return lambda x: torch.rms_norm(x, (64,)) * (1 + weight)


LAYERS = {
    "LayerNorm": Case(lambda: nn.LayerNorm(64), lambda: torch.nn.LayerNorm(64), ROWS),
    "RMSNorm": Case(lambda: nn.RMSNorm(64), lambda: torch.nn.RMSNorm(64), ROWS),
    "RMSNorm, 1 + weight": Case(around_one, around_one_by_torch, ROWS),
    "add_rms_norm": Case(rows_of_a_sum, rows_of_a_sum_by_torch, ROWS),
    "LayerNorm, dim=1": Case(lambda: nn.LayerNorm(16, dim=1), over_channels_by_torch, IMAGE),
    "ada_layer_norm": Case(modulated, modulated_by_torch, TOKENS),
    "ada_layer_norm, weight": Case(lambda: modulated(True), lambda: modulated_by_torch(True), TOKENS),
    "add_ada_layer_norm": Case(
        lambda: modulated(of_sum=True), lambda: modulated_by_torch(of_sum=True), TOKENS
    ),
    "RMSNormGated": Case(gated, gated_by_torch, TOKENS),
    "RMSNormGated, no weight": Case(lambda: gated(False), lambda: gated_by_torch(False), TOKENS),
    "BatchNormAct2d, residual": Case(behind_a_sum, behind_a_sum_by_torch, IMAGE),
    "BatchNorm2d": Case(lambda: nn.BatchNorm2d(16), lambda: torch.nn.BatchNorm2d(16), IMAGE),
    SEVERAL: Case(lambda: nn.BatchNorm2d(16), lambda: torch.nn.BatchNorm2d(16), LARGE),
    "BatchNorm2d, eval": Case(
        lambda: nn.BatchNorm2d(16).eval(), lambda: torch.nn.BatchNorm2d(16).eval(), IMAGE, evaluates=True
    ),
    "GroupNorm": Case(lambda: nn.GroupNorm(4, 16), lambda: torch.nn.GroupNorm(4, 16), IMAGE),
    "InstanceNorm2d": Case(lambda: nn.InstanceNorm2d(16), lambda: torch.nn.InstanceNorm2d(16), IMAGE),
}


def without_a_device(
    launcher: Callable[..., None] = lambda *_: None, stream_of: Callable[[int], int] = lambda device: 0
) -> None:
    """Replace CUDA's driver: kernels are compiled and prepared, and `launcher` is the last step."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver
    from triton.compiler import compiler
    from triton.runtime.driver import driver as drivers

    if hasattr(driver, "compile_module_from_src"):  # Triton 3.6 compiles a launcher for each kernel
        driver.library_dirs = list
        driver.compile_module_from_src = lambda *_, **__: SimpleNamespace(launch=launcher)
    if getattr(driver, "PyKernelArg", 0) is None:  # later versions describe the arguments
        driver.PyKernelArg = lambda nested_tuple, type: (nested_tuple, type)
    handles = itertools.count(1)
    utils = SimpleNamespace(
        load_binary=lambda *_: (1, next(handles), 32, 0, 1024),
        get_device_properties=lambda *_: {"max_shared_mem": 227 << 10},
        launch=launcher,
        build_signature_metadata=tuple,
    )
    active = SimpleNamespace(
        utils=utils,
        launcher_cls=driver.CudaLauncher,
        get_current_device=lambda: 0,
        get_current_stream=stream_of,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        allocate_default_profile_scratch=lambda *_: None,
    )
    drivers.set_active(active)
    launch._current_device = lambda: 0  # a torch built for CUDA would look for one
    compiler.max_shared_mem = lambda device: 227 << 10
    warnings.filterwarnings("ignore", "Warning only once", UserWarning)
    for name in (*schema.OPERATORS, *schema.BETWEEN):  # CPU tensors take the path of CUDA tensors
        schema.LIBRARY.impl(name, triton.imported_by_call(name), "CPU", allow_override=True)
    on_triton: Any = type(TRITON)
    on_cpu: Any = type(CPU)
    chosen: Any = fast
    on_triton.why_not = lambda *_, **__: []
    on_cpu.why_not = lambda *_, **__: ["left out"]
    chosen.picks_aten = lambda x: False


def without_a_driver() -> None:
    """Make the nodes in C++ launch by a function that does nothing and returns 0, which means success."""
    if NODES is not None:
        nothing = ctypes.CDLL(find_library("m")).fegetround
        NODES.set_driver(ctypes.cast(nothing, ctypes.c_void_p).value)


def kinds_of_call(call: Call, case: Case) -> dict[str, Callable[[], object]]:
    x, dy = torch.randn(case.shape), torch.randn(case.shape)
    leaf = x.clone().requires_grad_()

    def constant() -> None:
        with torch.no_grad():
            call(x)

    kinds = {"forward": lambda: call(leaf), "both": lambda: call(leaf).backward(dy)}
    return {"no gradients": constant, **kinds} if case.evaluates else kinds


def microseconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - start) / CALLS * 1e6


def measure(name: str, turns: int) -> dict[str, tuple[float, float]]:
    """Microseconds of leannorm and of torch for each kind of call."""
    case = LAYERS[name]
    sides = [kinds_of_call(make(), case) for make in (case.ours, case.torchs)]
    found = {}
    for kind in sides[0]:
        times = [[microseconds(side[kind]) for side in sides] for _ in range(turns + 2)][2:]
        low = [sorted(t[i] for t in times)[turns // 5] for i in range(2)]
        found[kind] = low[0], low[1]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=LAYERS)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    without_a_device()
    without_a_driver()
    from leannorm.ops.backends.triton import tiling

    one_launch = tiling.one_launch
    tiling.one_launch = lambda seen, *given: seen.inner != 20 and one_launch(seen, *given)
    gc.freeze()
    report = {}
    for name in [options.only] if options.only else LAYERS:
        report[name] = found = measure(name, options.turns)
        cells = "  ".join(
            f"{kind} {ours:6.1f} (torch {torchs:5.1f}, {ours / torchs:4.2f} times)"
            for kind, (ours, torchs) in found.items()
        )
        print(f"{name:30s}{cells}", flush=True)
    if len(report) == len(LAYERS):
        several, one = (report[name]["both"][0] for name in (SEVERAL, "BatchNorm2d"))
        print(f"each further launch: {(several - one) / MORE_LAUNCHES:.1f}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
