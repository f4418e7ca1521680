"""A part of all variants of the Triton kernels that has of each kind one: of the sweep, what can be afforded.

`python triton_covering.py ARCHITECTURE [front]`, without TRITON_INTERPRET, compiles for each kernel: every
combination of its tensors' dtypes and of those left out, every activation in every dtype, every limit of
registers, and for every dtype its smallest and its largest tile. With `front` Triton's own half alone runs,
on every combination of tensors and every activation in float32 and float64: it finds what Triton refuses.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Hashable, Iterator

import triton_variants as variants
from triton_variants import (
    ACTS,
    BF16,
    CALLS,
    F16,
    F32,
    F64,
    RESNET,
    ROWS,
    Variant,
    channel_call,
    gated_call,
    heads_call,
    modulated_call,
    row_call,
)

from leannorm.ops.backends.triton.row_tiles import TileConstants

variants.SHARED |= {86: 99 << 10, 89: 99 << 10, 120: 99 << 10}
WIDE_ACTS = ("elu", "mish", "gelu_tanh", "gelu")  # in float64 each takes more registers than all the rest
MORE = [
    *(row_call((ROWS, 20000), F64, rms=rms, residual=rms) for rms in (False, True)),
    *(row_call((128, n, s, s), F64) for n, s in ((96, 56), (2048, 7))),
    *(row_call((ROWS, n), F16, residual=True) for n in (100, 16384, 50000)),
    *(modulated_call((ROWS, 20000), groups, F64, F64, branch=True) for groups in (32, ROWS)),
    *(modulated_call((ROWS, 1152), groups, F16, F16, branch=True) for groups in (32, ROWS)),
    *(heads_call(n, dtype, rms) for n in (64, 2048) for dtype in (F16, F64) for rms in (0, 1)),
    *(gated_call((ROWS, n), F16, act=act) for n in (1001, 4096, 20000) for act in ACTS),
    *(gated_call((ROWS, n), BF16, act=act) for n in (1536, 20000) for act in ACTS),
    *(gated_call((ROWS, n), F32, act=act) for n in (1536, 20000) for act in ACTS),
    *(gated_call((ROWS, n), F64, act, before) for n in (60, 1000, 3000) for act in ACTS for before in (0, 1)),
    *(channel_call(RESNET[2], F64, act, last) for act in WIDE_ACTS for last in (False, True)),
    *(channel_call((2, 64, 28, 28), F64, act, last) for act in WIDE_ACTS for last in (False, True)),
    *(channel_call((32, 256, 32, 32), F64, act, groups=32, residual=True) for act in WIDE_ACTS),
    *(
        channel_call((4, 320, 64, 64), F64, act, True, 32, residual)
        for act in WIDE_ACTS
        for residual in (0, 1)
    ),
    *(channel_call((128, 256, 14, 14), F64, act) for act in WIDE_ACTS),
    *(channel_call((32, 256, 32, 32), F32, act, last, 32) for act in WIDE_ACTS for last in (False, True)),
    channel_call((32, 64, 56, 56), groups=-8),
    channel_call((32, 64, 56, 56), last=True, groups=-8, residual=True),
]


def about(variant: Variant, front: bool) -> Iterator[Hashable]:
    """What of a variant has to be there once."""
    name, constants = variant.kernel.__name__, variant.constants
    types = tuple(str(t) for t in variant.signature.values() if str(t).startswith("*"))
    yield name, "tensors", types, tuple(n for n, v in constants.items() if v is None)
    if front:
        yield "activation", constants.get("ACT"), "backward" in name, types[0] == "*fp64"
        return
    yield name, "activation", constants.get("ACT"), types[:1]
    yield name, "limit", variant.options.get("maxnreg"), variant.options["num_warps"]
    tile = constants.get("TILE")
    if isinstance(tile, TileConstants):
        yield name, "layout", types[:1], tile.lines, tile.vector >= 8, tile.wide
    elif tile:
        yield name, "layout", types[:1], tile.columns, tile.wide, constants.get("GROUPED")


def size(variant: Variant) -> tuple[Hashable, int]:
    """The kernel and the dtype, and how many values a thread has of a tile."""
    constants = variant.constants
    tile = constants.get("TILE")
    shape = (tile.rows, tile.block) if isinstance(tile, TileConstants) else tile[3:5] if tile else (1, 1)
    values = shape[0] * shape[1]
    types = [str(t) for t in variant.signature.values() if str(t).startswith("*")]
    return (variant.kernel.__name__, "size", types[0]), values // variant.options["num_warps"]


def covering(found: list[Variant], front: bool = False) -> list[Variant]:
    """As few as a greedy choice takes, in their order: all that `about` says, all extremes of `size`."""
    sizes: dict[Hashable, set[int]] = {}
    for variant in found:
        kind, values = size(variant)
        sizes.setdefault(kind, set()).add(values)
    has = []
    for variant in found:
        kind, values = size(variant)
        extreme = {(kind, values)} if values in (min(sizes[kind]), max(sizes[kind])) else set()
        has.append({*about(variant, front), *(extreme if not front else ())})
    left, chosen = set().union(*has), []
    while left:
        best = max(range(len(found)), key=lambda i: len(has[i] & left))
        chosen.append(best)
        left -= has[best]
    return [found[i] for i in sorted(chosen)]


def understood(variant: Variant, architecture: int) -> None:
    """Raise where Triton does not: its language to its first representation, some hundredths of a second."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    target = GPUTarget("cuda", architecture, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(variant.kernel, variant.signature, variant.constants, variant.attributes)
    options = backend.parse_options({**variant.options, **source.parse_options()})
    source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )


def main(architecture: str, half: str = "", first: str = "0", last: str = "100000") -> None:
    number = int(architecture)
    chosen = covering(variants.variants(number, CALLS + MORE), half == "front")
    print(f"{len(chosen)} variants", file=sys.stderr)
    for variant in chosen[int(first) : int(last)]:
        row = {"name": variant.name, "kernel": variant.kernel.__name__, "limit": variants.SHARED[number]}
        if half == "front":
            understood(variant, number)
        else:
            row |= {"warps": variant.options["num_warps"], **variants.compiled(variant, number)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
