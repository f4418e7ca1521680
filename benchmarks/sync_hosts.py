"""Measures the latency that `scaling.py` models: network namespaces act as hosts on slow networks.

    sudo python -m benchmarks.sync_hosts [--ranks 2 4] [--delays 1 2 4 8] [--json FILE]

Needs Linux and root. Every rank runs in its own network namespace, whose only device is a tun device. This
process forwards the packets between them, each `delay` milliseconds after it was sent. The slope of a time
over the delay is the number of consecutive packets, without the time that the machine adds. With gloo, each
message of the model takes two consecutive packets, since the sender waits until the receiver is ready.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.scaling import NORMS, OURS, TORCHS, Collective, over_gloo, ring
from benchmarks.sync import Gather
from leannorm import nn

NEW_NETWORK, TUN, NO_INFORMATION, SET_INTERFACE = 0x40000000, 0x0001, 0x1000, 0x400454CA
SHAPE = (2, 64, 8, 8)  # little to compute, so that communication dominates
SUM = Collective("all_reduce", 4096)


def wire(name: str) -> int:
    """The file descriptor of a tun device `t0`, created in the namespace by a thread that enters it."""
    found: list[int] = []

    def open_inside() -> None:
        with open(f"/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, SET_INTERFACE, struct.pack("16sH22x", b"t0", TUN | NO_INFORMATION))
        found.append(descriptor)

    thread = threading.Thread(target=open_inside)
    thread.start()
    thread.join()
    return found[0]


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def hosts(number: int, stack: ExitStack) -> list[int]:
    """Make namespaces lnhost0, lnhost1, ... with addresses 10.77.0.1, .2, ...; `stack` deletes them."""
    wires = []
    for i in range(number):
        name = f"lnhost{i}"
        run("ip", "netns", "add", name)
        stack.callback(run, "ip", "netns", "del", name)
        wires.append(wire(name))
        stack.callback(os.close, wires[-1])
        inside = ("ip", "netns", "exec", name, "ip")
        run(*inside, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "t0")
        for device in ("t0", "lo"):
            run(*inside, "link", "set", device, "up")
    return wires


def carry(wires: list[int], delay: list[float], stop: threading.Event) -> None:
    """Read packets from every device and write each to its destination's device `delay[0]` seconds later."""
    waiting: list[tuple[float, int, int, bytes]] = []
    order = 0
    while not stop.is_set():
        pause = max(0.0, min(0.1, waiting[0][0] - time.monotonic())) if waiting else 0.1
        for source in select.select(wires, [], [], pause)[0]:
            packet = os.read(source, 2048)
            target = packet[19] - 1 if packet[0] >> 4 == 4 else -1
            if 0 <= target < len(wires):
                order += 1
                heapq.heappush(waiting, (time.monotonic() + delay[0], order, wires[target], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(waiting)
            os.write(target, packet)


def rank_main(rank: int, world: int, delays: list[float], repeats: int) -> None:
    """Run one rank. For each delay, rank 0 prints a request, waits for a line on stdin, and prints times."""
    torch.set_num_threads(1)
    address = "tcp://10.77.0.1:29400"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=world, timeout=timedelta(minutes=2)
    )
    torch.manual_seed(rank)
    x, dy = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
    layer, message = nn.SyncBatchNorm(SHAPE[1]), torch.zeros(SUM.bytes, dtype=torch.uint8)
    weight, bias = layer.weight, layer.bias
    sides = {
        "sum": lambda: dist.all_reduce(message),
        "shared": lambda: layer(x).backward(dy),
        "gather": lambda: Gather.apply(x, weight, bias, layer.eps).backward(dy),
    }
    for delay in delays:
        if rank == 0:
            print(json.dumps({"set": delay}), flush=True)
            sys.stdin.readline()
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(repeats):
            for name, side in sides.items():
                dist.barrier()
                start = time.perf_counter()
                side()
                times[name].append(time.perf_counter() - start)
        if rank == 0:
            print(json.dumps({name: 1e3 * median(t) for name, t in times.items()}), flush=True)
    dist.destroy_process_group()


def measure(world: int, delays: list[float], repeats: int) -> dict[float, dict[str, float]]:
    """Milliseconds of each side, by delay."""
    found, delay, stop = {}, [0.0], threading.Event()
    with ExitStack() as stack:
        wires = hosts(world, stack)
        carrier = threading.Thread(target=carry, args=(wires, delay, stop))
        carrier.start()
        stack.callback(carrier.join)
        stack.callback(stop.set)
        processes = []
        for rank in range(world):
            command = ["ip", "netns", "exec", f"lnhost{rank}", sys.executable, "-m", "benchmarks.sync_hosts"]
            command += ["--rank", str(rank), "--ranks", str(world), "--repeats", str(repeats), "--delays"]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "t0"}
            stream = subprocess.PIPE if rank == 0 else None
            process = subprocess.Popen(
                [*command, *map(str, delays)], env=environment, text=True, stdin=stream, stdout=stream
            )
            stack.callback(process.wait)
            processes.append(process)
        first = processes[0]
        assert first.stdout is not None
        assert first.stdin is not None
        for line in first.stdout:
            message = json.loads(line)
            if "set" in message:
                delay[0] = message["set"] / 1e3
                first.stdin.write("\n")
                first.stdin.flush()
            else:
                found[delay[0] * 1e3] = message
    return found


def slope(points: dict[float, float]) -> float:
    """The least-squares slope of times over delays: the number of consecutive packets."""
    x, y = (torch.tensor(list(v), dtype=torch.float64) for v in (points.keys(), points.values()))
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--delays", type=float, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options.rank, options.ranks[0], options.delays, options.repeats)
        return
    results = {}
    for world in options.ranks:
        times = measure(world, options.delays, options.repeats)
        sides = {"sum": [SUM], "shared": over_gloo(OURS, world), "gather": NORMS[TORCHS]}
        model = {name: 2 * sum(ring(c, world).messages for c in sent) for name, sent in sides.items()}
        slopes = {name: slope({d: t[name] for d, t in times.items()}) for name in model}
        results[world] = {"milliseconds": times, "wire_times": slopes, "model": model}
        print(f"{world} hosts, ms at a delay of {', '.join(f'{d:g}' for d in times)} ms; consecutive packets")
        for name, expected in model.items():
            row = "".join(f"{t[name]:9.2f}" for t in times.values())
            print(f"  {name:7s}{row}   measured {slopes[name]:5.1f}   model {expected}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
