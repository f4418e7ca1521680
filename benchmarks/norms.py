"""Batch, instance and group norm compared with torch: every batch norm of ResNet-50, and further shapes.

    python -m benchmarks.norms [--only NAME] [--threads 2] [--dtype float32] [--cpu-time] [--json FILE]

Results are checked before anything is timed. The sides alternate in one process that keeps freed memory, and
times are medians over the turns. The floor is the least time to move the bytes at the speed of `x.clone()` in
the same run: forward reads and writes the tensor once; backward reads two and writes one; a residual adds one
tensor in each direction. `--cpu-time` measures the CPU time of one thread, for a machine that also does other
work. `benchmarks.norms_table` makes one table from the files of several processors.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import record
from leannorm._freed_memory import keep_freed_memory
from leannorm._types import Channels, ChannelTensors, KeptByChannelNorm
from leannorm.ops.backends import CPU

# Every batch norm of ResNet-50 at 8x3x224x224, and how often it occurs.
RESNET50 = (
    ((8, 64, 112, 112), 1), ((8, 64, 56, 56), 6), ((8, 256, 56, 56), 4), ((8, 128, 56, 56), 1),
    ((8, 128, 28, 28), 7), ((8, 512, 28, 28), 5), ((8, 256, 28, 28), 1), ((8, 256, 14, 14), 11),
    ((8, 1024, 14, 14), 7), ((8, 512, 14, 14), 1), ((8, 512, 7, 7), 5), ((8, 2048, 7, 7), 4),
)  # fmt: skip
BATCHES = (
    ((512, 32, 26, 26), 1), ((64, 256, 28, 28), 1), ((128, 512, 14, 14), 1), ((128, 512, 7, 7), 1),
    ((128, 2048, 7, 7), 1),
)  # fmt: skip
BLOCK_ENDS = (((8, 256, 56, 56), 3), ((8, 512, 28, 28), 4), ((8, 1024, 14, 14), 6), ((8, 2048, 7, 7), 3))
VOLUMES = (((4, 32, 32, 64, 64), 1), ((2, 64, 16, 32, 32), 1), ((2, 128, 8, 16, 16), 1))
SHORT = (
    ((2, 512, 7, 7), 1), ((2, 2048, 7, 7), 1), ((2, 1024, 14, 14), 1), ((8, 512, 4, 4), 1),
    ((8, 512, 7, 7), 1), ((8, 2048, 7, 7), 1), ((8, 256, 14, 14), 1), ((8, 1024, 14, 14), 1),
    ((32, 512, 7, 7), 1), ((32, 1024, 14, 14), 1), ((128, 512, 7, 7), 1), ((128, 2048, 7, 7), 1),
)  # fmt: skip
FEW_ROWS = (((16, 512), 1), ((64, 512), 1), ((64, 2048), 1), ((256, 512), 1))
FLAT = (((256, 512), 1), ((4096, 256), 1), ((1024, 2048), 1))
SEQUENCES = (((16, 64, 4096), 1), ((32, 128, 512), 1), ((8, 256, 2048), 1))
IMAGES = (((8, 64, 56, 56), 1), ((4, 128, 64, 64), 1), ((8, 256, 28, 28), 1), ((2, 320, 64, 64), 1))


# about the largest of a million normal values: the most that one value adds to the sum of a gradient
FLIPPED = 5.0


class Row(NamedTuple):
    """One row of the table; `reach` is its goal, and `groups` of -1 means one group per channel."""

    name: str
    shapes: tuple[tuple[tuple[int, ...], int], ...]
    reach: float
    act: str = "identity"
    residual: bool = False
    groups: int = 0
    channels_last: bool = False


ROWS = (
    Row("batch norm + relu", RESNET50, 3.0, "relu"),
    Row("batch norm + relu, channels_last", RESNET50, 2.0, "relu", channels_last=True),
    Row("batch norm + add + relu", BLOCK_ENDS, 3.0, "relu", residual=True),
    Row("batch norm", RESNET50, 2.5),
    Row("batch norm, large batches", BATCHES, 2.0),
    Row("batch norm + relu, short planes", SHORT, 2.2, "relu"),
    Row("batch norm + add + relu, short planes", SHORT, 2.2, "relu", residual=True),
    Row("BatchNorm3d", VOLUMES, 6.0),
    Row("BatchNorm1d (N, C)", FLAT, 2.0),
    Row("BatchNorm1d (N, C), few rows", FEW_ROWS, 1.8),
    Row("BatchNorm1d (N, C, L)", SEQUENCES, 2.0),
    Row("InstanceNorm2d", IMAGES, 3.0, groups=-1),
    Row("InstanceNorm2d, channels_last", IMAGES, 3.0, groups=-1, channels_last=True),
    Row("GroupNorm", IMAGES, 1.5, groups=32),
    Row("GroupNorm, channels_last", IMAGES, 1.5, groups=32, channels_last=True),
)


class Timing(NamedTuple):
    shape: tuple[int, ...]
    times: int
    ours: float
    torchs: float
    floor: float


def sides(row: Row, shape: tuple[int, ...], dtype: torch.dtype) -> list[Callable[[], list[Tensor]]]:
    """Forward and backward by leannorm's operators and by torch on the same tensors, and a copy."""
    layout = (lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1)) if row.channels_last else (lambda t: t)
    x, dy, residual = (layout(torch.randn(shape).to(dtype)) for _ in range(3))
    channels = shape[1]
    weight, bias = torch.rand(channels) + 0.5, torch.randn(channels)
    groups = channels if row.groups == -1 else row.groups
    added = residual if row.residual else None
    leaf, leaf_weight, leaf_bias = (t.clone().requires_grad_() for t in (x, weight, bias))
    leaf_residual = residual.clone().requires_grad_()
    norm = Channels(groups, 1e-5, row.act)

    def ours() -> list[Tensor]:
        y, mean, _, rstd, _ = CPU.channel_forward(ChannelTensors(x, weight, bias, added), norm)
        out = y if row.residual else None
        kept = KeptByChannelNorm(x, mean, rstd, weight, bias, None, out, norm=norm)
        dx, dweight, dbias, dz = CPU.channel_backward(dy, kept, row.residual)
        return [y, dx, dweight, dbias, *([dz] if row.residual and dz is not None else [])]

    def torchs() -> list[Tensor]:
        if row.groups == 0:
            y = F.batch_norm(leaf, None, None, leaf_weight, leaf_bias, training=True)
        elif row.groups == -1:
            y = F.instance_norm(leaf, None, None, leaf_weight, leaf_bias)
        else:
            y = F.group_norm(leaf, groups, leaf_weight.to(dtype), leaf_bias.to(dtype))
        y = y + leaf_residual if row.residual else y
        y = torch.relu(y) if row.act == "relu" else y
        leaves = [leaf, leaf_weight, leaf_bias, *([leaf_residual] if row.residual else [])]
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    return [ours, torchs, lambda: [x.clone()]]


def check(ours: list[Tensor], torchs: list[Tensor], dtype: torch.dtype, kinks: bool) -> None:
    for mine, theirs in zip(ours, torchs, strict=True):
        largest = theirs.double().abs().max().item()
        # two orders of summation may differ by this much; a wrong formula differs by far more
        allowed = 64 * torch.finfo(dtype).eps * max(largest, 1.0)
        if kinks:  # relu may zero a value near 0 on one side only, which changes the sums of its channel
            allowed += 4 * FLIPPED / (1 if mine.dim() == 1 else mine.numel() // mine.shape[1])
        difference = (mine.double() - theirs.double()).abs()
        # such a value itself differs too
        off = (difference > allowed).double().mean().item()
        if off > 1e-3:
            raise SystemExit(f"nothing was timed: {off:.1%} of the values of {tuple(mine.shape)} differ")


def time_of(
    row: Row, shape: tuple[int, ...], times: int, dtype: torch.dtype, clock: Callable[[], float]
) -> Timing:
    calls = sides(row, shape, dtype)
    check(calls[0](), calls[1](), dtype, kinks=row.act != "identity")
    taken: list[list[float]] = [[], [], []]
    began = time.perf_counter()
    while len(taken[0]) < 5 or (time.perf_counter() - began < 0.3 and len(taken[0]) < 200):
        for call, into in zip(calls, taken, strict=True):
            start = clock()
            call()
            into.append(clock() - start)
    ours, torchs, clone = (median(t) for t in taken)
    return Timing(shape, times, ours, torchs, clone * (2.5 if not row.residual else 4.0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    keep_freed_memory()
    torch.ones(2**29, dtype=torch.uint8)  # freed at once: its pages are reused by the timed calls
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    print(record.processor())
    report = {}
    for row in ROWS:
        if options.only and options.only != row.name:
            continue
        timings = [
            time_of(row, shape, times, getattr(torch, options.dtype), clock) for shape, times in row.shapes
        ]
        weights = sum(t.times for t in timings)
        mean = math.exp(sum(t.times * math.log(t.torchs / t.ours) for t in timings) / weights)
        larger = sorted(timings, key=lambda t: math.prod(t.shape))[len(timings) // 2 :]
        share = median(t.floor / t.ours for t in larger)
        print(
            f"{row.name:34} {mean:5.2f}x torch's speed (goal {row.reach}x), floor {share:.2f} of the time",
            flush=True,
        )
        for t in timings:
            ratio, part = t.torchs / t.ours, t.floor / t.ours
            print(
                f"    {t.shape!s:22} {t.ours * 1e3:8.3f} ms  torch {t.torchs * 1e3:8.3f} ms {ratio:6.2f}  "
                f"floor {part:.2f}"
            )
        report[row.name] = {"ratio": mean, "floor": share, "shapes": [t._asdict() for t in timings]}
    if options.json:
        about = {**record.about(), "dtype": options.dtype}
        options.json.write_text(json.dumps({**about, "rows": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
