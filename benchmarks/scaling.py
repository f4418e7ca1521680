"""What norms and `lean()` send on 8 to 16,384 ranks: a model, compared with gloo ranks on this machine.

    python -m benchmarks.scaling [--ranks 2 4 8] [--repeats 40] [--json FILE]

Prints these tables. *model*: consecutive messages, bytes that a rank sends, and microseconds, for a training
step of a layer. *recorded*: the collectives that a step asks for, next to the model's, on real ranks and, for
DTensors, on torch's fake backend with up to 16,384 ranks. *wire*: the bytes that rank 0's sockets sent.
*time*: each exchange, next to the model with the latency and bandwidth of a ping between two of the same
ranks. *waiting*: how long ranks wait for each other if their steps take unequal time. Each rank is bound to a
core.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from leannorm.distributed.call import message_size
from leannorm.distributed.communicator import _GATHERED

CHANNELS = 64  # of the layers below, and the width of their rows
TOKENS = (2, 16)  # of the row norms: samples and positions on a rank
GROUPS = (2, 8)  # of the group norm: samples, groups
PLAN = 64  # bytes: whether each saved tensor is rebuilt
RANKS = (8, 64, 512, 4096, 16384)

# seconds per message, bytes per second: published orders of magnitude
NETWORKS = {
    "NVLink, one host": (3e-6, 200e9),
    "InfiniBand": (5e-6, 25e9),
    "TCP, 10 Gbit/s": (50e-6, 1.25e9),
}


class Collective(NamedTuple):
    """A collective of all ranks; each of them contributes `bytes`."""

    kind: str
    bytes: int


class Cost(NamedTuple):
    """Consecutive messages, the bytes that the busiest rank sends, and those sent one after another."""

    messages: int
    bytes: float
    path: float

    def seconds(self, latency: float, bandwidth: float) -> float:
        return self.messages * latency + self.path / bandwidth


def ring(of: Collective, ranks: int) -> Cost:
    """The cost around a ring, as in gloo, and in NCCL for large messages; a broadcast takes a tree."""
    if of.kind == "broadcast":
        return tree(of, ranks)
    of_others = of.bytes * (ranks - 1)
    if of.kind == "all_gather":
        return Cost(ranks - 1, of_others, of_others)
    both = 2 * of_others / ranks  # a reduce-scatter, then an all-gather
    return Cost(2 * (ranks - 1), both, both)


def tree(of: Collective, ranks: int) -> Cost:
    """The cost of log2(ranks) messages: NCCL's trees, and for gathers its PAT algorithm (2.23 and later)."""
    depth = (ranks - 1).bit_length()
    if of.kind == "all_gather":  # each message has twice the bytes of the one before
        return Cost(depth, of.bytes * (ranks - 1), of.bytes * (ranks - 1))
    if of.kind == "broadcast":
        return Cost(depth, of.bytes * depth, of.bytes * depth)
    return Cost(2 * depth, 2 * of.bytes, 2 * depth * of.bytes)


def _sum(numbers: int) -> Collective:
    """A sum of this library's statistics: a header, then four numbers per channel."""
    return Collective("all_reduce", 8 * message_size(numbers))


def _of_weights(width: int) -> list[Collective]:
    return [Collective("all_reduce", 4 * width)] * 2


_INPUT = 4 * math.prod(TOKENS) * CHANNELS  # bytes of a rank's part of the input of a row norm
OURS, TORCHS = "SyncBatchNorm", "torch.nn.SyncBatchNorm"
GROUP, PLANS = "group norm, positions cut", "lean(), if rank 0's plan were sent"
# what a training step of one layer sends in float32; sharded norms also sum the weights' gradients
NORMS: dict[str, list[Collective]] = {
    "batch norm": [],
    OURS: [_sum(CHANNELS)] * 2,
    TORCHS: [Collective("all_gather", 4 * (2 * CHANNELS + 1)), Collective("all_reduce", 8 * CHANNELS)],
    "layer norm, whole on each rank": [],
    "layer norm, positions cut": _of_weights(CHANNELS),
    "layer norm, rows cut": [Collective("all_gather", _INPUT)],
    GROUP: [_sum(math.prod(GROUPS))] * 2 + _of_weights(CHANNELS),
    "lean()": [],
    PLANS: [Collective("broadcast", PLAN)],
}


def over_gloo(norm: str, ranks: int) -> list[Collective]:
    """The collectives over gloo on CPUs, where this library gathers small sums."""
    sums = (_sum(CHANNELS), _sum(math.prod(GROUPS)))
    return [
        Collective("all_gather", c.bytes) if c in sums and c.bytes * ranks <= 8 * _GATHERED else c
        for c in NORMS[norm]
    ]


def sums_by_tree(of: Collective, ranks: int) -> Cost:
    """The cost if gathers go around a ring, as in NCCL with several GPUs per host."""
    return ring(of, ranks) if of.kind == "all_gather" else tree(of, ranks)


def model(norm: str, ranks: int, latency: float, bandwidth: float) -> dict[str, Any]:
    """A layer's step, each collective by the faster of ring and tree. `by_ring`: gathers have no tree."""

    def seconds(cost: Cost) -> float:
        return cost.seconds(latency, bandwidth)

    def best(by_tree: Callable[[Collective, int], Cost]) -> list[Cost]:
        return [min(ring(c, ranks), by_tree(c, ranks), key=seconds) for c in NORMS[norm]]

    costs, gathered = best(tree), best(sums_by_tree)
    return {
        "messages": sum(c.messages for c in costs),
        "bytes": round(sum(c.bytes for c in costs)),
        "us": round(1e6 * sum(map(seconds, costs)), 1),
        "messages_by_ring": sum(c.messages for c in gathered),
        "us_by_ring": round(1e6 * sum(map(seconds, gathered)), 1),
    }


def modelled() -> list[dict[str, Any]]:
    return [
        {"table": "model", "norm": norm, "network": name, "ranks": ranks, **model(norm, ranks, *network)}
        for name, network in NETWORKS.items()
        for norm in NORMS
        for ranks in RANKS
        if ranks == 8 or "one host" not in name
    ]


def slowest(ranks: int) -> float:
    """The expected maximum of this many normal numbers: how long a sum waits, in spreads of a step.

    Computes the integral of x d(Phi(x)^p) by the midpoint rule.
    """
    width, total, before = 1e-3, 0.0, 0.0
    for i in range(20_000):
        x = -10 + (i + 1) * width
        below = (0.5 * math.erfc(-x / math.sqrt(2))) ** ranks
        total += (x - width / 2) * (below - before)
        before = below
    return total


def waiting() -> list[dict[str, Any]]:
    return [
        {"table": "spread", "norm": "", "network": "", "ranks": p, "model": round(slowest(p), 3)}
        for p in RANKS
    ]


FRAMES = 288  # bytes of gloo's six frames per message: two parts, each requested and acknowledged
BROADCAST = 96  # of a broadcast's two frames: it has one part


def _frames(of: Collective) -> int:
    return BROADCAST if of.kind == "broadcast" else FRAMES


def on_the_wire(collectives: list[Collective], ranks: int) -> int:
    """The bytes that the sockets of gloo's rank 0 send: payload and gloo's frames."""
    costs = [(ring(c, ranks), _frames(c)) for c in collectives]
    return round(sum(cost.bytes + cost.messages * frames for cost, frames in costs))


def over_loopback(collectives: list[Collective], ranks: int, latency: float, bandwidth: float) -> float:
    """Seconds over gloo. `latency` is for a message of six frames; a message of two takes a third."""
    return sum(ring(c, ranks).seconds(latency * _frames(c) / FRAMES, bandwidth) for c in collectives)


def told(rows: list[dict[str, Any]]) -> str:
    """Format the rows, one table after another."""
    lines = []
    for name in dict.fromkeys(row["table"] for row in rows):
        of = [{k: v for k, v in row.items() if k != "table"} for row in rows if row["table"] == name]
        lines += [f"\n{name}", " | ".join(of[0])]
        lines += [" | ".join(map(str, row.values())) for row in of]
    return "\n".join(lines)


def main() -> None:
    from benchmarks import record, scaling_ranks

    parser = argparse.ArgumentParser(
        prog="benchmarks.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ranks = "numbers of gloo ranks to start; with none, only the model runs"
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8], help=ranks)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [*modelled(), *waiting()]
    rows += scaling_ranks.faked(RANKS)
    for ranks in options.ranks:
        rows += scaling_ranks.measured(ranks, options.repeats)
    print(told(rows))
    if options.json:
        record.write(options.json, rows, "table", "norm", "network", "ranks")


if __name__ == "__main__":
    main()
