"""SyncBatchNorm on the GPUs of one host: its cost, uneven batches, and a rank that is killed.

    python -m benchmarks.sync --nccl [--smoke] [--rounds 3] [--repeats 15] [--json FILE]

There is one rank per GPU. Results are compared with one process on the whole batch before anything is timed.
`alone` is our batch norm. `bare` adds a sum of a message's size after its forward and after its backward
pass. `shared` is SyncBatchNorm, and `torch` is torch's. A time is the wall-clock time of ten steps divided by
ten, with the device synchronized before and after: that of the slowest rank, and the median over the turns.
Then every rank takes steps with batches of ever different sizes, in which the host may not wait for a device
(torch raises if it does). Finally a rank is killed, and the others must report it. `--smoke` runs on the CPU,
over gloo, with two ranks and tiny sizes; torch's layer is then its exchange with our kernels.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
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

from benchmarks.sync import Gather
from leannorm import nn
from leannorm.distributed.call import message_size
from leannorm.report.timing import time_step

SHAPES = ((32, 64, 56, 56), (32, 256, 28, 28), (32, 2048, 7, 7))
SMALL = ((4, 6, 5, 5),)
STEPS = 10
PATIENCE = 10.0  # seconds until the others report who was killed


def sides(channels: int, device: torch.device) -> dict[str, Callable[[Tensor], Tensor]]:
    """The layers to compare. Each maps an input to its output; its backward pass is run as well."""
    sync, local = nn.SyncBatchNorm(channels, device=device), nn.BatchNorm2d(channels, device=device)
    functions: dict[str, Callable[[Tensor], Tensor]] = {"alone": local, "bare": local, "shared": sync}
    if device.type == "cuda":
        functions["torch"] = torch.nn.SyncBatchNorm(channels, device=device)
    else:
        functions["torch"] = lambda x: Gather.apply(x, local.weight, local.bias, local.eps)
    return functions


def step(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, message: Tensor | None) -> Tensor:
    y = function(x)
    if message is not None:
        dist.all_reduce(message)
    y.backward(dy)
    if message is not None:
        dist.all_reduce(message)
    x.grad = None
    return y.detach()


def slowest(seconds: float, device: torch.device) -> float:
    longest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def overhead(
    rank: int, world: int, device: torch.device, shape: tuple[int, ...], turns: int
) -> dict[str, Any]:
    """Milliseconds per step of each side; the sides alternate."""
    torch.manual_seed(0)
    whole = torch.randn(world * shape[0], *shape[1:])
    mine = slice(rank * shape[0], (rank + 1) * shape[0])
    exact = torch.nn.functional.batch_norm(whole.double(), None, None, training=True)[mine]
    x, dy = whole[mine].to(device).requires_grad_(), torch.randn(shape).to(device)
    message = torch.zeros(message_size(shape[1]), dtype=torch.float64, device=device)
    functions = sides(shape[1], device)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(turns + 2):  # the first two turns warm up
        for name, function in functions.items():
            bare = message if name == "bare" else None
            if turn == 0:
                y = step(function, x, dy, bare)
                error = (y.cpu() - exact).abs().max().item()
                assert name not in ("shared", "torch") or error < 1e-5, (name, error)
            dist.barrier()

            def steps(f: Callable[[Tensor], Tensor] = function, bare: Tensor | None = bare) -> None:
                for _ in range(STEPS):
                    step(f, x, dy, bare)

            seconds = slowest(time_step(steps, device), device) / STEPS
            if turn > 1:
                times[name].append(1e3 * seconds)
    found: dict[str, Any] = {name: median(values) for name, values in times.items()}
    found["shared_over_bare"] = median(a / b for a, b in zip(times["shared"], times["bare"], strict=True))
    return found


def uneven(rank: int, device: torch.device, shape: tuple[int, ...], turns: int) -> dict[str, Any]:
    """Milliseconds per step with batches of one size, and of ever new sizes with the same mean."""
    layer = nn.SyncBatchNorm(shape[1], device=device)
    draw = random.Random(rank)
    some = torch.randn(2 * shape[0], *shape[1:], device=device, requires_grad=True)

    def run(sizes: list[int]) -> Callable[[], None]:
        def steps() -> None:
            for size in sizes:
                layer(some[:size]).sum().backward()

        return steps

    found = {}
    same = [[shape[0]] * STEPS for _ in range(turns + 1)]
    new = [[draw.randrange(1, 2 * shape[0] + 1) for _ in range(STEPS)] for _ in range(turns + 1)]
    for name, rounds in (("one size", same), ("new sizes", new)):
        seconds = []
        for sizes in rounds:
            dist.barrier()
            seconds.append(slowest(time_step(run(sizes), device), device) / STEPS)
        found[name] = 1e3 * median(seconds[1:])
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:  # sizes that did not occur before
        run([1 + (7 * size + rank) % (2 * shape[0]) for size in range(STEPS)])()
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return found


def killed(rank: int, world: int, device: torch.device, shape: tuple[int, ...], end: Any) -> None:
    """Kill the last rank; each of the others sends the error that it got, and after how many seconds."""
    layer = nn.SyncBatchNorm(shape[1], timeout=PATIENCE, debug_consistency=True, device=device)
    x = torch.randn(shape, device=device)
    layer(x)
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        layer(x)
        said = "no error: the sum completed without the rank"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    end.send(("killed", (said, time.monotonic() - start)))


def rank_main(rank: int, world: int, port: int, smoke: bool, turns: int, end: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu") if smoke else torch.device("cuda", rank)
    if not smoke:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if smoke else "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=2),
        device_id=None if smoke else device,
    )
    for shape in SMALL if smoke else SHAPES:
        found = overhead(rank, world, device, shape, turns)
        found["batches"] = uneven(rank, device, shape, turns)
        if rank == 0:
            end.send(("shape", {"shape": shape, "milliseconds": found}))
    killed(rank, world, device, (SMALL if smoke else SHAPES)[0], end)
    end.close()
    sys.stdout.flush()
    os._exit(0)  # torch would wait for the killed rank


def measure(world: int, smoke: bool, turns: int) -> dict[str, Any]:
    """Run all ranks once, and collect what they send."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=rank_main, args=(rank, world, port, smoke, turns, sender))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    found: dict[str, Any] = {"ranks": world, "shapes": [], "killed": {}}
    for rank, (receiver, _) in enumerate(pipes):
        while True:
            try:
                kind, what = receiver.recv()
            except EOFError:
                break
            if kind == "shape":
                found["shapes"].append(what)
            else:
                said, seconds = what
                found["killed"][rank] = {"said": said, "seconds": seconds}
    for process in processes:
        process.join()
    return found


def wrong(found: dict[str, Any]) -> list[str]:
    """The failures of a run."""
    world, last = found["ranks"], f"rank {found['ranks'] - 1}"
    problems = [] if found["shapes"] else ["no rank measured anything; the exception is printed above"]
    for rank in range(world - 1):
        heard = found["killed"].get(rank, {"said": "nothing: it ended before that", "seconds": 0.0})
        if last not in heard["said"] or "SyncError" not in heard["said"] or heard["seconds"] > PATIENCE + 1:
            problems.append(
                f"{last} was killed; rank {rank} got in {heard['seconds']:.1f} s: {heard['said']}"
            )
    return problems


def main(smoke: bool, rounds: int, turns: int, out: Path | None) -> int:
    world = 2 if smoke else torch.cuda.device_count()
    if world < 2:
        print(f"--nccl needs at least 2 GPUs, and torch finds {world}; --smoke runs over gloo on the CPU")
        return 2
    measured = [measure(world, smoke, turns) for _ in range(rounds)]
    where = "gloo, CPU" if smoke else f"NCCL, {world} x {torch.cuda.get_device_name(0)}"
    print(f"one layer, forward and backward, {where}, ms; torch {torch.__version__}")
    print("shape               alone    bare  shared   torch   shared/bare   one size  new sizes")
    for run in measured:
        for line in run["shapes"]:
            found, name = line["milliseconds"], "x".join(map(str, line["shape"]))
            times = "".join(f"{found[side]:8.3f}" for side in ("alone", "bare", "shared", "torch"))
            batches = "".join(f"{found['batches'][sizes]:11.3f}" for sizes in ("one size", "new sizes"))
            print(f"{name:17s}{times}   {found['shared_over_bare']:11.3f}{batches}")
    problems = [problem for run in measured for problem in wrong(run)]
    for heard in measured[-1]["killed"].values():
        print(f"{heard['seconds']:.1f} s after a rank was killed: {heard['said']}")
    print("\n".join(f"WRONG: {problem}" for problem in problems) or "everything is as it should be")
    if out:
        out.write_text(json.dumps({"where": where, "measured": measured, "wrong": problems}, indent=2))
    return int(bool(problems))
