"""The cost of SyncBatchNorm, measured on gloo ranks. `scaling.py` models more ranks.

    python -m benchmarks.sync [--ranks 1 2 4] [--shapes 8x64x56x56] [--rounds 3] [--repeats 15] [--as-is]
                              [--json FILE]
    python -m benchmarks.sync --nccl [--smoke]          # on the GPUs of one host: see sync_nccl.py

Every rank runs one layer forward and backward, by default on 8 x 64 x 56 x 56 values. The result is checked
against one process before anything is timed. The sides alternate. A time is that of the slowest rank, and the
median over the repeats. The CPU time is that of rank 0, including its gloo threads. Every round starts new
processes. Each rank is bound to a core and keeps freed memory, so that the scheduler and page faults do not
change the times; `--as-is` does neither.

`alone` is leannorm's layer without sharing. `bare` adds an all-reduce of the size of SyncBatchNorm's message
after the forward pass and after the backward pass. `floor` is nothing but the four kernels of a shared layer
and these two sums; the kernels after the sums read the tensors a second time. `shared` is SyncBatchNorm.
`gather` is torch's exchange (an all-gather of 2 C + 1 values, then an all-reduce of 2 C) with leannorm's
kernels.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import record
from leannorm import nn
from leannorm._freed_memory import keep_freed_memory
from leannorm._types import KeptByChannelNorm, Moments
from leannorm.distributed.call import message_size
from leannorm.ops.backends import REFERENCE
from leannorm.ops.select import pick

SHAPE = (8, 64, 56, 56)
SIDES = ("alone", "bare", "floor", "shared", "gather")
REACH = 1.15  # the goal for shared / bare, on 4 ranks


def merged_of(moments: Moments) -> Moments:
    """Merge the ranks' statistics, which are stacked along axis 0."""
    assert isinstance(moments.count, Tensor)
    total = moments.count.sum(0)
    mean = (moments.mean * moments.count).sum(0) / total.clamp_min(1)
    between = (moments.count * (moments.mean - mean).square()).sum(0)
    return Moments(mean, moments.m2.sum(0) + between, total)


class Gather(torch.autograd.Function):
    """The exchange of torch.nn.SyncBatchNorm: an all-gather of every rank's mean, 1/std and count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        backend = pick(x, weight, bias)
        local = backend.channel_moments(x)
        rstd = REFERENCE.rstd_of(local, eps)
        mine = torch.cat((local.mean, rstd, torch.tensor([float(local.count)], dtype=rstd.dtype))).float()
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        mean, rstd, count = torch.stack(every).double().split((x.shape[1], x.shape[1], 1), dim=1)
        merged = merged_of(Moments(mean, (rstd.pow(-2) - eps) * count, count))
        rstd, total = REFERENCE.rstd_of(merged, eps), count.sum()
        ctx.save_for_backward(x, merged.mean, rstd, weight, total)
        ctx.backend = backend
        return backend.channel_normalize(KeptByChannelNorm(x, merged.mean, rstd, weight, bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, count = ctx.saved_tensors
        kept = KeptByChannelNorm(x, mean, rstd, weight)
        dbias, dweight = ctx.backend.channel_grad_sums(dy, kept)
        sums = torch.cat((dbias, dweight)).float()
        dist.all_reduce(sums)
        of_bias, of_weight = sums.double().chunk(2)
        means = REFERENCE.channel_means((of_bias, of_weight), weight, 0, count)
        dx, _ = ctx.backend.channel_input_grad(dy, kept, means)
        return dx, dweight.to(weight.dtype), dbias.to(weight.dtype), None


class Floor(torch.autograd.Function):
    """The kernels before and after each of the two sums; `exchange` is the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, exchange: Callable[[], object]) -> Tensor:
        backend = pick(x, weight, bias)
        mean = rstd = backend.channel_moments(x).mean
        exchange()
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.backend, ctx.exchange = backend, exchange
        return backend.channel_normalize(KeptByChannelNorm(x, mean, rstd, weight, bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept = KeptByChannelNorm(*ctx.saved_tensors)
        sums = dbias, dweight = ctx.backend.channel_grad_sums(dy, kept)
        ctx.exchange()
        dx, _ = ctx.backend.channel_input_grad(dy, kept, sums)
        return dx, dweight, dbias, None


def sides(x: Tensor, dy: Tensor, channels: int) -> dict[str, Callable[[], Tensor]]:
    """The functions to time: each runs forward and backward once and returns the output."""
    sync, local = nn.SyncBatchNorm(channels), nn.BatchNorm2d(channels)
    message = torch.zeros(message_size(channels), dtype=torch.float64)

    def step(layer: Callable[[Tensor], Tensor], exchange: Callable[[], object] = lambda: None) -> Tensor:
        y = layer(x)
        exchange()
        y.backward(dy)
        exchange()
        x.grad = None
        return y.detach()

    def bare() -> None:
        dist.all_reduce(message)

    return {
        "alone": lambda: step(local),
        "bare": lambda: step(local, bare),
        "floor": lambda: step(lambda v: Floor.apply(v, local.weight, local.bias, bare)),
        "shared": lambda: step(sync),
        "gather": lambda: step(lambda v: Gather.apply(v, local.weight, local.bias, local.eps)),
    }


def rank_main(
    rank: int, world: int, port: int, shape: tuple[int, ...], repeats: int, as_is: bool, end: Any
) -> None:
    torch.set_num_threads(1)
    if not as_is:
        keep_freed_memory()
        if hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=world, timeout=timedelta(minutes=2)
    )
    torch.manual_seed(0)
    whole = torch.randn(world * shape[0], *shape[1:])
    mine = slice(rank * shape[0], (rank + 1) * shape[0])
    exact = torch.nn.functional.batch_norm(whole.double(), None, None, training=True)[mine]
    x, dy = whole[mine].clone().requires_grad_(), torch.randn(shape)
    functions = sides(x, dy, shape[1])
    errors = {name: (functions[name]() - exact).abs().max().item() for name in ("shared", "gather")}
    assert errors["shared"] < 2e-6, errors
    times: dict[str, list[float]] = {name: [] for name in functions}
    busy: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            dist.barrier()
            start, processor = time.perf_counter(), time.process_time()
            function()
            busy[name].append(time.process_time() - processor)
            slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[name].append(slowest.item())
    if rank == 0:
        end.send((times, busy, errors))
    dist.barrier()
    dist.destroy_process_group()


def measure(world: int, shape: tuple[int, ...], repeats: int, as_is: bool) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    processes = [
        context.Process(target=rank_main, args=(rank, world, port, shape, repeats, as_is, sender))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    times, busy, errors = receiver.recv()
    for process in processes:
        process.join()

    def ratio(of: dict[str, list[float]], side: str, other: str) -> float:
        return median(a / b for a, b in zip(of[side], of[other], strict=True))

    return {
        "ranks": world,
        "shape": "x".join(map(str, shape)),
        "milliseconds": {name: 1e3 * median(values) for name, values in times.items()},
        "processor_milliseconds": {name: 1e3 * median(values) for name, values in busy.items()},
        "shared_over_bare": ratio(times, "shared", "bare"),
        "floor_over_bare": ratio(times, "floor", "bare"),
        "shared_over_floor": ratio(times, "shared", "floor"),
        "processor_shared_over_bare": ratio(busy, "shared", "bare"),
        "largest_error": errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--shapes", nargs="+", default=["x".join(map(str, SHAPE))], metavar="NxCxHxW")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--as-is", action="store_true")
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.smoke and not options.nccl:
        parser.error("--smoke is for --nccl: name both, or neither")
    if options.nccl:
        from benchmarks import sync_nccl

        sys.exit(sync_nccl.main(options.smoke, options.rounds, options.repeats, options.json))
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    rounds = [(n, shape, k) for shape in shapes for n in options.ranks for k in range(options.rounds)]
    measured = [
        {**measure(world, shape, options.repeats, options.as_is), "round": k, "as_is": options.as_is}
        for world, shape, k in rounds
    ]
    print(
        f"one layer, forward and backward, gloo on this machine, ms (goal of shared/bare, 4 ranks: {REACH})"
    )
    print(
        f"{'shape':14s}ranks{''.join(f'{side:>8s}' for side in SIDES)}   shared/bare floor/bare shared/floor"
    )
    for line in measured:
        times = "".join(f"{line['milliseconds'][name]:8.2f}" for name in SIDES)
        ratios = f"{line['shared_over_bare']:14.2f}{line['floor_over_bare']:11.2f}"
        ratios += f"{line['shared_over_floor']:13.2f}"
        print(f"{line['shape']:14s}{line['ranks']:5d}{times}{ratios}")
        busy = "".join(f"{line['processor_milliseconds'][name]:8.2f}" for name in SIDES)
        print(f"   CPU time        {busy}{line['processor_shared_over_bare']:14.2f}")
    if options.json:
        record.write(options.json, measured, "ranks", "shape", "round", "as_is")


if __name__ == "__main__":
    main()
