"""Every Triton kernel as real calls launch it, compiled for GPUs that need not be there.

`python triton_variants.py ARCHITECTURE [all]`, without TRITON_INTERPRET, prints a line of JSON for each
variant: registers, bytes of stack (where what registers do not hold is spilled), bytes of shared memory. A
variant is what a call of `CALLS` launches on tensors without memory: its kernel is recorded in place of
being run. So an entry there is all that a new kernel, or a new way of launching one, needs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton_calls import (
    BF16,
    F16,
    F32,
    F64,
    Call,
    channel_call,
    gated_call,
    heads_call,
    masked_call,
    modulated_call,
    row_call,
    statistics_call,
)

from leannorm.ops.activation import ACTIVATIONS

PROCESSORS, SHARED = 132, {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # multiprocessors; of a program


class Variant(NamedTuple):
    """A kernel as it is launched: what Triton compiles for it, and how many programs there are."""

    name: str
    kernel: Any
    programs: int
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[object]]]
    options: dict[str, Any]


ROWS = 32768
RESNET = [(128, 64, 56, 56), (128, 256, 56, 56), (128, 512, 28, 28), (128, 1024, 14, 14), (128, 2048, 7, 7)]
ACTS = [name for name in ACTIVATIONS if name != "relu"]  # which is every other call's
FAR = [  # past 2^31 elements: in a plane, a tile, four rows, along a row, beside it, in the number of rows
    *(channel_call((2, 4, 65536, 32768), last=last) for last in (False, True)),
    channel_call((2, 4, 65536, 32768), act="identity", groups=2),
    channel_call((128, 1 << 26)),
    row_call((4, 720_000_000)),
    row_call((4, 1 << 31)),
    row_call((2, 1 << 20, 4096), sample=True),
    row_call((2, 64, 1 << 26), rms=True),
    row_call((1 << 32, 64), F32, residual=True),
]
CALLS = [
    channel_call(RESNET[0], last=True, sample=True),
    channel_call(RESNET[1], last=True, residual=True, sample=True),
    channel_call((32, 256, 64, 64), last=True, groups=32, act="silu", sample=True),
    channel_call((128, 512, 7, 7), sample=True),
    channel_call((128, 512, 14, 14), last=True, sample=True),
    channel_call((128, 128, 28, 28), residual=True, sample=True),
    *(
        channel_call((128, c, n, n), dtype, last=last, residual=r)
        for c, n in ((128, 28), (256, 14), (512, 14), (512, 7))
        for dtype in (BF16, F32)
        for last in (False, True)
        for r in (False, True)
    ),
    *(
        channel_call((4, c, n, n), dtype, groups=32, last=True, act="silu", residual=r)
        for c, n in ((256, 64), (320, 64), (640, 32))
        for dtype in (BF16, F32, F64)
        for r in (False, True)
    ),
    channel_call((32, 256, 32, 32), last=True, groups=32, act="silu"),
    channel_call((2, 64, 28, 28), residual=True, sample=True),
    *(
        channel_call(s, last=last, residual=r)
        for s in RESNET
        for last in (False, True)
        for r in (False, True)
    ),
    *(channel_call(s, F32, last=last, residual=True) for s in RESNET for last in (False, True)),
    *(channel_call(RESNET[0], act=act, last=True) for act in ACTS),
    *(channel_call(RESNET[2], act=act, residual=True) for act in ACTS),
    *(channel_call((2, 64, 28, 28), dtype, last=last) for dtype in (BF16, F32) for last in (False, True)),
    *(
        channel_call((32, 256, 32, 32), dtype, groups=32, last=last, act="silu", residual=r)
        for dtype in (BF16, F32)
        for last in (False, True)
        for r in (False, True)
    ),
    *(channel_call((1, 128, 512, 512), groups=32, act="silu", last=last) for last in (False, True)),
    *(channel_call((8, 64, 64, 64), groups=64, act="identity", last=last) for last in (False, True)),
    channel_call((8, 32, 16, 32, 32), last=True),
    *(channel_call((4096, c), dtype) for c in (3, 100, 512) for dtype in (F16, F32)),
    *(channel_call(RESNET[2], F64, last=last, residual=True) for last in (False, True)),
    masked_call((32, 256, 400), act="identity", sample=True),
    masked_call((16, 64, 56, 56), last=True, residual=True, sample=True),
    masked_call((4, 64, 100), groups=8, act="silu", sample=True),
    *(
        masked_call(s, dtype, "silu", last, groups, residual)
        for s in ((32, 256, 400), (64, 80, 1001), (16, 64, 56, 56), (4, 64, 14, 14))
        for dtype in (BF16, F32)
        for last in ((False, True) if len(s) == 4 else (False,))
        for groups in (0, 8)
        for residual in (False, True)
        if s[1] % max(groups, 1) == 0
    ),
    *(masked_call((16, 64, 56, 56), F64, last=last, residual=True) for last in (False, True)),
    masked_call((2, 4, 65536, 32768)),
    *(row_call((ROWS, n), rms=rms, sample=True) for n in (1024, 4096, 8192, 16384) for rms in (False, True)),
    *(row_call((ROWS, n), residual=True) for n in (1024, 4096, 8192, 16384)),
    *(row_call((ROWS, n), parameters=F32) for n in (4096, 16384)),
    *(row_call((ROWS, n), F32) for n in (1024, 4096, 8192, 16384)),
    *(row_call((ROWS, n), F32, residual=True) for n in (1024, 8192)),
    *(row_call((ROWS, n)) for n in (7, 64, 100, 768, 2048, 5000, 32768)),
    row_call((ROWS, 64), F32, sample=True),
    row_call((ROWS, 4096), rms=True, residual=True, sample=True, cast=True),
    *(row_call((ROWS, n), rms=True, cast=True) for n in (768, 1024, 8192, 16384, 50000)),
    row_call((ROWS, 4096), F16, rms=True, residual=True, cast=True),
    row_call((ROWS, 50000), sample=True),
    row_call((ROWS, 50000), F32, rms=True, residual=True),
    row_call((ROWS, 4096), F16, residual=True),
    row_call((ROWS, 512), F64),
    row_call((ROWS, 3000), F64),
    *(row_call((16384, 128), dtype, sample=True) for dtype in (BF16, F32)),
    *(row_call((ROWS, n), residual=True, sample=n == 1024, masked=True) for n in (1024, 16384, 50000)),
    *(row_call((ROWS, n), dtype, masked=True) for n in (128, 4096, 8192) for dtype in (BF16, F32)),
    row_call((128, 384, 14, 14), F32, masked=True),
    row_call((16384, 256), F32),
    row_call((16384, 128), rms=True),
    row_call((128, 96, 56, 56), sample=True),
    row_call((128, 384, 14, 14), F32),
    row_call((128, 512, 7, 7), rms=True),
    row_call((128, 3, 224, 224)),
    row_call((128, 2048, 7, 7)),
    *(statistics_call(512, dtype) for dtype in (F32, F64, BF16)),
    heads_call(128, sample=True),
    *(heads_call(n, dtype, rms) for n in (64, 80, 256, 512, 2048) for dtype in (BF16, F32) for rms in (0, 1)),
    heads_call(128, F64),
    modulated_call((ROWS, 1152), 32, BF16, BF16, branch=True, sample=True),
    modulated_call((ROWS, 3072), ROWS, BF16, BF16, branch=True, sample=True),
    modulated_call((ROWS, 8192), 8, branch=True, sample=True),
    *(
        modulated_call((ROWS, n), groups, dtype, lines, rms, branch)
        for n in (64, 384, 1152, 4096, 8192, 16384, 50000)
        for groups in (32, ROWS)
        for dtype, lines, rms, branch in (
            (BF16, BF16, False, True),
            (BF16, F32, True, False),
            (F32, F32, False, True),
        )
    ),
    *(modulated_call((ROWS, n), groups, F64, F64, branch=True) for n in (512, 3000) for groups in (32, ROWS)),
    gated_call((ROWS, 128), sample=True),
    gated_call((ROWS, 4096), before=False, cast=True, sample=True),
    gated_call((ROWS, 20000), sample=True),
    *(
        gated_call((ROWS, n), dtype, before=before)
        for n in (64, 1001, 1536, 4096, 8192, 16384)
        for dtype in (BF16, F32)
        for before in (True, False)
    ),
    *(gated_call((ROWS, 2048), act=act, before=False) for act in ACTS),
    *(gated_call((ROWS, n), F64, act="gelu") for n in (512, 3000, 9000)),
    *FAR,
]


def _specialized(
    kernel: Any, values: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Types, constants and attributes of the arguments, as Triton finds them for such values."""
    types = {F32: "fp32", BF16: "bf16", F16: "fp16", F64: "fp64", torch.int32: "i32", torch.int64: "i64"}
    types[torch.bool] = "i1"
    signature, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(kernel.params):
        value, free = values[parameter.name], not parameter.do_not_specialize
        constant = parameter.is_constexpr or value is None
        if constant or (free and type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{types[value.dtype]}"
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            free = free and value % 16 == 0
        if free and not isinstance(value, float):
            attributes[(number,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def variants(architecture: int, calls: list[Call]) -> list[Variant]:
    """What the calls launch on such a GPU, each kernel of the same kind once."""
    from leannorm.ops.backends.triton import (
        channel,
        channel_gradients,
        gated,
        launch,
        rows,
        shares,
        statistics,
    )

    found: dict[str, Variant] = {}
    name = ""

    class Recorded:
        """A kernel that notes how it is launched."""

        def __init__(self, kernel: Any) -> None:
            self.kernel, self.arg_names = kernel, kernel.arg_names

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def note(*arguments: Any, **named: Any) -> None:
                values = dict(zip(self.kernel.arg_names, arguments, strict=False))
                options = {k: v for k, v in named.items() if k not in self.kernel.arg_names}
                values |= {k: v for k, v in named.items() if k in self.kernel.arg_names}
                compiled = _specialized(self.kernel, values)
                label = f"{self.kernel.__name__}, {name}"
                key = repr((self.kernel.__name__, compiled, options))
                found.setdefault(key, Variant(label, self.kernel, grid[0], *compiled, options))

            return note

    plain = launch.launch

    def record(kernel: Any, *arguments: Any, **constants: Any) -> None:
        plain(Recorded(kernel), *arguments, **constants)

    for module in (channel, channel_gradients, rows, shares, statistics):
        module.launch = record
    for module in (channel, gated, rows):
        module.processors = lambda device: PROCESSORS
    rows._device = lambda device: (architecture // 10, SHARED[architecture])
    for call in calls:
        name = call.name
        call.run()
    return list(found.values())


def resources(compiled: Any) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack and of a program's shared memory."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(\w+):(\d+)", said.rsplit("Function", 1)[1]))
    stack = int(usage["STACK"]) + int(usage["LOCAL"])
    return {"registers": int(usage["REG"]), "stack": stack, "shared": compiled.metadata.shared}


def compiled(variant: Variant, architecture: int, **options: Any) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(variant.kernel, variant.signature, variant.constants, variant.attributes)
    target = GPUTarget("cuda", architecture, 32)
    return resources(triton.compile(source, target=target, options=variant.options | options))


def main(architecture: str, which: str = "sample", limit: str = "") -> None:
    """`which`: sample, all, one, or a part of the calls' names. With a `limit` of registers it spills."""
    options = {"maxnreg": int(limit)} if limit else {}
    named = which not in ("sample", "all", "one")
    calls = [call for call in CALLS if (which in call.name if named else call.sample or which == "all")]
    for variant in variants(int(architecture), calls[:1] if which == "one" else calls):
        used = compiled(variant, int(architecture), **options)
        about = {"name": variant.name, "kernel": variant.kernel.__name__, "programs": variant.programs}
        print(json.dumps(about | {"warps": variant.options["num_warps"]} | used), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
