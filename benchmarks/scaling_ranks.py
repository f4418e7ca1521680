"""The ranks of `benchmarks.scaling`: what the steps of norms request, send and take, in real processes.

The ranks use gloo over loopback, each bound to a core. What DTensors send is also recorded as rank 0 of
thousands, with torch's fake backend, whose collectives return at once.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import scaling
from benchmarks.scaling import CHANNELS, NORMS, OURS, PLANS, TORCHS, Collective
from benchmarks.scaling_steps import Recorder, Step, row_norms, steps, torchs_kernels, under_lean
from leannorm import nn

SPREAD = 4e-3  # seconds: the standard deviation of the ranks' unequal steps


# ------------------------------------------------ what sockets send, and how long it takes


def sent_by_sockets() -> int:
    """The bytes that this process has sent over TCP, without headers and retransmissions; Linux alone."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as end:
                if end.type == socket.SOCK_STREAM and end.family in (socket.AF_INET, socket.AF_INET6):
                    told = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    sent, again = struct.unpack_from("QQ", told, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
                    total += sent - again
        except OSError:  # closed in the meantime, or not connected
            continue
    return total


def _settled() -> int:
    before = -1
    while (now := sent_by_sockets()) != before:
        before = now
        time.sleep(0.05)
    return now


def on_the_wire(step: Step, times: int = 5) -> float:
    """The bytes that this rank sends per step, the median of three counts, since frames may be late."""
    counts = []
    for _ in range(3):
        dist.barrier()
        time.sleep(0.1)  # the last frames are on their way
        before = _settled()
        time.sleep(0.1)  # until every rank has counted
        for _ in range(times):
            step()
        counts.append((_settled() - before) / times)
    return median(counts)


def _seconds(step: Step, repeats: int, in_a_row: int = 10) -> float:
    """The lower quartile of the slowest rank's seconds, since other processes may be running."""
    times = []
    for _ in range(repeats + 3):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(in_a_row):
            step()
        slowest = torch.tensor([(time.perf_counter() - start) / in_a_row], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
    return quantiles(times[3:], method="inclusive")[0]


def _runs(of: Collective, world: int) -> Step:
    given = torch.zeros(of.bytes, dtype=torch.uint8)
    if of.kind == "all_gather":
        every = [torch.empty_like(given) for _ in range(world)]
        return lambda: dist.all_gather(every, given)
    if of.kind == "broadcast":
        return lambda: dist.broadcast(given, 0)
    numbers = given.view(torch.float32)
    return lambda: dist.all_reduce(numbers)


def ping(repeats: int) -> tuple[float, float]:
    """Seconds per message and bytes per second of gloo's ring with only ranks 0 and 1."""
    pair = dist.new_group([0, 1])
    taken = []
    for size in (8, 2**20):
        given = torch.zeros(size, dtype=torch.uint8)
        found = [torch.empty_like(given) for _ in range(2)]

        def exchange(given: Tensor = given, found: list[Tensor] = found) -> None:
            if dist.get_rank() < 2:
                dist.all_gather(found, given, group=pair)

        taken.append(_seconds(exchange, repeats))
    latency, large = taken
    return latency, 2**20 / max(large - latency, 1e-9)


def waited(world: int, sums: int) -> tuple[float, float]:
    """The mean wait for a sum if ranks take unequal time for their steps, and the spread of these times.

    A rank's wait is its time in the call minus that of the last rank to arrive, which waits for no other.
    """
    layer, x = nn.SyncBatchNorm(CHANNELS), torch.randn(2, CHANNELS, 1, 1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    steps, calls = torch.zeros(2, sums, dtype=torch.float64)
    layer(x)
    for i in range(sums):
        start = time.perf_counter()
        time.sleep(max(0.0, SPREAD * (5 + torch.randn((), generator=draw).item())))
        middle = time.perf_counter()
        layer(x)
        steps[i], calls[i] = middle - start, time.perf_counter() - middle
    shortest, spread = calls.clone(), steps.std()
    dist.all_reduce(shortest, dist.ReduceOp.MIN)
    mine = torch.stack([(calls - shortest).mean(), spread])
    dist.all_reduce(mine)
    wait, spread_of_all = (mine / world).tolist()
    return wait, spread_of_all


# ------------------------------------------------ processes


def _row(table: str, norm: str, network: str, ranks: int, **values: Any) -> dict[str, Any]:
    return {"table": table, "norm": norm, "network": network, "ranks": ranks, **values}


def _compared(
    norm: str, network: str, ranks: int, found: list[Collective], expected: list[Collective]
) -> Any:
    def words(of: list[Collective]) -> list[str]:
        return [f"{c.kind} {c.bytes}" for c in of]

    return _row("recorded", norm, network, ranks, found=words(found), model=words(expected))


def _work(rank: int, world: int, file: str, how: tuple[int, float], end: Any) -> None:
    repeats, load = how
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    library, rows = torchs_kernels(), []
    for norm, step in steps(world).items():
        for _ in range(2):  # the first steps connect the ranks
            step()
        with Recorder() as recorder:
            step()
        expected = scaling.over_gloo(norm, world)
        rows.append(_compared(norm, "gloo", world, recorder.found, expected))
        sent = {"bytes": on_the_wire(step), "model": scaling.on_the_wire(expected, world)}
        rows.append(_row("wire", norm, "gloo", world, **sent))
    stock, planned, equal = under_lean(world)
    added = [c for c in planned if c not in stock] + planned[len(stock) :]
    rows.append(_compared("lean()", "gloo", world, added, NORMS["lean()"]))
    rows.append(_row("plans", "lean()", "gloo", world, equal=equal, collectives=len(stock)))
    latency, bandwidth = ping(repeats)
    speed = {"latency_us": round(1e6 * latency, 1), "bandwidth_gb_s": round(bandwidth / 1e9, 2)}
    rows.append(_row("ping", "", "gloo", world, **speed, cores=os.cpu_count(), load=load))
    for norm in (OURS, TORCHS, "layer norm, positions cut", PLANS):
        parts = scaling.over_gloo(norm, world)
        taken = sum(_seconds(_runs(c, world), repeats) for c in parts)
        model = scaling.over_loopback(parts, world, latency, bandwidth)
        micros = {"us": round(1e6 * taken, 1), "model_us": round(1e6 * model, 1)}
        rows.append(_row("time", norm, "gloo", world, **micros, error=round(taken / model - 1, 2)))
    wait, spread = waited(world, 2 * repeats)
    model = scaling.slowest(world)
    rows.append(
        _row("waiting", OURS, "gloo", world, spreads=round(wait / spread, 2), model=round(model, 2),
             error=round(wait / spread / model - 1, 2), spread_ms=round(1e3 * spread, 2))
    )  # fmt: skip
    if rank == 0:
        end.send(rows)
    dist.barrier()
    dist.destroy_process_group()
    del library


def measured(world: int, repeats: int) -> list[dict[str, Any]]:
    """Start this many gloo ranks, and return the rows of rank 0."""
    return _started(world, _work, (repeats, round(os.getloadavg()[0], 1)))


def _fake(rank: int, world: int, file: str, worlds: Sequence[int], end: Any) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rows = []
    for ranks in worlds:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        for norm, step in row_norms(ranks).items():
            with Recorder() as recorder:
                step()
            rows.append(_compared(norm, "fake", ranks, recorder.found, NORMS[norm]))
        dist.destroy_process_group()
    end.send(rows)


def faked(worlds: Sequence[int]) -> list[dict[str, Any]]:
    """What rank 0 of this many ranks requests, by torch's fake backend."""
    return _started(1, _fake, worlds)


def _started(world: int, function: Callable[..., None], argument: Any) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=function, args=(rank, world, store, argument, sender))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        sender.close()
        try:
            rows: list[dict[str, Any]] = receiver.recv()  # EOFError: the ranks have printed why they ended
        finally:
            for process in processes:
                process.join()
            if interface is None:
                del os.environ["GLOO_SOCKET_IFNAME"]
            else:
                os.environ["GLOO_SOCKET_IFNAME"] = interface
    return rows
